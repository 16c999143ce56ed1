"""The long run in pieces: what is wrong is seen, and a run goes on where an earlier one ended."""

from __future__ import annotations

import json
import socket
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from recorded import MACHINE
from typer.testing import CliRunner

from ulysses_ops.tools import soak
from ulysses_ops.tools.held import MEMORY_SLACK, Held, read_held
from ulysses_ops.tools.results import write_results

pytestmark = pytest.mark.long

PIECE = {"number": 0, "calls": 10, "mismatches": 0, "control_mismatches": 3}
CYCLES = {"cycles": 200, "leaks": [[], []]}
FOUND: dict[str, Any] = {"pieces": [PIECE], "cycles": [CYCLES]}


def invoke(*arguments: str) -> Any:
    app = typer.Typer()
    app.command()(soak.main)
    return CliRunner().invoke(app, [*arguments, "--cpu", "--commit", "abc"])


@pytest.mark.slow
def test_pieces_and_cycles_on_cpu_ranks(tmp_path: Path) -> None:
    piece = ("--calls", "60", "--out", str(tmp_path), "--time-limit", "100")
    assert invoke("--pieces", "1", "--cycles", "6", *piece).exit_code == 0
    assert invoke("--pieces", "2", "--parallel", "2", "--resume", *piece).exit_code == 0
    found = json.loads((tmp_path / "cpu" / "soak.json").read_text())
    assert [entry["number"] for entry in found["pieces"]] == [0, 1, 2]
    assert [entry["cycles"] for entry in found["cycles"]] == [6]
    for entry in found["pieces"]:
        assert entry["calls"] == 60
        assert 0 < entry["eager"] < 60
        assert entry["mismatches"] == 0
        assert entry["control_mismatches"] > 0
    assert len({entry["eager"] for entry in found["pieces"]}) > 1  # other draws


def test_pieces_that_are_missing_are_done_and_cycles_apart() -> None:
    of = [{**PIECE, "number": number} for number in (0, 1, 4)]
    assert soak.missing_numbers({"pieces": of}, 4) == (2, 3, 5, 6)
    refused = invoke("--cycles", "5", "--parallel", "2")
    assert refused.exit_code == 2
    assert "judge the memory of a GPU" in " ".join(refused.output.split())


def test_what_is_wrong_is_seen() -> None:
    assert not soak.is_wrong(FOUND)
    assert soak.is_wrong({**FOUND, "pieces": [PIECE, {**PIECE, "mismatches": 1}]})
    assert soak.is_wrong({**FOUND, "pieces": [{**PIECE, "control_mismatches": 0}]})
    assert soak.is_wrong({**FOUND, "cycles": [{**CYCLES, "leaks": [[], ["2 open files"]]}]})


def test_another_run_is_not_gone_on_with(tmp_path: Path) -> None:
    path = write_results(tmp_path, "soak", MACHINE, "abc", FOUND)
    assert soak.read_earlier(path, MACHINE, "abc") == FOUND
    assert soak.read_earlier(tmp_path / "none", MACHINE, "abc") == {"pieces": [], "cycles": []}
    for machine, commit in ((MACHINE, "abd"), (replace(MACHINE, torch="2.99"), "abc")):
        with pytest.raises(ValueError, match="do not resume"):
            soak.read_earlier(path, machine, commit)


def test_what_there_is_more_of_is_a_leak() -> None:
    before = Held(("socket", "a.txt"), 3, 1 << 30)
    assert Held(("socket", "b.txt"), 3, (1 << 30) + MEMORY_SLACK).leaks(before) == []
    assert Held(("socket",), 2, 0).leaks(before) == []
    held = Held(("socket", "a.txt", "c", "c", "c"), 3, 0)
    assert held.leaks(before, Counter(c=3)) == []
    assert held.leaks(before, Counter(c=2)) == ["1 open files (c, c, c)"]
    files = ("socket", "socket", "a.txt", "b.txt")
    more = Held(files, 4, (1 << 30) + MEMORY_SLACK + 1).leaks(before)
    assert more == [
        "2 open files (b.txt, socket)",
        "1 threads",
        f"{MEMORY_SLACK + 1} bytes of the GPU",
    ]


def test_open_files_are_counted_by_name(tmp_path: Path) -> None:
    before = read_held(torch.device("cpu"))
    with (tmp_path / "kept").open("w") as file, socket.socket():
        held = read_held(torch.device("cpu"))
        assert held.leaks(before) == [f"2 open files ({file.name}, socket)"]
    assert read_held(torch.device("cpu")).leaks(before) == []
