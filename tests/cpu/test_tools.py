"""The tools without GPUs: the launcher, flat copies, the job of a rank, and the command line."""

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
from unittest import mock

import pytest
import torch
import typer
from recorded import MACHINE, a_row
from typer.testing import CliRunner

from ulysses_ops import UlyssesCommunicator
from ulysses_ops.errors import UlyssesError
from ulysses_ops.plan import Layout
from ulysses_ops.reference import shard_of
from ulysses_ops.tools import benchmark_run, peer_copy, replay_benchmark, replays, uneven_rows
from ulysses_ops.tools.benchmark_job import BenchmarkJob, run_rank
from ulysses_ops.tools.launch import Launch, RankContext, RankError, run_ranks
from ulysses_ops.tools.parity import ParityJob
from ulysses_ops.tools.peer_copy import PeerCopy, received_slot
from ulysses_ops.tools.replays import ReplayJob
from ulysses_ops.tools.report import Outcome
from ulysses_ops.tools.results import Row, rows_from_json, rows_to_json
from ulysses_ops.tools.shapes import FUNCTIONAL, Shape
from ulysses_ops.tools.timing import Effort

ROOT = Path(__file__).resolve().parents[2]
TINY = FUNCTIONAL[0]


def cpu_ranks(limit_s: float = 90.0, stall_s: float = 60.0, world_size: int = 2) -> Launch:
    return Launch(world_size, "cpu", 0, limit_s, stall_s)


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
    others = set(multiprocessing.active_children())  # pools of other tests
    with pytest.raises(RankError, match=complaint):
        run_ranks(work, None, cpu_ranks())
    assert time.monotonic() - start < 45  # not the stall limit of the rank that waits
    assert set(multiprocessing.active_children()) <= others


@pytest.mark.parametrize(
    ("limit_s", "stall_s"), [(14.0, 60.0), pytest.param(90.0, 12.0, marks=pytest.mark.long)]
)
def test_ranks_that_hang_are_ended_in_time(limit_s: float, stall_s: float) -> None:
    start = time.monotonic()
    others = set(multiprocessing.active_children())  # pools of other tests
    with pytest.raises(RankError, match=r"ranks 0 .* were ended after"):
        run_ranks(_sleep_for_ever, None, cpu_ranks(limit_s, stall_s, world_size=1))
    assert time.monotonic() - start < 40
    assert set(multiprocessing.active_children()) <= others


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

    monkeypatch.setattr(peer_copy, "memcpy_async", lambda: memcpy)
    stream = SimpleNamespace(cuda_stream=0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    source = torch.empty(16, dtype=torch.uint8)
    PeerCopy(_window(64, (1000, 2000, 3000, 4000)), 2, 16, source).run()
    assert calls == [(base + 32, source.data_ptr(), 16) for base in (4000, 1000, 2000)]


def test_a_flat_copy_that_fails_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_copy, "memcpy_async", lambda: lambda *arguments: 1)
    stream = SimpleNamespace(cuda_stream=0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    copy = PeerCopy(_window(32, (1000, 2000)), 0, 16, torch.empty(16, dtype=torch.uint8))
    with pytest.raises(UlyssesError, match="cudaMemcpyAsync returned 1"):
        copy.run()


def test_slots_of_uneven_sizes_begin_where_they_are_said_to() -> None:
    source = torch.empty(16, dtype=torch.uint8)
    with mock.patch.object(peer_copy, "memcpy_async"):
        PeerCopy(_window(40, (1000, 2000, 3000)), 2, 16, source, offset=24)
        with pytest.raises(ValueError, match="16 bytes to each of 3 ranks, at 25, do not fit"):
            PeerCopy(_window(40, (1000, 2000, 3000)), 2, 16, source, offset=25)
    window = _window(40, None)
    window.tensor.copy_(torch.arange(40, dtype=torch.uint8))
    assert received_slot(window, 24, 16).tolist() == list(range(24, 40))


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
        "scatter, beside GEMMs",
        "scatter, one rank late",
        "all_gather",
        "gather, beside GEMMs",
        "gather, one rank late",
        *(
            f"{op}, {splits}"
            for op in ("scatter", "gather")
            for splits in ("even", "uneven rows", "uneven heads")
        ),
        "replayed exchange",
    }
    for row in rows:
        if row.op.endswith(", even"):
            assert (row.details or {})["percent_over_even"] == 0
    assert all(row.exact for row in rows if (row.details or {}).get("variant") != "compute")
    assert rows_from_json(json.loads(json.dumps(rows_to_json(rows))))[0].transport == "gloo"
    replayed = rows[-1].details or {}
    assert (replayed["replays_done"], replayed["mismatches"]) == (5, 0)
    assert replayed["control_mismatches"] > 0


def _uneven_with_wrong_rows(context: RankContext, argument: None) -> dict[str, bool | None]:
    def wrong(whole: torch.Tensor, layout: Layout, rank: int) -> torch.Tensor:
        part = shard_of(whole, layout, rank)
        return part.flip(1) if rank == 1 and layout.seq_splits[0] != layout.seq_splits[1] else part

    with (
        mock.patch.object(uneven_rows, "shard_of", wrong),
        UlyssesCommunicator(device=context.device, name="test.uneven") as comm,
    ):
        rows = uneven_rows.uneven_rows(context, comm, TINY, Effort(1, 0.5))
    return {row.op: row.exact for row in rows}


def test_uneven_rows_at_the_wrong_place_are_seen() -> None:
    for exact in run_ranks(_uneven_with_wrong_rows, None, cpu_ranks()):
        wrong = [op for op, is_exact in exact.items() if not is_exact]
        assert wrong == ["scatter, uneven rows", "gather, uneven rows"]


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

    def run_ranks(work: Any, jobs: Any, launch: Launch, *, on_progress: Any, on_part: Any) -> None:
        on_progress("measuring")
        on_part(outcome)

    monkeypatch.setattr(benchmark_run, "run_ranks", run_ranks)
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
    for op in ("attention_step", "scatter, beside GEMMs", "block "):
        assert op in done.stdout
    assert "not run: block: flashinfer: needs GPUs" in done.stdout
    assert "WRONG" not in done.stdout
    assert list(tmp_path.iterdir()) == []
