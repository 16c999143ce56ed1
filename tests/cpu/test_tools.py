"""The tools without GPUs: statistics, results, tables, the launcher, and the functional run."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from ulysses_ops.errors import UlyssesError
from ulysses_ops.tools import peer_copy, readme_tables, replay_benchmark, replays
from ulysses_ops.tools.benchmark_job import BenchmarkJob, Outcome, run_rank
from ulysses_ops.tools.launch import Launch, RankContext, RankError, run_ranks
from ulysses_ops.tools.parity import ParityJob
from ulysses_ops.tools.peer_copy import PeerCopy
from ulysses_ops.tools.replays import ReplayJob
from ulysses_ops.tools.results import (
    Machine,
    Row,
    gpu_slug,
    rows_from_json,
    rows_to_json,
    write_results,
)
from ulysses_ops.tools.shapes import FUNCTIONAL, PRODUCTION, Shape, select_shapes
from ulysses_ops.tools.tables import exactness, row_cells
from ulysses_ops.tools.timing import Effort, Summary, paired_ratio, percentile, summarise

ROOT = Path(__file__).resolve().parents[2]
MACHINE = Machine("node", "NVIDIA H200", 2, "580.1", "2.11.0", "13.0", "2.28.9", "3.12.3")
TINY = FUNCTIONAL[0]


def cpu_ranks(limit_s: float = 90.0, stall_s: float = 60.0, world_size: int = 2) -> Launch:
    return Launch(world_size, "cpu", 0, limit_s, stall_s)


def a_row(**changes: Any) -> Row:
    row = Row.of_times(
        "scatter",
        PRODUCTION[0],
        world_size=2,
        transport="ce",
        mode="graph",
        times=Summary(100.0, 120.0, (99.0, 101.0), 40),
        exact=True,
        bytes_per_peer=1_000_000,
        percent_of_flat=95.0,
        nccl_us=230.0,
        x_nccl_eager=2.4,
        x_nccl_graph=2.3,
        details={"variant": "ours"},
    )
    return replace(row, **changes)


# ---- statistics ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [
        ([3.0], 99, 3.0),
        ([2.0, 1.0], 50, 1.0),
        (list(range(1, 101)), 99, 99),
        (list(range(1, 101)), 100, 100),
        (list(range(1, 12)), 99, 11),
    ],
)
def test_percentile_is_the_nearest_rank(
    values: list[float], percent: float, expected: float
) -> None:
    assert percentile(values, percent) == expected


@pytest.mark.parametrize(("values", "percent"), [([], 50), ([1.0], 0), ([1.0], 101)])
def test_percentile_refuses_what_has_none(values: list[float], percent: float) -> None:
    with pytest.raises(ValueError, match="percentile"):
        percentile(values, percent)


def test_the_slowest_rank_counts() -> None:
    summary = summarise([[[1.0, 2.0, 3.0], [5.0, 5.0, 9.0]], [[4.0, 4.0, 4.0], [1.0, 1.0, 1.0]]])
    assert summary == Summary(4.0, 9.0, (4.0, 5.0), 6)
    assert summary.spread_us == (4.0, 5.0)


@pytest.mark.parametrize("by_rank", [[], [[]], [[[1.0]], [[1.0], [2.0]]]])
def test_summary_refuses_ranks_that_measured_differently(by_rank: list[Any]) -> None:
    with pytest.raises(ValueError, match="the ranks measured"):
        summarise(by_rank)


def test_a_drift_between_rounds_cancels_in_the_paired_ratio() -> None:
    slow = Summary(30.0, 0.0, (10.0, 30.0, 80.0), 3)
    fast = Summary(10.0, 0.0, (5.0, 15.0, 40.0), 3)
    assert paired_ratio(slow, fast) == 2.0
    assert slow.median_us / fast.median_us != 2.0  # what an unpaired comparison would have said
    with pytest.raises(ValueError, match="zip"):
        paired_ratio(slow, Summary(1.0, 1.0, (1.0,), 1))


# ---- shapes, rows, files -------------------------------------------------------------------------


def test_shapes_are_selected_by_name() -> None:
    assert select_shapes("all") == PRODUCTION
    assert [shape.seq for shape in select_shapes("flux, minimax-h3")] == [4608, 37888]
    with pytest.raises(ValueError, match=r"\['hunyuan'\] are unknown"):
        select_shapes("flux,hunyuan")


@pytest.mark.parametrize("shape", PRODUCTION, ids=lambda shape: shape.key)
def test_bytes_to_a_peer_are_its_share_of_the_rows_sent(shape: Shape) -> None:
    sent = torch.empty(shape.local_source(2), dtype=torch.bfloat16, device="meta")
    received = torch.empty(shape.local_window(2), dtype=torch.bfloat16, device="meta")
    assert 2 * shape.bytes_per_peer(2, 2) == sent.nbytes == received.nbytes


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm4-80gb"),
        ("Tesla T4", "t4"),
        ("", "gpu"),
    ],
)
def test_gpu_names_become_path_names(name: str, slug: str) -> None:
    assert gpu_slug(name) == slug


def test_rows_survive_json() -> None:
    rows = [a_row(), a_row(exact=None, median_us=None, p99_us=None, spread_us=None, details=None)]
    entries = json.loads(json.dumps(rows_to_json(rows)))
    assert rows_from_json(entries) == rows
    assert all({"median_us", "p99_us", "exact"} <= set(entry) for entry in entries)
    assert "tax_percent" not in entries[0]


@pytest.mark.parametrize(
    ("entry", "complaint"),
    [({"op": "scatter", "speed": 1}, r"unknown fields \['speed'\]"), ({"op": "x"}, "incomplete")],
)
def test_rows_of_another_version_are_refused(entry: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        rows_from_json([entry])


def test_bandwidths_follow_from_bytes_and_median() -> None:
    row = a_row()
    assert row.busbw_gbs == pytest.approx(10.0)  # 1e6 bytes in 100 us
    assert row.algbw_gbs == pytest.approx(20.0)


def test_results_name_machine_commit_and_date(tmp_path: Path) -> None:
    path = write_results(tmp_path, "x", MACHINE, "abc", {"rows": rows_to_json([a_row()])})
    assert path == tmp_path / "h200-x2" / "x.json"
    content = json.loads(path.read_text())
    header = {"host", "gpu", "driver", "torch", "cuda", "nccl", "commit", "date", "python"}
    assert header <= set(content)
    assert content["commit"] == "abc"
    row = content["rows"][0]
    assert row["shape"] == [1, 32760, 40, 128]
    assert (row["world_size"], row["transport"], row["mode"]) == (2, "ce", "graph")


@pytest.mark.parametrize(("exact", "word"), [(True, "ok"), (False, "WRONG"), (None, "-")])
def test_a_row_is_ok_only_if_it_was_found_exact(exact: bool | None, word: str) -> None:
    assert exactness(a_row(exact=exact)) == word
    assert row_cells(a_row(exact=exact))[-1] == word


# ---- launcher ------------------------------------------------------------------------------------


def _tell(context: RankContext, argument: int) -> tuple[int, list[int], bool, bool]:
    context.progress(f"hello from {context.rank}")
    context.deliver({"rank": context.rank})
    everywhere = context.gather(context.rank + argument)
    return context.rank, everywhere, context.agree(True), context.agree(context.rank == 0)


def _raise_on_rank_1(context: RankContext, argument: None) -> None:
    context.progress("work")
    if context.rank == 1:
        message = "out of luck"
        raise ArithmeticError(message)
    context.gather(0)  # waits for the rank that is gone


def _die_on_rank_1(context: RankContext, argument: None) -> None:
    if context.rank == 1:
        os._exit(3)
    context.gather(0)


def _sleep_for_ever(context: RankContext, argument: None) -> None:
    context.progress("a long nap")
    time.sleep(600)


def test_ranks_return_their_values_in_order() -> None:
    told: list[str] = []
    parts: list[dict[str, int]] = []
    launch = cpu_ranks()
    values = run_ranks(_tell, 10, launch, on_progress=told.append, on_part=parts.append)
    assert values == [(rank, [10, 11], True, False) for rank in range(2)]
    assert told == ["hello from 0"]
    assert parts == [{"rank": 0}]


@pytest.mark.parametrize(
    ("work", "complaint"),
    [
        (_raise_on_rank_1, r"rank 1 of 2, at 'work', failed:(.|\n)*ArithmeticError: out of luck"),
        (_die_on_rank_1, "rank 1 of 2, at 'starting', died without a word"),
    ],
)
def test_one_rank_that_fails_ends_all(work: Any, complaint: str) -> None:
    start = time.monotonic()
    with pytest.raises(RankError, match=complaint):
        run_ranks(work, None, cpu_ranks())
    assert time.monotonic() - start < 45  # not the stall limit of the rank that waits
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize(("limit_s", "stall_s"), [(14.0, 60.0), (90.0, 12.0)])
def test_ranks_that_hang_are_ended_in_time(limit_s: float, stall_s: float) -> None:
    start = time.monotonic()
    with pytest.raises(RankError, match=r"ranks 0 .* were ended after"):
        run_ranks(_sleep_for_ever, None, cpu_ranks(limit_s, stall_s, world_size=1))
    assert time.monotonic() - start < 40
    assert multiprocessing.active_children() == []


def test_ranks_that_share_gpus_do_without_nccl() -> None:
    assert Launch(2, "cuda", 2).backend == "cpu:gloo,cuda:nccl"
    shared = Launch(4, "cuda", 2)
    assert shared.shares_devices
    assert shared.backend == "gloo"
    assert [shared.device(rank).index for rank in range(4)] == [0, 1, 0, 1]


# ---- flat copies ---------------------------------------------------------------------------------


def _window(num_bytes: int, pointers: tuple[int, ...] | None) -> Any:
    memory = None if pointers is None else SimpleNamespace(pointers=pointers)
    return SimpleNamespace(tensor=torch.empty(num_bytes, dtype=torch.uint8), memory=memory)


def test_flat_copies_go_to_this_ranks_slot_of_every_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int, int]] = []

    def memcpy(target: int, source: int, size: int, kind: int, stream: int) -> int:
        calls.append((target, source, size))
        return 0

    monkeypatch.setattr(peer_copy, "_memcpy_async", lambda: memcpy)
    stream = SimpleNamespace(cuda_stream=0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    source = torch.empty(16, dtype=torch.uint8)
    PeerCopy(_window(64, (1000, 2000, 3000, 4000)), 2, 16, source).run()
    assert calls == [(base + 32, source.data_ptr(), 16) for base in (4000, 1000, 2000)]


def test_a_flat_copy_that_fails_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_copy, "_memcpy_async", lambda: lambda *arguments: 1)
    stream = SimpleNamespace(cuda_stream=0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    copy = PeerCopy(_window(32, (1000, 2000)), 0, 16, torch.empty(16, dtype=torch.uint8))
    with pytest.raises(UlyssesError, match="cudaMemcpyAsync returned 1"):
        copy.run()


@pytest.mark.parametrize(
    ("room", "pointers", "given"), [(64, None, 16), (31, (0, 0), 16), (64, (0, 0), 15)]
)
def test_a_flat_copy_that_does_not_fit_is_refused(
    room: int, pointers: tuple[int, ...] | None, given: int
) -> None:
    with pytest.raises(ValueError, match="flat copy"):
        PeerCopy(_window(room, pointers), 0, 16, torch.empty(given, dtype=torch.uint8))


# ---- the job -------------------------------------------------------------------------------------


def test_the_job_runs_on_two_cpu_ranks() -> None:
    effort = Effort(2, 0.5)
    jobs = [
        ParityJob((TINY,), ("float32",), effort),
        BenchmarkJob((TINY,), effort),
        ReplayJob(((TINY, 5),)),
    ]
    outcomes: list[Outcome] = run_ranks(run_rank, jobs, cpu_ranks())
    rows = outcomes[0].rows
    assert {row.op for row in rows} == {
        "scatter",
        "gather",
        "attention",
        "attention_step",
        "replayed exchange",
    }
    assert all(row.exact for row in rows if (row.details or {}).get("variant") != "compute")
    assert rows_from_json(json.loads(json.dumps(rows_to_json(rows))))[0].transport == "gloo"
    replayed = rows[-1].details or {}
    assert (replayed["replays_done"], replayed["mismatches"]) == (5, 0)
    assert replayed["control_mismatches"] > 0


def _replay_with_wrong_pattern(context: RankContext, argument: ReplayJob) -> list[Row]:
    right = replays.pattern

    def wrong(shape: Shape, seq: range, heads: range, device: torch.device) -> torch.Tensor:
        values = right(shape, seq, heads, device)
        if len(seq) == shape.seq:  # what is expected, not what is sent
            values[0, 1, 0, 0] += 1
        return values

    replays.pattern = wrong
    return replays.replay_rows(context, argument)


def _replay_blindly(context: RankContext, argument: ReplayJob) -> list[Row]:
    checked: Any = replays.CheckedExchange
    checked.replay_judged_wrongly = checked.replay
    return replays.replay_rows(context, argument)


def test_replays_count_one_wrong_element_on_each_rank_in_each_replay() -> None:
    by_rank = run_ranks(_replay_with_wrong_pattern, ReplayJob(((TINY, 5),)), cpu_ranks())
    (row,) = by_rank[0]
    assert row.exact is False
    assert row.details["mismatches"] == 2 * 5


def test_a_check_of_replays_that_notices_nothing_is_an_error() -> None:
    with pytest.raises(RankError, match="BLIND"):
        run_ranks(_replay_blindly, ReplayJob(((TINY, 5),)), cpu_ranks())


# ---- command line --------------------------------------------------------------------------------


def _invoke(monkeypatch: pytest.MonkeyPatch, rows: list[Row], *arguments: str) -> Any:
    outcome = Outcome(replace(MACHINE, gpu="cpu", gpu_count=0), rows, "gloo")
    monkeypatch.setattr(replay_benchmark, "_run", lambda console, plan: outcome)
    app = typer.Typer()
    app.command()(replay_benchmark.run_benchmark)
    return CliRunner().invoke(app, ["--cpu", *arguments])


def test_a_wrong_row_makes_the_command_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    good = _invoke(monkeypatch, [a_row()])
    assert good.exit_code == 0, good.output
    bad = _invoke(monkeypatch, [a_row(), a_row(exact=False)])
    assert bad.exit_code == 1
    assert "WRONG" in bad.output
    assert "1 of 2 rows are WRONG" in bad.output


def test_a_wrong_option_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = _invoke(monkeypatch, [], "--world-size", "7")
    assert refused.exit_code == 2
    assert "splits none" in refused.output


def test_results_of_a_functional_run_go_only_where_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    _invoke(monkeypatch, [a_row()])
    assert list(tmp_path.iterdir()) == []
    _invoke(monkeypatch, [a_row()], "--out", "here", "--commit", "abc")
    assert json.loads(Path("here/cpu/functional.json").read_text())["commit"] == "abc"


@pytest.mark.slow
def test_the_command_without_gpus_says_what_its_times_mean(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ulysses_ops.tools.replay_benchmark", "--cpu"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "functional run on CPU: these times say nothing about GPUs" in done.stdout
    assert "attention_step" in done.stdout
    assert "WRONG" not in done.stdout
    assert list(tmp_path.iterdir()) == []


# ---- tables of README.md -------------------------------------------------------------------------

MARKED = "".join(
    f"# {name}\n<!-- table:{name} -->\nold\n<!-- /table -->\n" for name in readme_tables.TABLES
)


def _attention_row(variant: str, median_us: float) -> Row:
    return a_row(
        op="attention_step",
        median_us=median_us,
        exact=None if variant == "compute" else True,
        tax_percent=median_us - 100,
        details={"variant": variant},
    )


def _written_results(folder: Path) -> Path:
    steps = [("ours", 103.0), ("baseline", 110.0), ("overlapped", 107.0), ("compute", 100.0)]
    rows = [a_row(), *(_attention_row(variant, time_us) for variant, time_us in steps)]
    rows.append(a_row(op="handshake round", model="", details={"handshake_us": 5.5}))
    replayed = {"replays_done": 100_000, "mismatches": 0, "shared_gpus": True}
    rows.append(a_row(op="replayed exchange", details=replayed))
    write_results(folder, "all", MACHINE, "0123456789abcdef", {"rows": rows_to_json(rows)})
    tests = {
        "selection": "tests/gpu",
        "trees": {"csrc": "f" * 40},
        "passed": ["a", "b"],
        "failed": {},
        "skipped": {"c": "needs four GPUs"},
    }
    write_results(folder, "tests", MACHINE, "0123456789abcdef", tests)
    return folder


def _update(readme: Path, results: Path, *more: str) -> Any:
    app = typer.Typer()
    app.command()(readme_tables.update_tables)
    arguments = ["--readme", str(readme), "--results", str(results), *more]
    return CliRunner().invoke(app, arguments)


def test_tables_are_written_from_results_and_checked(tmp_path: Path) -> None:
    results = _written_results(tmp_path / "results")
    readme = tmp_path / "README.md"
    readme.write_text(MARKED)
    assert _update(readme, results, "--check").exit_code == 1
    assert readme.read_text() == MARKED
    assert _update(readme, results).exit_code == 0
    text = readme.read_text()
    for part in (
        "2x NVIDIA H200, driver 580.1, CUDA 13.0, NCCL 2.28.9, torch 2.11.0, commit 0123456789ab",
        "| scatter, Wan 480p, graph | 1.0 | 100.0 | 120.0 | 10 | 95 % | 2.40 | 2.30 | yes |",
        "| Wan 480p, S=32760, H=40 | 100 | 103 (+3.0 %) | 110 (+10.0 %) | 107 (+7.0 %) |",
        "| one handshake, in a graph | 5.5 |",
        "| 2 (sharing GPUs) | 100,000 | 0 |",
        "| tests/gpu | 2 | 0 | 1 | csrc ffffffffffff |",
    ):
        assert part in text
    assert "old" not in text
    assert _update(readme, results, "--check").exit_code == 0
    readme.write_text(text.replace("95 %", "99 %"))  # a number that was written by hand
    assert _update(readme, results, "--check").exit_code == 1


def test_tables_without_results_say_so(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(MARKED)
    _update(readme, tmp_path)
    assert readme.read_text().count(readme_tables.NOTHING) == len(readme_tables.TABLES)


def test_an_unknown_table_is_an_error() -> None:
    with pytest.raises(ValueError, match="table:speed is unknown"):
        readme_tables.regenerate("<!-- table:speed -->\n<!-- /table -->", [])


def test_tables_of_the_readme_are_current() -> None:
    text = (ROOT / "README.md").read_text()
    assert readme_tables.MARKED.search(text), "README.md has no marked table"
    records = readme_tables.read_records(ROOT / "docs" / "results")
    assert readme_tables.regenerate(text, records) == text, (
        "run python -m ulysses_ops.tools.readme_tables"
    )


# ---- record of the suite -------------------------------------------------------------------------

SUITE = """
import pytest

def test_good(): assert True
def test_bad(): assert 1 == 2, "one is not two"
@pytest.mark.skip(reason="needs four GPUs")
def test_skipped(): assert False
@pytest.mark.xfail(reason="known", strict=True)
def test_expected(): assert False
@pytest.fixture
def broken(): raise RuntimeError("no device")
def test_error(broken): assert True
"""


def _run_suite(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_suite.py").write_text(SUITE)
    plugin = ["-p", "ulysses_ops.tools.record_tests", "-p", "no:cacheprovider"]
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *plugin, *arguments, "test_suite.py"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=100,
    )


def test_a_run_of_the_suite_is_recorded(tmp_path: Path) -> None:
    trees = ["--record-commit", "abc", "--record-trees", "csrc=1,ulysses_ops=2,graphs=3"]
    done = _run_suite(tmp_path, "--record-tests", "out", *trees)
    content = json.loads((tmp_path / "out" / "cpu" / "tests.json").read_text())
    assert done.returncode == 1  # the plugin hides no failure
    assert content["passed"] == ["test_suite.py::test_good"]
    assert "one is not two" in content["failed"]["test_suite.py::test_bad"]
    assert "no device" in content["failed"]["test_suite.py::test_error"]
    assert content["skipped"] == {
        "test_suite.py::test_skipped": "needs four GPUs",
        "test_suite.py::test_expected": "fails as expected: known",
    }
    assert content["trees"] == {"csrc": "1", "ulysses_ops": "2", "graphs": "3"}
    assert content["commit"] == "abc"


def test_a_record_needs_an_id_for_every_tree(tmp_path: Path) -> None:
    done = _run_suite(tmp_path, "--record-tests", "out", "--record-trees", "csrc=1")
    assert done.returncode == 4
    assert "must give an id for each of csrc, ulysses_ops, graphs" in done.stderr
    assert not (tmp_path / "out").exists()
