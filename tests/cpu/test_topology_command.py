"""The command as it is started: pipes that close, keys that are pressed, its own cost."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from fake_nvml import FakeNvml, islands, machine
from machine_library import FOLDER, MACHINES, a100_pcie_x4_bridges, h100_x8, h200_x2, seen
from recorded import MACHINE
from rich.console import Console

import ulysses_commands
from ulysses_ops.facts import Topology
from ulysses_ops.tools import topology_check
from ulysses_ops.tools.pair_bandwidth import FORMS
from ulysses_ops.tools.topology_check import Machinery, Options, run

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-c", "import ulysses_commands; ulysses_commands.topology()"]


def started(*arguments: str, shell_tail: str) -> subprocess.CompletedProcess[str]:
    """Run the command, its output into ``shell_tail``, and say how it ended itself."""
    script = f'"$@" {shell_tail}; exit ${{PIPESTATUS[0]}}'
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        ["bash", "-c", script, "bash", *COMMAND, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env=environ,
    )


@pytest.mark.parametrize(
    ("name", "status", "flag"), [("h200-x2", 0, "--json"), ("p2p-status-unknown", 2, "--no-verify")]
)
def test_a_reader_that_leaves_changes_no_status(name: str, status: int, flag: str) -> None:
    path = str(FOLDER / f"{name}.json")
    done = started("--from", path, flag, shell_tail="| true")
    assert (done.returncode, done.stderr) == (status, "")


def test_a_disk_that_is_full_is_no_answer_delivered() -> None:
    done = started("--from", str(FOLDER / "h200-x2.json"), shell_tail="> /dev/full")
    assert done.returncode == 2
    assert done.stderr == "could not tell: OSError: [Errno 28] No space left on device\n"


def test_an_output_that_is_closed_leaves_the_status() -> None:
    done = started("--from", str(FOLDER / "h200-x2.json"), shell_tail=">&-")
    assert (done.returncode, done.stderr) == (0, "")


# A suite that runs in the background of a shell inherits a SIGINT that is ignored.
CTRL_C = """
import os, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
os.kill(os.getpid(), signal.SIGINT)
"""


@pytest.mark.parametrize(
    ("body", "status", "told"),
    [
        (CTRL_C, 130, "interrupted\n"),
        ("raise ImportError('libcudart:\\n no file')", 2,
         "could not tell: ImportError: libcudart: no file\n"),
    ],
)  # fmt: skip
def test_what_happens_while_torch_is_imported_is_no_traceback(
    body: str, status: int, told: str, tmp_path: Path
) -> None:
    (tmp_path / "torch.py").write_text(body)
    environ = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = subprocess.run(COMMAND, capture_output=True, text=True, timeout=60, env=environ)
    assert (done.returncode, done.stderr) == (status, told)


def test_starting_costs_nothing_until_it_starts() -> None:
    code = "import sys, ulysses_commands; assert 'torch' not in sys.modules"
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert subprocess.run([sys.executable, "-c", code], timeout=60, env=environ).returncode == 0
    assert ulysses_commands.INTERRUPTED == topology_check.INTERRUPTED
    assert ulysses_commands.COULD_NOT_TELL == topology_check.COULD_NOT_TELL


# ---- within one process --------------------------------------------------------------------------


def ask(options: Options, machinery: Machinery) -> tuple[int, str, str]:
    printed, errors = io.StringIO(), io.StringIO()
    consoles = (Console(file=printed, width=110), Console(file=errors, width=110))
    status = run(options, machinery, *consoles)
    return status, printed.getvalue(), errors.getvalue()


def test_a_key_that_ends_measuring_is_no_verdict() -> None:
    def look() -> Topology:
        raise KeyboardInterrupt

    assert ask(Options(), Machinery(look=look)) == (130, "", "interrupted\n")


def test_the_warm_probe_is_timed_beside_the_first() -> None:
    told: list[str] = []

    def look() -> Topology:
        told.append("probe")
        return h200_x2()

    @contextmanager
    def keep_up() -> Iterator[None]:
        told.append("up")
        yield
        told.append("down")

    status, text, _ = ask(Options(json_out=True), Machinery(look=look, keep_up=keep_up))
    found = json.loads(text)
    assert (status, told) == (0, ["probe", "up", "probe", "down"])
    assert found["probe_ms"] > 0
    assert found["warm_probe_ms"] > 0
    again = Machinery(look=MACHINES["laptop-without-gpu"], keep_up=keep_up)
    without = json.loads(ask(Options(json_out=True), again)[1])
    assert without["warm_probe_ms"] is None  # there is nothing that could be warm


def test_the_commit_that_git_cannot_tell_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topology_check, "read_machine", lambda device, count: MACHINE)
    ask(Options(out=tmp_path, commit="abc123"), Machinery(look=h200_x2))
    assert json.loads((tmp_path / "h200-x2" / "topology.json").read_text())["commit"] == "abc123"


def test_fewer_ranks_than_gpus_are_told_how_all_could_be_grouped() -> None:
    status, text, _ = ask(Options(world_size=4), Machinery(look=h100_x8))
    assert status == 0
    flat = " ".join(text.split())
    assert "judged are the first 4 of 8 GPUs" in flat
    first = "ranks 0, 1, 2, 3 (CUDA_VISIBLE_DEVICES=0,1,2,3)"
    second = "ranks 4, 5, 6, 7 (CUDA_VISIBLE_DEVICES=4,5,6,7)"
    assert f"could groups of 4: {first} and {second}" in flat
    _, whole, _ = ask(Options(world_size=8), Machinery(look=h100_x8))
    assert "could" not in whole
    status, text, _ = ask(Options(world_size=2), Machinery(look=a100_pcie_x4_bridges))
    assert (status, "groups of 2: ranks 0, 1 (" in " ".join(text.split())) == (0, True)


def test_the_verdict_of_the_first_ranks_names_better_ones() -> None:
    cards = machine(4)

    def look() -> Topology:
        return seen(FakeNvml(cards, islands(4, [[2, 3]])), cards)

    status, text, _ = ask(Options(world_size=2), Machinery(look=look))
    assert status == 1
    assert "groups of 2: ranks 2, 3 (CUDA_VISIBLE_DEVICES=2,3)" in " ".join(text.split())


def bridges(refused: set[tuple[int, int]], look: object = a100_pcie_x4_bridges) -> Machinery:
    """CPU devices with numbers; these ways cannot be connected."""

    def connect(source: torch.device, target: torch.device) -> None:
        if (source.index, target.index) in refused:
            raise RuntimeError(f"{source} -> {target}: refused")

    return Machinery(
        look=look,  # type: ignore[arg-type]
        connect=connect,
        timer=lambda devices, size: lambda ways, form, copies: [0.001] * len(ways),
    )


def test_rates_of_the_pairs_that_are_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        topology_check,
        "devices_of",
        lambda topology: [torch.device("cpu", d.ordinal) for d in topology.devices],
    )
    apart = {(a, b) for a in range(4) for b in range(4) if a // 2 != b // 2}
    status, text, _ = ask(Options(bandwidth=True, json_out=True), bridges(apart))
    found = json.loads(text)
    assert status == 1
    assert {(r["source"], r["target"]) for r in found["bandwidth"]} == {
        (0, 1), (1, 0), (2, 3), (3, 2)
    }  # fmt: skip
    assert len(found["bandwidth"]) == 4 * 2 * len(FORMS)
    assert {(u["source"], u["target"]) for u in found["unmeasured"]} == apart
    page = ask(Options(bandwidth=True), bridges(apart))[1]
    assert "not measured 0->2 0->3 1->2 1->3 2->0 2->1 3->0 3->1: no peer access" in page
    status, text, _ = ask(Options(bandwidth=True, json_out=True), bridges({(1, 0)}, h200_x2))
    verdict = json.loads(text)["verdict"]
    assert (status, verdict["word"]) == (2, "unknown")  # advertised, and not to be had
    assert verdict["line"].startswith("not measured 1->0: no peer access: RuntimeError")
