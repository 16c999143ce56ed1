"""What a cut run leaves, how it is resumed, and what is made of blocks: table and pictures."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from recorded import MACHINE, a_row
from rich.console import Console
from test_timeline import a_trace

from ulysses_ops.tools import benchmark_run, plots
from ulysses_ops.tools.benchmark_job import run_rank
from ulysses_ops.tools.benchmark_plan import (
    Choice,
    Plan,
    plan_benchmark,
    plan_functional,
    plan_replays,
)
from ulysses_ops.tools.benchmark_run import Keeping, run_plans, with_trials
from ulysses_ops.tools.block_job import BlockJob
from ulysses_ops.tools.block_table import block_table, projection_table, schedules_table
from ulysses_ops.tools.block_trial import Tried
from ulysses_ops.tools.launch import Launch, RankError, run_ranks
from ulysses_ops.tools.markdown import Record
from ulysses_ops.tools.report import (
    NOTHING_INSISTED,
    Outcome,
    ResumeFrom,
    earlier_outcome,
    insistence,
)
from ulysses_ops.tools.results import Row, rows_to_json, write_results
from ulysses_ops.tools.shapes import FUNCTIONAL_BLOCKS
from ulysses_ops.tools.timeline import read_trace
from ulysses_ops.tools.timing import Effort

TINY, BATCH = FUNCTIONAL_BLOCKS
CPU = replace(MACHINE, gpu="cpu", gpu_count=0)
LAUNCH = Launch(2, "cpu", 0, 100.0, 60.0)
OUTCOME = Outcome(
    MACHINE,
    [a_row()],
    "ce",
    ("exchange/wan-480p",),
    {"block: x": "why"},
    {"exchange/wan-480p": NOTHING_INSISTED},
)


# ---- a run that is cut off -----------------------------------------------------------------------


def test_every_part_is_on_disk_at_once_and_a_failed_launch_keeps_the_next(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[list[str]] = []

    def run_ranks(work: Any, jobs: Any, launch: Launch, *, on_progress: Any, on_part: Any) -> None:
        path = tmp_path / "h200-x2" / f"{jobs[0]}.json"
        on_part(OUTCOME)
        seen.append(list(json.loads(path.read_text())["finished"]))
        on_part(replace(OUTCOME, finished=("a", "b")))
        seen.append(list(json.loads(path.read_text())["finished"]))
        if jobs[0] == "first":
            message = "rank 1 of 2 died"
            raise RankError(message)

    monkeypatch.setattr(benchmark_run, "run_ranks", run_ranks)
    plans = [Plan(LAUNCH, [name], name) for name in ("first", "second")]
    finished = run_plans(Console(quiet=True), plans, Keeping(tmp_path, "abc"), 50.0)
    assert seen == 2 * [["exchange/wan-480p"], ["exchange/wan-480p", "a", "b"]]
    assert finished.failures == ["rank 1 of 2 died"]
    assert [outcome.finished for outcome in finished.outcomes] == 2 * [("a", "b")]
    assert [path.name for path in finished.written] == ["first.json", "second.json"]
    content = json.loads(finished.written[0].read_text())
    assert content["commit"] == "abc"
    assert content["not_run"] == {"block: x": "why"}
    assert [path.suffix for path in (tmp_path / "h200-x2").iterdir()] == [".json", ".json"]


def test_the_time_of_all_launches_is_shared_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    limits: list[float] = []

    def run_ranks(work: Any, jobs: Any, launch: Launch, **calls: Any) -> None:
        limits.append(launch.limit_s)

    monkeypatch.setattr(benchmark_run, "run_ranks", run_ranks)
    plans = [Plan(LAUNCH, [name], name) for name in ("first", "second")]
    run_plans(Console(quiet=True), plans, Keeping(None, None), 60.0)
    assert limits == pytest.approx([30.0, 60.0], abs=2.0)  # what the first leaves, the second has


# ---- and resumed ---------------------------------------------------------------------------------


def _content(**changes: Any) -> dict[str, Any]:
    facts = {name: getattr(MACHINE, name) for name in MACHINE.__dataclass_fields__}
    return {**facts, "commit": "abc", **OUTCOME.content(), **changes}


def test_an_earlier_run_of_the_same_kind_is_taken_over() -> None:
    found = earlier_outcome(_content(host="another of the kind"), MACHINE, "abc", "f.json")
    assert found.rows == OUTCOME.rows
    assert found.finished == OUTCOME.finished
    assert found.not_run == {}  # found anew


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"gpu": "NVIDIA B200"}, "gpu NVIDIA B200 there, NVIDIA H200 here"),
        ({"torch": "2.13.0", "nccl": "2.30.7"}, "torch 2.13.0 there, 2.11.0 here; nccl 2.30.7"),
    ],
)
def test_rows_of_another_kind_are_not_mixed_in(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        earlier_outcome(_content(**changes), MACHINE, "abc", "f.json")


@pytest.mark.parametrize(
    ("insisted", "insists", "complaint"),
    [
        ("transport any, mapping any, signal any", insistence(transport="nccl"), "transport nccl"),
        (insistence(mapping="ipc"), insistence(mapping="vmm"), "with transport any, mapping ipc"),
        (None, insistence(), "with unknown"),
    ],
)
def test_rows_of_another_transport_are_not_taken_over(
    insisted: str | None, insists: str, complaint: str
) -> None:
    told = {} if insisted is None else {"exchange/wan-480p": insisted}
    content = _content(insisted=told)
    with pytest.raises(ValueError, match=f"exchange/wan-480p was measured .*{complaint}"):
        earlier_outcome(content, MACHINE, "abc", "f.json", insists=insists)
    if insisted is not None:
        found = earlier_outcome(content, MACHINE, "abc", "f.json", insists=insisted)
        assert found.insisted == told


@pytest.mark.parametrize("commit", ["abc-dirty", None])
def test_of_changed_files_nothing_counts_as_finished(commit: str | None) -> None:
    found = earlier_outcome(_content(commit=commit), MACHINE, commit, "f.json")
    assert (found.rows, found.finished) == ([], ())


def test_what_is_done_whole_is_not_resumed(tmp_path: Path) -> None:
    choice = Choice(resume=tmp_path)
    with pytest.raises(ValueError, match="resume: only timed runs on GPUs"):
        plan_functional(2, 0, 100.0, choice)
    with pytest.raises(ValueError, match="resume: only timed runs on GPUs"):
        plan_replays(LAUNCH, 5, choice)


@pytest.mark.parametrize("only", ["block", "qkv", "step", "all"])
def test_on_the_cpu_too_names_are_refused_before_ranks_start(only: str) -> None:
    with pytest.raises(ValueError, match=r"variants: \['best'\] are unknown"):
        plan_functional(2, 0, 100.0, Choice(only=only, variants="best"))
    with pytest.raises(ValueError, match=r"modes: \['fast'\] are unknown"):
        plan_functional(2, 0, 100.0, Choice(only=only, modes="fast"))
    assert plan_functional(2, 0, 100.0, Choice(only=only)).jobs


@pytest.mark.parametrize("only", ["exchange", "step", "block", "all"])
@pytest.mark.parametrize("what", ["shapes", "models", "variants", "modes", "parts"])
def test_unknown_names_are_refused_whatever_is_measured(what: str, only: str) -> None:
    wrong = Choice(only=only, **{what: "nope"})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=f"^{what}: .*'nope'.* unknown; choose from"):
        plan_functional(2, 0, 100.0, wrong)
    with pytest.raises(ValueError, match=f"^{what}: .*'nope'.* unknown; choose from"):
        plan_benchmark(LAUNCH, wrong, Effort())
    with pytest.raises(ValueError, match=f"^{what}: .*'nope'.* unknown; choose from"):
        plan_replays(LAUNCH, 5, wrong)


def test_known_names_that_mean_nothing_on_the_cpu_pass() -> None:
    choice = Choice("flux,latents-2k", "exchange", "ours,naive", models="flux")
    assert plan_functional(2, 0, 100.0, choice).jobs


def test_a_block_run_goes_on_where_it_was_cut(tmp_path: Path) -> None:
    resume = ResumeFrom(tmp_path, "block", "abc")
    effort = Effort(2, 0.5)
    (first, _) = run_ranks(run_rank, [BlockJob((TINY,), effort, "ours", resume=resume)], LAUNCH)
    assert first.finished == ("block/tiny",)
    write_results(tmp_path, "block", first.machine, "abc", first.content())
    job = BlockJob((TINY, BATCH), effort, "ours", resume=resume)
    (second, _) = run_ranks(run_rank, [job], LAUNCH)
    assert second.finished == ("block/tiny", "block/batch")
    kept = [row for row in second.rows if row.model == TINY.title]
    assert [row.median_us for row in kept] == [round(row.median_us, 3) for row in first.rows]
    assert len(second.rows) == 2 * len(kept)
    other = replace(job, shapes=(TINY,), resume=replace(resume, commit="def"))
    (third, _) = run_ranks(run_rank, [other], LAUNCH)
    assert third.finished == ("block/tiny",)
    assert [row.median_us for row in third.rows] != [row.median_us for row in kept]


# ---- plans ---------------------------------------------------------------------------------------


def test_sections_go_to_files_of_their_own() -> None:
    effort = Effort(2, 1.0)
    both = plan_benchmark(LAUNCH, Choice(shapes="flux,wan-720p"), effort)
    assert [plan.name for plan in both] == ["attention_step", "block"]
    assert [[s.key for s in plan.jobs[0].shapes] for plan in both] == [
        ["flux"],
        ["flux", "wan-720p"],
    ]
    (only,) = plan_benchmark(LAUNCH, Choice(only="exchange, load"), effort)
    assert only.jobs[0].sections == ("exchange", "load")
    with pytest.raises(ValueError, match=r"only: \['speed'\] are unknown"):
        plan_benchmark(LAUNCH, Choice(only="speed"), effort)


def test_what_trials_found_reaches_the_job() -> None:
    line = read_trace(a_trace())
    tried = {
        "naive": Tried("naive", {"naive/graph": "refused"}, {"eager": line}),
        "zero-CTA": Tried("zero-CTA", {"zero-CTA": "hung"}),
    }
    job = with_trials(BlockJob((TINY,), Effort()), tried)
    assert job.not_run == {"naive/graph": "refused", "zero-CTA": "hung"}
    assert job.launches == {"naive/eager": 1}


# ---- table and pictures --------------------------------------------------------------------------


def _block_row(variant: str, mode: Any, tax: float | None) -> Row:
    return a_row(
        op="block",
        mode=mode,
        median_us=1000.0 + 10 * (tax or 0.0),
        exact=None if tax is None else True,
        tax_percent=tax,
        tax_quartiles=None if tax is None else (tax - 1, tax + 1),
        details={"variant": variant},
    )


ROWS = [
    _block_row("compute", "graph", None),
    _block_row("ours", "graph", 4.0),
    _block_row("naive", "graph", 25.0),
    _block_row("compute", "eager", None),
    _block_row("ours", "eager", -1.0),
]


def _written(folder: Path) -> Path:
    outcome = Outcome(MACHINE, ROWS, "ce")
    path = write_results(folder, "block", MACHINE, "abc", outcome.content())
    line = read_trace(a_trace()).to_json()
    timelines = {"timelines": {"ours/graph": line, "compute/graph": line}}
    write_results(folder, "block_timeline", MACHINE, "abc", timelines)
    return path


def test_blocks_have_a_table(tmp_path: Path) -> None:
    content = json.loads(_written(tmp_path).read_text())
    table = block_table(Record("h200-x2", "block", content))
    where = "Wan 480p, S=32760, H=40"
    assert table.splitlines() == [
        "| block | compute only, us | ours, V first | NCCL | exact |",
        "| --- | ---: | ---: | ---: | ---: |",
        f"| {where}, graph | 1,000 | +4.0 % (3.0 to 5.0) | +25.0 % (24.0 to 26.0) | yes |",
        f"| {where}, eager | 1,000 | -1.0 % (-2.0 to 0.0) | not run | yes |",
    ]
    blind = _block_row("peers first without copies", "graph", 1.0)
    bounded = _block_row("peers first", "graph", 1.0)
    for row, details in ((blind, {}), (bounded, {"relative_error": 0.0042})):
        entry = rows_to_json([replace(row, exact=None)])[0]
        content["rows"].append({**entry, "details": {**entry["details"], **details}})
    assert "| yes, others 4.2e-03 |" in block_table(Record("h200-x2", "block", content))
    table = schedules_table(Record("h200-x2", "block", content))
    head, _, line, *_ = table.splitlines()
    assert "| peers first | peers first without copies |" in head
    assert "| +1.0 % (0.0 to 2.0) | +1.0 % (0.0 to 2.0) |" in line
    content["rows"][1]["exact"] = False
    assert "**no**" in block_table(Record("h200-x2", "block", content))
    assert block_table(Record("h200-x2", "other", {"rows": []})) == ""


def test_the_stage_before_attention_has_a_table() -> None:
    rows = []
    for name, ratio, exact in (("gemms", 1.0, None), ("ours", 1.126, True), ("naive", 1.3, False)):
        details = {"variant": name, "ratio_to_gemm": ratio}
        row = replace(_block_row(name, "graph", None), op="qkv", exact=exact, details=details)
        rows += [row, replace(row, mode="eager")]
        if name != "naive":  # not run at this shape
            rows.append(replace(row, model="Wan 720p"))
    record = Record("h200-x2", "qkv", {"rows": rows_to_json(rows)})
    head, _, *lines = (
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in projection_table(record).splitlines()
    )
    # No column for what ran nowhere.
    assert head == ["before attention, in a graph", "GEMMs, us", "ours, V first", "NCCL"]
    assert lines == [
        ["Wan 480p, S=32760, H=40", "1,000", "1.13 x", "1.30 x WRONG"],
        ["Wan 720p, S=32760, H=40", "1,000", "1.13 x", "not run"],
    ]
    assert projection_table(Record("h200-x2", "other", {"rows": []})) == ""


def test_pictures_are_drawn_from_the_files_alone(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    written = plots.draw_results(_written(tmp_path).parent, tmp_path / "pictures")
    names = ["block_time.png", "block_tax.png", "block_timeline.png"]
    assert [path.name for path in written] == names
    for path in written:
        assert path.read_bytes().startswith(b"\x89PNG")


def test_no_results_no_pictures(tmp_path: Path) -> None:
    assert plots.draw_results(tmp_path, tmp_path) == []


def test_pictures_need_matplotlib_and_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    folder = _written(tmp_path).parent
    with pytest.raises(typer.Exit):
        plots.plot_results(folder, tmp_path)
    assert capsys.readouterr().err == "no pictures: pip install matplotlib\n"
