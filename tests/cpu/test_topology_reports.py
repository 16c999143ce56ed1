"""What a saved report says again, and what stays said when measuring fails."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from machine_library import a100_pcie_x4_bridges, h200_x2
from rich.console import Console
from torch import Tensor

from ulysses_ops.facts import Answer, Fact, Topology
from ulysses_ops.tools import topology_check
from ulysses_ops.tools.pair_bandwidth import Unmeasured
from ulysses_ops.tools.pair_check import PairFailure
from ulysses_ops.tools.topology_check import Machinery, Options, run
from ulysses_ops.tools.topology_picture import links
from ulysses_ops.tools.topology_report import Findings, report
from ulysses_ops.tools.topology_verdict import judge

FAILED = PairFailure(0, 1, "row 3 is not what was sent")


def ask(options: Options, machinery: Machinery | None = None) -> tuple[int, str, str]:
    printed, errors = io.StringIO(), io.StringIO()
    consoles = (Console(file=printed, width=110), Console(file=errors, width=110))
    status = run(options, machinery or Machinery(), *consoles)
    return status, printed.getvalue(), errors.getvalue()


def saved(folder: Path, topology: Topology, *failures: PairFailure) -> Path:
    findings = Findings(topology, 512.5, 12.5, checked=True, failures=list(failures))
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


@pytest.mark.parametrize("broken", ["RuntimeError: 700", ""])
def test_a_report_of_measuring_that_failed_is_no_yes_later(broken: str, tmp_path: Path) -> None:
    findings = Findings(h200_x2(), 500.0, 12.5, broken=broken)
    if not broken:
        findings.unmeasured = [Unmeasured(1, 0, "no peer access: 217")]
    verdict = findings.judged(None)
    assert (verdict.word, bool(verdict.advice)) == ("unknown", True)
    path = tmp_path / "node.json"
    path.write_text(json.dumps(report(findings, verdict)))
    status, text, _ = ask(Options(from_file=path, json_out=True))
    assert (status, json.loads(text)) == (2, json.loads(path.read_text()))
    good = Findings(h200_x2(), 500.0, 12.5)
    assert good.judged(None).word == "eligible"  # control


def twice(topology: Topology, where: int, name: str, answer: Answer) -> Topology:
    """The first pair is told of again, before or after, with another answer."""
    facts: dict[str, Any] = {name: Fact(answer, "test", "told")}
    again = replace(topology.pairs[0], **facts)
    pairs = list(topology.pairs)
    pairs.insert(where, again)
    return replace(topology, pairs=tuple(pairs))


@pytest.mark.parametrize("where", [0, 2])
@pytest.mark.parametrize("name", ["read", "write", "nvlink", "peer_access"])
@pytest.mark.parametrize(("answer", "word"), [("no", "not eligible"), ("unknown", "unknown")])
def test_of_a_pair_told_of_twice_the_worse_counts(
    where: int, name: str, answer: Answer, word: str, tmp_path: Path
) -> None:
    """Whichever comes last: a list that was joined by hand must not gain a capability."""
    topology = twice(h200_x2(), where, name, answer)
    path = tmp_path / "node.json"
    path.write_text(topology.to_json())
    status, text, _ = ask(Options(from_file=path))
    assert (status, judge(topology).word) == ({"not eligible": 1, "unknown": 2}[word], word)
    cell = "no" if answer == "no" else "??"
    assert re.search(rf"^ +0 +- +{re.escape(cell)}", text, re.MULTILINE)
    _, edges = links(topology)
    assert [(e.a, e.b, e.one_way) for e in edges] == [("1", "0", True)]
    assert judge(twice(h200_x2(), where, name, "yes")).word == "eligible"  # control


def test_a_gpu_told_of_twice_is_not_judged_by_either() -> None:
    topology = h200_x2()
    mig = replace(topology.gpus[0], mig=Fact("yes", "nvml"))
    for gpus in ((*topology.gpus, mig), (mig, *topology.gpus)):
        verdict = judge(replace(topology, gpus=gpus))
        assert verdict.word == "unknown"
        assert any("is not listed just once" in text for text in verdict.reasons)


def test_the_topology_of_one_rank_is_not_a_machine_without_gpus() -> None:
    verdict = judge(replace(h200_x2(), devices=()))
    assert verdict.word == "unknown"
    assert "save it with ulysses-topology --json" in verdict.line
