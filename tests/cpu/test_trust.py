"""What ranks are trusted with, and what is kept from others: no code, no port, no file."""

from __future__ import annotations

import ast
import json
import os
import pickle
import stat
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from test_import_direction import imported_names, source_files

from ulysses_ops import AgreementError, PeerTimeoutError, mapping
from ulysses_ops.agreement import Agreement, join
from ulysses_ops.copy_engine import CopyEngineGroup
from ulysses_ops.post_mortem import PostMortem
from ulysses_ops.tools.launch import local_store

ROOT = Path(__file__).resolve().parents[2]

# ---- nothing that a peer sends is run ------------------------------------------------------------

# What runs code that is in its input, or unpickles it.
DANGEROUS_MODULES = ("pickle", "cPickle", "dill", "marshal", "shelve", "cloudpickle")
DANGEROUS_CALLS = (
    "eval", "exec", "torch.load", "all_gather_object", "gather_object", "scatter_object_list",
    "broadcast_object_list", "send_object_list", "recv_object_list",
)  # fmt: skip


def dangers(source: str) -> Iterator[str]:
    tree = ast.parse(source)
    for name in imported_names(tree, "ulysses_ops"):
        if name.split(".")[0] in DANGEROUS_MODULES:
            yield name
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in DANGEROUS_CALLS or called.split(".")[-1] in DANGEROUS_CALLS[3:]:
                yield called


@pytest.mark.parametrize("path", source_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_is_unpickled_or_evaluated(path: Path) -> None:
    assert list(dangers(path.read_text())) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "def f():\n    import marshal",
        "import torch.distributed as dist\ndist.all_gather_object([], 1)",
        "torch.load(path)",
        "eval(text)",
    ],
)
def test_control_dangers_are_seen(source: str) -> None:
    assert list(dangers(source))


class Bomb:
    """Runs a command when it is unpickled."""

    def __init__(self, command: str) -> None:
        self._command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self._command,)


@pytest.mark.parametrize(
    "posted", ["", "\x00", "[1, 2]", "{}", '"text"', '{"topic": 3, "record": {}}', '{"topic": "t"}']
)
def test_a_record_that_is_none_is_refused_by_name(posted: str) -> None:
    store = dist.HashStore()
    meetings = Agreement(store, "session", 0, 2, 5.0)
    store.set("session/0/1", posted)
    with pytest.raises(AgreementError, match="reserve: what rank 1 posted is"):
        meetings.exchange("reserve", {})


def test_a_pickle_that_a_peer_posts_is_not_run(tmp_path: Path) -> None:
    trace = tmp_path / "it ran"
    bomb = pickle.dumps(Bomb(f"touch '{trace}'"), protocol=0).decode("ascii")
    pickle.loads(bomb.encode("ascii"))
    assert trace.exists()  # control: it would
    trace.unlink()
    store = dist.HashStore()
    store.set("session/0/1", bomb)
    with pytest.raises(AgreementError, match="is not JSON"):
        Agreement(store, "session", 0, 2, 5.0).exchange("reserve", {})
    store.set("name/hello/1", bomb)
    with pytest.raises(AgreementError, match="is not JSON"):
        join(store, "name", 0, 2, 5.0)
    assert not trace.exists()


@pytest.mark.parametrize("posted", ["[]", "{}", "7", '{"0": "x"}'])
def test_a_greeting_of_another_kind_is_as_none(posted: str) -> None:
    store = dist.HashStore()
    store.set("name/hello/1", posted)
    with pytest.raises(AgreementError, match=r"for ranks \[1\]"):
        join(store, "name", 0, 2, 0.3)


# ---- memory --------------------------------------------------------------------------------------


class NotedStore(dist.HashStore):
    """Notes what is written, and under which keys."""

    def __init__(self) -> None:
        super().__init__()
        self.written: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        self.written[key] = value
        super().set(key, value)


def test_memory_is_opened_by_members_alone() -> None:
    """Handles travel under keys of the session, and each rank opens those of its peers."""
    store = NotedStore()
    world_size = 3
    opened: dict[int, list[tuple[list[int], int]]] = {rank: [] for rank in range(world_size)}
    here = threading.local()

    def open_handle(handle: list[int], index: int) -> int:
        opened[here.rank].append((handle, index))
        return 1

    ops = mock.Mock()
    ops._ipc_allocate.side_effect = lambda num_bytes, index: 0x1000 * (index + 1)
    ops._ipc_export.side_effect = lambda pointer: [pointer] * 8
    ops._ipc_open.side_effect = open_handle

    def work(rank: int) -> None:
        here.rank = rank
        group = mock.Mock()
        group.rank.return_value = rank
        meetings = Agreement(store, "session", rank, world_size, 10.0)
        mapping._allocate_ipc(64, group, torch.device("cuda", rank), meetings)

    with (
        mock.patch.object(torch.ops, "ulysses", ops),
        mock.patch.object(torch, "as_tensor"),
        ThreadPoolExecutor(world_size) as threads,
    ):
        list(threads.map(work, range(world_size)))
    for rank in range(world_size):
        peers = [peer for peer in range(world_size) if peer != rank]
        assert opened[rank] == [([0x1000 * (peer + 1)] * 8, rank) for peer in peers]
    assert all(key.startswith("session/") for key in store.written)
    assert any('"handle"' in value for value in store.written.values())


# ---- sockets -------------------------------------------------------------------------------------


def listens_on(port: int) -> list[str]:
    """Addresses, in hexadecimal, on which this machine listens at a port."""
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            address, _, at = fields[1].partition(":")
            if int(at, 16) == port and fields[3] == "0A":
                found.append(address)
    return found


def test_the_launcher_meets_on_this_machine_alone() -> None:
    store = local_store()
    assert listens_on(store.port) == ["0100007F"]  # 127.0.0.1
    dist.TCPStore("127.0.0.1", store.port, is_master=False).set("key", "value")
    assert store.get("key") == b"value"


def test_control_a_store_by_itself_is_open_to_all() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert listens_on(store.port) != ["0100007F"]


# ---- files ---------------------------------------------------------------------------------------


class GaveUp:
    """An engine that has given up, as the post mortem asks it."""

    def failure(self, *, look: bool = False) -> str:
        return "a peer is late"

    def exchange_log(self) -> list[tuple[float, str]]:
        return [(1.0, "open of window 'w'")]


def dump(folder: Path, name: str = "0/comm") -> Path:
    post_mortem = PostMortem(name, 1, 2, folder)
    for _ in range(2):  # the second time it is there
        with pytest.raises(PeerTimeoutError, match="its latest exchanges are in"):
            post_mortem.raise_failure("check", cast(CopyEngineGroup, GaveUp()))
    return folder / f"{name.replace('/', '_')}-rank1.json"


@pytest.fixture
def open_to_all() -> Iterator[None]:
    """A mask that forbids nothing."""
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.usefixtures("open_to_all")
def test_a_dump_is_for_its_owner_alone(tmp_path: Path) -> None:
    path = dump(tmp_path / "new" / "folder")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert path.stat().st_uid == os.getuid()
    assert json.loads(path.read_text())["gave_up"] == "a peer is late"
    assert list(path.parent.iterdir()) == [path]  # nothing unfinished is left


def test_a_dump_writes_through_no_link(tmp_path: Path) -> None:
    """Whoever may write into the folder could else choose what this rank overwrites."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    folder = tmp_path / "shared"
    folder.mkdir()
    link = folder / "0_comm-rank1.json"
    link.symlink_to(victim)
    path = dump(folder)
    assert not path.is_symlink()
    assert victim.read_text() == "precious"
    link.unlink()
    link.symlink_to(victim)
    link.write_text("control")
    assert victim.read_text() == "control"


def test_a_dump_of_an_earlier_run_is_replaced(tmp_path: Path) -> None:
    stale = tmp_path / "0_comm-rank1.json"
    stale.write_text("of an earlier run")
    assert json.loads(dump(tmp_path).read_text())["rank"] == 1


def test_sessions_have_names_that_nobody_can_guess() -> None:
    with (
        mock.patch("ulysses_ops.agreement.secrets.token_hex", side_effect=["a" * 16]) as drawn,
        pytest.raises(AgreementError),
    ):
        join(dist.HashStore(), "name", 0, 2, 0.1)
    drawn.assert_called_once_with(8)
