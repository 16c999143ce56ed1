"""``ulysses-topology``: its words, files and exit status, on machines that do not exist."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from fake_nvml import FakeNvml, machine
from machine_library import FOLDER, MACHINES, a100_pcie_x4_bridges, h100_x8, h200_x2, seen
from pair_copies import arrives, fixed_rate, is_lost, no_connection
from recorded import MACHINE
from rich.console import Console
from torch import Tensor
from typer.testing import CliRunner

from ulysses_ops.facts import Topology
from ulysses_ops.tools import topology_check
from ulysses_ops.tools.pair_bandwidth import FORMS
from ulysses_ops.tools.pair_check import RowCopyCall
from ulysses_ops.tools.topology_check import Machinery, Options, run
from ulysses_ops.tools.topology_picture import links, to_dot
from ulysses_ops.tools.topology_verdict import condensed, judge

# ---- the command ---------------------------------------------------------------------------------


def ask(
    options: Options,
    look: Callable[[], Topology] = h200_x2,
    copy: RowCopyCall = arrives,
) -> tuple[int, str, str]:
    """Exit status, output and errors; the GPUs are CPU tensors."""
    printed, errors = io.StringIO(), io.StringIO()
    machinery = Machinery(
        look=look,
        copy=lambda: copy,
        connect=no_connection,
        timer=lambda devices, size: fixed_rate(400.0),
    )
    status = run(
        options, machinery, Console(file=printed, width=110), Console(file=errors, width=110)
    )
    return status, printed.getvalue(), errors.getvalue()


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the numbers of CUDA devices stand for the CPU."""
    monkeypatch.setattr(
        topology_check, "devices_of", lambda topology: [torch.device("cpu")] * len(topology.devices)
    )


@pytest.mark.usefixtures("on_cpu")
def test_writes_that_do_not_arrive_change_the_verdict() -> None:
    status, text, _ = ask(Options(verify=True))
    assert status == 0
    assert "every byte arrived" in text
    status, text, _ = ask(Options(verify=True), copy=is_lost)
    assert status == 1
    assert "verdict  eligible" in text
    after = text[text.index("failed data check 0->1: ") :]
    assert "verdict  not eligible: failed data check 0->1: one piece of 1048576 bytes" in after
    assert "ACS" in after


@pytest.mark.usefixtures("on_cpu")
def test_a_failed_pair_takes_only_its_groups_away() -> None:
    calls: list[int] = []

    def copy(target: Tensor, source: Tensor) -> None:
        calls.append(1)
        if len(calls) > 1:  # the first call is 0->1
            target.copy_(source)

    def look() -> Topology:
        cards = machine(4)
        return seen(FakeNvml(cards), cards)

    status, text, _ = ask(Options(verify=True, json_out=True), look=look, copy=copy)
    found = json.loads(text)
    assert status == 1
    assert [(one["source"], one["target"]) for one in found["data_check"]] == [(0, 1)]
    assert found["verdict"]["suggestions"][0].startswith("largest eligible: ranks 0, 2, 3 (")
    calls.clear()
    other = ask(Options(verify=True, world_size=2, json_out=True), look=look, copy=copy)
    pairs = json.loads(other[1])["verdict"]["suggestions"][-1]
    assert (other[0], pairs.startswith("groups of 2: ranks 0, 2 (")) == (1, True)


@pytest.mark.usefixtures("on_cpu")
def test_everything_goes_into_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topology_check, "read_machine", lambda device, count: MACHINE)
    status, text, errors = ask(Options(verify=True, bandwidth=True, out=tmp_path))
    path = tmp_path / "h200-x2" / "topology.json"
    assert (status, str(path) in errors.replace("\n", "")) == (0, True)
    content = json.loads(path.read_text())
    assert (content["gpu"], content["verdict"]["word"]) == ("NVIDIA H200", "eligible")
    assert content["data_check"] == []
    assert len(content["bandwidth"]) == 2 * len(FORMS) * 2
    assert "GB/s of each direction, 64 MiB, one way" in text
    assert ask(Options(from_file=path))[0] == 0  # a results file can be judged again


@pytest.mark.parametrize("name", MACHINES)
def test_saved_topologies_are_judged_alike(name: str, tmp_path: Path) -> None:
    direct = ask(Options(json_out=True), look=MACHINES[name])
    (tmp_path / "saved.json").write_text(direct[1])
    for path in (FOLDER / f"{name}.json", tmp_path / "saved.json"):
        status, text, errors = ask(Options(json_out=True, from_file=path))
        assert (status, errors) == (direct[0], "")
        assert json.loads(text)["verdict"] == json.loads(direct[1])["verdict"]
    lines = [line.rstrip() for line in ask(Options(from_file=path))[1].splitlines()]
    assert lines == (FOLDER / f"{name}.txt").read_text().splitlines()


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, "FileNotFoundError"),
        ("{", "JSONDecodeError"),
        ("[]", "ValueError: topology: expected the fields"),
        ('{"topology": {"device": "cuda:0"}}', "ValueError: topology: expected the fields"),
    ],
)
def test_files_that_hold_no_topology(content: str | None, text: str, tmp_path: Path) -> None:
    path = tmp_path / "saved.json"
    if content is not None:
        path.write_text(content)
    status, printed, errors = ask(Options(from_file=path))
    assert (status, printed) == (2, "")
    assert errors.startswith(f"could not tell: {text}")


def test_another_machine_cannot_be_measured() -> None:
    options = Options(from_file=FOLDER / "h200-x2.json", verify=True)
    status, _, errors = ask(options)
    assert (status, "are about this machine" in errors) == (2, True)


def test_whatever_fails_there_is_no_traceback() -> None:
    def look() -> Topology:
        raise RuntimeError("the machine\nis on fire")

    assert ask(Options(), look=look) == (
        2,
        "",
        "could not tell: RuntimeError: the machine is on fire\n",
    )


def test_a_fabric_that_is_not_started_gives_a_hint() -> None:
    status, text, _ = ask(Options(), look=MACHINES["fabric-not-started"])
    assert status == 2
    assert "Error 802" in text
    assert "fabric manager" in text


@pytest.mark.parametrize("options", [Options(verify=True), Options(bandwidth=True)])
def test_without_two_gpus_nothing_is_sent(options: Options) -> None:
    status, _, errors = ask(options, look=MACHINES["one-gpu"])
    assert (status, errors) == (1, "nothing to send: there are no two GPUs\n")


def test_command_line_on_this_machine(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(topology_check.check_topology)
    dot = tmp_path / "links.dot"
    runner = CliRunner()
    path = str(FOLDER / "a100-pcie-x4-bridges.json")
    done = runner.invoke(app, ["--from", path, "--world-size", "2", "--dot", str(dot)])
    assert done.exit_code == 0, done.output
    assert dot.read_text() == to_dot(a100_pcie_x4_bridges())
    here = runner.invoke(app, ["--json"])
    assert (
        here.exit_code
        == judge(Topology.from_json(json.dumps(json.loads(here.stdout)["topology"]))).exit_code
    )


# ---- pictures, words -----------------------------------------------------------------------------


def test_links_of_islands_and_of_a_switch() -> None:
    places, edges = links(a100_pcie_x4_bridges())
    assert (list(places), [(e.a, e.b, e.text) for e in edges]) == (
        ["0", "1", "2", "3"],
        [("0", "1", "NV12"), ("2", "3", "NV12")],
    )
    places, edges = links(h100_x8())
    assert "NVSwitch" in places
    assert [(e.a, e.b, e.text) for e in edges] == [(str(i), "NVSwitch", "NV18") for i in range(8)]


def test_a_one_way_link_is_drawn_as_such() -> None:
    dot = to_dot(MACHINES["pcie-x8-asymmetric"]())
    assert '"1" -> "0" [label="NV12", dir=forward, style=dashed, color=red];' in dot
    assert dot.count("dir=forward") == 1
    assert dot.count("->") == 4


def test_a_picture_needs_matplotlib_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    path = tmp_path / "links.png"
    status, _, errors = ask(Options(picture=path))
    assert (status, path.exists()) == (0, False)
    assert errors == "no picture: pip install matplotlib, or use --dot with Graphviz\n"


@pytest.mark.parametrize("name", ["h100-x8", "pcie-x8-asymmetric", "laptop-without-gpu"])
def test_a_picture_is_drawn(name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "links.png"
    ask(Options(picture=path), look=MACHINES[name])
    assert path.read_bytes().startswith(b"\x89PNG")


def test_what_holds_for_several_pairs_is_said_once() -> None:
    lines: Any = (
        "rank 0 -> rank 1 [a -> b]: X (seen by ranks 0, 1)",
        "other",
        "rank 1 -> rank 0 [b -> a]: X (seen by rank 1)",
    )
    assert condensed(lines) == ["X: 2 of the directed pairs, 0->1 1->0", "other"]
