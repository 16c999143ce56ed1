"""UlyssesCommunicator: construction is agreed, or refused by all alike; names come and go."""

from __future__ import annotations

import gc
import os
import sys
import time
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankPool
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from whole_tensors import check_service, numbered

from ulysses_ops import (
    AgreementError,
    TopologyError,
    UlyssesCommunicator,
    UlyssesError,
    WindowSpec,
    gather,
    reserve,
    scatter,
)
from ulysses_ops.names import find_communicator

Ranks = Callable[[int], RankPool]


# ---- construction --------------------------------------------------------------------------------


def attributes(rank: int, world_size: int) -> tuple[Any, ...]:
    with UlyssesCommunicator(timeout_s=10) as comm:
        assert (comm.rank, comm.world_size) == (rank, world_size)
        assert comm.device == torch.device("cpu")
        assert comm.group is not None
        assert comm.group is dist.group.WORLD
        assert comm.name == comm.group.group_name
        assert find_communicator(comm.name, world_size, "test") is comm
        assert (comm.mapping, comm.signal, comm.copy_engine) == (None, None, None)
        assert comm.token.shape == (1,)
        assert "transport='gloo'" in repr(comm)
        assert not comm.closed
    assert comm.closed
    comm.close()
    return comm.transport, comm.reasons


def test_what_it_tells_of_itself(ranks: Ranks) -> None:
    assert (
        ranks(2).run(attributes, timeout_s=20) == [("gloo", ("every rank has a CPU device",))] * 2
    )


def of_a_mesh(rank: int, world_size: int) -> None:
    whole = init_device_mesh("cpu", (world_size,))
    with UlyssesCommunicator(whole, timeout_s=10) as comm:
        assert (comm.rank, comm.world_size) == (rank, world_size)
        check_service(comm)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "ulysses"))
    with (
        UlyssesCommunicator(mesh["ulysses"], timeout_s=10) as comm,
        UlyssesCommunicator(mesh["data"], timeout_s=10) as across,
    ):
        assert comm.group is mesh.get_group("ulysses")
        assert (comm.rank, across.rank) == (rank % 2, rank // 2)
        assert comm.device == torch.device("cpu")
        check_service(comm)
        check_service(across)
    with pytest.raises(ValueError, match="a communicator spans one; pass mesh\\['ulysses'\\], say"):
        UlyssesCommunicator(mesh, timeout_s=10)
    first = DeviceMesh("cpu", [0, 1])
    if rank < 2:
        with UlyssesCommunicator(first, timeout_s=10) as comm:
            check_service(comm)
    else:
        with pytest.raises(ValueError, match="this process is not a rank of the group given"):
            UlyssesCommunicator(first, timeout_s=10)


def test_dimensions_of_a_mesh(ranks: Ranks) -> None:
    ranks(4).run(of_a_mesh, timeout_s=40)


def test_one_process_without_a_group_is_one_rank() -> None:
    assert not dist.is_initialized()
    with UlyssesCommunicator(device="cpu") as comm:
        assert (comm.name, comm.rank, comm.world_size, comm.group) == ("ulysses", 0, 1, None)
        assert comm.transport == "local"
        assert "there is no peer" in comm.reasons[0]
        check_service(comm)
    with UlyssesCommunicator(name="mine", device="cpu", transport="gloo") as comm:
        assert find_communicator("mine", 1, "test") is comm


def test_a_fork_is_told_to_construct_its_own() -> None:
    with UlyssesCommunicator(device="cpu") as comm:
        child = os.fork()
        if child == 0:
            try:
                scatter(torch.zeros(1, 2, 2, 2), comm)
            except UlyssesError as error:
                os._exit(7 if "construct one in each process" in str(error) else 1)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 7
        check_service(comm)  # the parent's goes on


WRONG: dict[str, tuple[list[dict[str, Any]], type[Exception], str]] = {
    "transport": ([{"transport": "carrier"}] * 2, ValueError, "rank 0: .*'carrier' must be one of"),
    "mapping": ([{}, {"mapping": "mmap"}], ValueError, "rank 1: ValueError: mapping='mmap'"),
    "signal": ([{"signal": "smoke"}, {}], ValueError, "rank 0: ValueError: signal='smoke'"),
    "max_windows": ([{"max_windows": 0}] * 2, ValueError, "max_windows=0 must be .*at least 1"),
    "a limit beyond gloo's": ([{"timeout_s": 1e10}] * 2, ValueError, "above 0, and at most 1e.09"),
    "no limit": ([{"timeout_s": True}] * 2, ValueError, "timeout_s=True must be a number"),
    "ranks differ": (
        [{"max_windows": 3}, {"max_windows": 4}],
        ValueError,
        r'ranks \[0\]: .*"max_windows": 3.*ranks \[1\]: .*"max_windows": 4',
    ),
    "transports differ": (
        [{"transport": "gloo"}, {}],
        ValueError,
        "arguments differ between ranks",
    ),
    "not eligible": ([{"transport": "ce"}] * 2, TopologyError, "'ce' needs CUDA devices"),
    "devices differ": ([{}, {"device": "meta"}], TopologyError, "cpu on rank 0, meta on rank 1"),
    "no such device": ([{}, {"device": "nonsense"}], ValueError, "rank 1: ValueError: device="),
}


def refuse(rank: int, world_size: int, case: str) -> str:
    arguments, kind, pattern = WRONG[case]
    with pytest.raises(kind, match=f"(?s)^UlyssesCommunicator: .*{pattern}") as error:
        UlyssesCommunicator(**{"timeout_s": 10, **arguments[rank]})
    with UlyssesCommunicator(timeout_s=10) as comm:
        check_service(comm)
    return str(error.value)


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_on_one_rank_is_refused_by_all_alike(ranks: Ranks, case: str) -> None:
    first, second = ranks(2).run(refuse, case, timeout_s=20)
    assert first == second


def fail_to_look(rank: int, world_size: int) -> str:
    """The probe itself breaks on rank 1."""
    broken = mock.patch(
        "ulysses_ops.communicator.probe", side_effect=OSError("the driver is not loaded")
    )
    with (
        broken if rank == 1 else mock.patch.dict({}),
        pytest.raises(ValueError, match="rank 1: OSError: the driver is not loaded") as error,
    ):
        UlyssesCommunicator(timeout_s=10)
    with UlyssesCommunicator(timeout_s=10) as comm:
        check_service(comm)
    return str(error.value)


def test_a_probe_that_breaks_on_one_rank_is_said_by_all(ranks: Ranks) -> None:
    first, second = ranks(2).run(fail_to_look, timeout_s=20)
    assert first == second


def lack(rank: int, world_size: int) -> tuple[str, tuple[str, ...]]:
    """On rank 1 NVML cannot be imported."""
    without = {"pynvml": None} if rank == 1 else {}
    with mock.patch.dict(sys.modules, without), UlyssesCommunicator(timeout_s=10) as comm:
        check_service(comm)
        return comm.transport, comm.reasons


def test_a_rank_without_nvml_takes_the_same_path(ranks: Ranks) -> None:
    first, second = ranks(2).run(lack, timeout_s=20)
    assert first == second


def come_alone(rank: int, world_size: int, names: tuple[str | None, ...]) -> None:
    if names[rank] != "nobody":
        start = time.monotonic()
        with pytest.raises(AgreementError, match=rf"waited 1 s for ranks \[{1 - rank}\]"):
            UlyssesCommunicator(timeout_s=1, name=names[rank])
        assert time.monotonic() - start < 3
    dist.barrier()
    with UlyssesCommunicator(timeout_s=10) as comm:
        check_service(comm)


@pytest.mark.parametrize("names", [(None, "nobody"), ("a", "b")], ids=["missing", "other name"])
def test_a_rank_that_stays_away_is_named(ranks: Ranks, names: tuple[str | None, ...]) -> None:
    ranks(2).run(come_alone, names, timeout_s=20)


# ---- names and lives -----------------------------------------------------------------------------


def one_name_twice(rank: int, world_size: int) -> None:
    with UlyssesCommunicator(timeout_s=10) as first:
        with pytest.raises(ValueError, match=f"'{first.name}' is open already; close it or give"):
            UlyssesCommunicator(timeout_s=10)
        check_service(first)
        with UlyssesCommunicator(timeout_s=10, name="second") as second:
            check_service(second, 100)
            check_service(first)
        check_service(first)


def test_a_name_is_taken_while_its_communicator_is_open(ranks: Ranks) -> None:
    ranks(2).run(one_name_twice, timeout_s=20)


def drop(rank: int, world_size: int, on_ranks: tuple[int, ...]) -> None:
    comm = UlyssesCommunicator(timeout_s=10)
    spec = WindowSpec("w", "scatter", (1, 4, 4, 2), torch.float32)
    windows = [weakref.ref(window) for window in reserve(comm, [spec])]
    check_service(comm)
    name = comm.name
    if rank in on_ranks:
        del comm
        gc.collect()  # never blocks, though the others keep theirs
        assert windows[0]() is None
        with pytest.raises(ValueError, match="no communicator is named"):
            find_communicator(name, world_size, "test")
    else:
        comm.close()
    with UlyssesCommunicator(timeout_s=10) as comm:
        check_service(comm)


@pytest.mark.parametrize("on_ranks", [(0, 1), (1,)])
def test_a_communicator_that_is_dropped_gives_up_its_name(
    ranks: Ranks, on_ranks: tuple[int, ...]
) -> None:
    ranks(2).run(drop, on_ranks, timeout_s=20)


def closed(rank: int, world_size: int) -> None:
    x = numbered(1, 2, 2, 2)
    with UlyssesCommunicator(timeout_s=10) as comm:
        check_service(comm)
    calls: list[Callable[[], object]] = [
        lambda: scatter(x, comm),
        lambda: gather(x, comm),
        lambda: reserve(comm, []),
    ]
    for call in calls:
        with pytest.raises(UlyssesError, match="is closed; construct a new one"):
            call()


def test_a_closed_communicator_refuses(ranks: Ranks) -> None:
    ranks(2).run(closed, timeout_s=20)
