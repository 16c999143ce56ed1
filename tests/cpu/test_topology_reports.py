"""What a saved report says again, and what stays said when measuring fails."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from machine_library import a100_pcie_x4_bridges, h200_x2
from rich.console import Console
from torch import Tensor

from ulysses_ops.facts import Topology
from ulysses_ops.tools import topology_check
from ulysses_ops.tools.pair_check import PairFailure
from ulysses_ops.tools.topology_check import Findings, Machinery, Options, report, run
from ulysses_ops.tools.topology_verdict import judge

FAILED = PairFailure(0, 1, "row 3 is not what was sent")


def ask(options: Options, machinery: Machinery | None = None) -> tuple[int, str, str]:
    printed, errors = io.StringIO(), io.StringIO()
    consoles = (Console(file=printed, width=110), Console(file=errors, width=110))
    status = run(options, machinery or Machinery(), *consoles)
    return status, printed.getvalue(), errors.getvalue()


def saved(folder: Path, topology: Topology, *failures: PairFailure) -> Path:
    findings = Findings(topology, 12.5, checked=True, failures=list(failures))
    path = folder / "node.json"
    path.write_text(json.dumps(report(findings, judge(topology, None, failures))))
    return path


def test_a_report_is_judged_by_what_was_measured(tmp_path: Path) -> None:
    path = saved(tmp_path, h200_x2(), FAILED)
    status, text, _ = ask(Options(from_file=path))
    assert status == 1
    assert "failed data check 0->1" in text
    status, text, _ = ask(Options(from_file=path, json_out=True))
    again = json.loads(text)
    assert again == json.loads(path.read_text())
    assert ask(Options(from_file=saved(tmp_path, h200_x2())))[0] == 0


def test_a_data_check_that_cannot_be_read_is_no_yes(tmp_path: Path) -> None:
    path = saved(tmp_path, h200_x2())
    content = json.loads(path.read_text())
    content["data_check"] = ["failed data check 0->1: something"]
    path.write_text(json.dumps(content))
    status, _, errors = ask(Options(from_file=path))
    assert status == 2
    assert errors.startswith("could not tell: ")


def test_a_failed_pair_is_said_and_not_suggested_whatever_else_is_wrong() -> None:
    bridges = a100_pcie_x4_bridges()
    assert any("ranks 0, 1" in text for text in judge(bridges).suggestions)
    verdict = judge(bridges, None, [FAILED])
    assert verdict.word == "not eligible"
    assert str(FAILED) in verdict.reasons
    assert not any("ranks 0, 1" in text for text in verdict.suggestions)
    assert any("ranks 2, 3" in text for text in verdict.suggestions)


def test_measuring_that_fails_leaves_no_yes(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(target: Tensor, source: Tensor) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    cpu = [torch.device("cpu"), torch.device("cpu")]
    monkeypatch.setattr(topology_check, "devices_of", lambda topology: cpu)
    monkeypatch.setattr(topology_check, "check_pairs", lambda *a, **k: breaks(*a[:2]))
    status, text, errors = ask(
        Options(verify=True, json_out=True), Machinery(look=h200_x2, copy=lambda: breaks)
    )
    assert status == 2
    assert json.loads(text)["verdict"]["word"] == "unknown"
    assert "illegal memory access" in errors


def test_the_topology_of_one_rank_is_not_a_machine_without_gpus() -> None:
    verdict = judge(replace(h200_x2(), devices=()))
    assert verdict.word == "unknown"
    assert "save it with ulysses-topology --json" in verdict.line
