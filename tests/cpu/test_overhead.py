"""What is not bytes: launches by their nodes, forms of handshakes, and the tables of both."""

from __future__ import annotations

import ctypes
from ctypes import CDLL
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from recorded import a_row

from ulysses_ops.errors import UlyssesError
from ulysses_ops.tools import benchmark_run, cuda_driver, handshake_forms, launch_kinds
from ulysses_ops.tools.benchmark_job import run_rank
from ulysses_ops.tools.benchmark_plan import Choice, plan_benchmark
from ulysses_ops.tools.block_job import BlockJob
from ulysses_ops.tools.cuda_driver import (
    await_equal,
    batch,
    captured_nodes,
    nodes_if_captured,
    write,
)
from ulysses_ops.tools.device_code import compile_cubin
from ulysses_ops.tools.graph_launch import fit_line, rows_of
from ulysses_ops.tools.launch import Launch, RankContext, run_ranks
from ulysses_ops.tools.markdown import Record
from ulysses_ops.tools.models import Resolution
from ulysses_ops.tools.overhead_job import OverheadJob
from ulysses_ops.tools.overhead_table import forms_table, launch_table
from ulysses_ops.tools.report import Outcome
from ulysses_ops.tools.results import Row, rows_to_json
from ulysses_ops.tools.shapes import Shape
from ulysses_ops.tools.spin_kernel import SOURCE
from ulysses_ops.tools.step_cases import select_cases
from ulysses_ops.tools.step_job import _section
from ulysses_ops.tools.timing import Effort, Summary

LAUNCH = Launch(2, "cpu", 0, 90.0, 60.0)


def _record(rows: list[Row]) -> Record:
    return Record("h200-x2", "overhead", {"rows": rows_to_json(rows), "commit": "abc"})


# ---- the line ------------------------------------------------------------------------------------


def test_the_line_of_least_squares() -> None:
    assert fit_line([(64, 74.0), (256, 266.0), (1024, 1034.0)]) == pytest.approx((1.0, 10.0))
    # Off the line by +1, -2, +1 at equal distances: neither slope nor height may follow one point.
    slope, height = fit_line([(0, 1.0), (1, 0.0), (2, 5.0)])
    assert (slope, height) == pytest.approx((2.0, 0.0))


@pytest.mark.parametrize("points", [[], [(1, 2.0)], [(1, 2.0), (1, 3.0)]])
def test_one_number_of_units_makes_no_line(points: list[tuple[float, float]]) -> None:
    with pytest.raises(ValueError, match="at least two"):
        fit_line(points)


# ---- the driver ----------------------------------------------------------------------------------


def test_operations_are_laid_out_as_the_driver_reads_them() -> None:
    assert ctypes.sizeof(cuda_driver._MemOp) == 48
    for op, kind, flags in ((write(0x1000, 7), 5, 0), (await_equal(0x1000, 7), 4, 1)):
        raw = bytes(op)
        assert int.from_bytes(raw[0:4], "little") == kind
        assert int.from_bytes(raw[8:16], "little") == 0x1000
        assert int.from_bytes(raw[16:24], "little") == 7
        assert int.from_bytes(raw[24:28], "little") == flags


class _Driver:
    """A driver that captures a graph of these node types."""

    def __init__(self, kinds: list[int], status: int = 0) -> None:
        self.kinds = kinds
        self.status = status
        self.batches: list[list[int]] = []

    def __call__(self, name: str, *arguments: Any) -> None:
        if self.status:
            message = f"{name} gave {self.status}"
            raise UlyssesError(message)
        if name == "cuStreamGetCaptureInfo_v3":
            arguments[3]._obj.value = 0xABC if self.kinds else None
        elif name == "cuGraphGetNodes" and arguments[1] is None:
            arguments[2]._obj.value = len(self.kinds)
        elif name == "cuGraphGetNodes":
            for place in range(len(self.kinds)):
                arguments[1][place] = place + 1
        elif name == "cuGraphNodeGetType":
            arguments[1]._obj.value = self.kinds[arguments[0].value - 1]
        elif name == "cuStreamBatchMemOp_v2":
            self.batches.append([op.operation for op in arguments[2][: arguments[1].value]])


def _use(monkeypatch: pytest.MonkeyPatch, driver: _Driver) -> None:
    monkeypatch.setattr(cuda_driver, "call", driver)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))


def test_nodes_are_counted_by_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    _use(monkeypatch, _Driver([0, 12, 1, 12, 7]))
    assert captured_nodes() == {"kernel": 1, "batch": 2, "copy": 1, "type 7": 1}


def test_what_cannot_be_counted_does_not_end_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    _use(monkeypatch, _Driver([0, 0]))
    for capturing, status, found in ((True, 0, {"kernel": 2}), (True, 1, {}), (False, 0, {})):
        monkeypatch.setattr(
            torch.cuda, "is_current_stream_capturing", lambda is_so=capturing: is_so
        )
        monkeypatch.setattr(cuda_driver, "call", _Driver([0, 0], status))
        assert nodes_if_captured() == found


def test_without_a_capture_there_is_nothing_to_count(monkeypatch: pytest.MonkeyPatch) -> None:
    _use(monkeypatch, _Driver([]))
    with pytest.raises(UlyssesError, match="not captured"):
        captured_nodes()


@pytest.mark.parametrize(("operations", "kinds"), [(1, [5]), (5, [5, 5, 4, 5, 5])])
def test_a_batch_answers_its_own_wait(
    operations: int, kinds: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = _Driver([])
    _use(monkeypatch, driver)
    launch_kinds._batches(torch.device("cpu"), operations)(3)
    assert driver.batches == 3 * [kinds]


def test_an_error_of_the_driver_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(cuStreamBatchMemOp_v2=_refuse))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    with pytest.raises(UlyssesError, match="cuStreamBatchMemOp_v2 gave 801"):
        batch([write(8, 1)])()


def _refuse(*arguments: Any) -> int:
    return 801


def _copied(monkeypatch: pytest.MonkeyPatch, *, is_flat: bool, status: int = 0) -> list[Any]:
    calls: list[Any] = []

    def copy(*arguments: int) -> int:
        calls.append(arguments)
        return status

    for name in ("memcpy_async", "memcpy_2d_async"):
        monkeypatch.setattr(launch_kinds, name, lambda: copy)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    launch_kinds._own_copies(torch.device("cpu"), is_flat=is_flat)(2)
    return calls


def test_copies_of_both_forms_move_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    flat = _copied(monkeypatch, is_flat=True)
    rows = _copied(monkeypatch, is_flat=False)
    assert [call[2] for call in flat] == 2 * [launch_kinds.COPY_BYTES]
    assert [call[4] * call[5] for call in rows] == 2 * [launch_kinds.COPY_BYTES]
    assert all(call[1] > call[4] and call[3] > call[4] for call in rows)  # rows stand apart


def test_a_copy_that_is_refused_ends_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UlyssesError, match="the runtime gave 1"):
        _copied(monkeypatch, is_flat=True, status=1)


def _compiler() -> bool:
    library = Path(torch.__file__).parent / "lib" / "libcaffe2_nvrtc.so"
    try:
        CDLL(str(library))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not _compiler(), reason="torch has no runtime compiler here")
def test_the_spinning_kernel_compiles() -> None:
    assert compile_cubin(SOURCE, "sm_90").startswith(b"\x7fELF")
    with pytest.raises(UlyssesError, match="device code for sm_90"):
        compile_cubin("no kernel", "sm_90")


# ---- on CPU ranks --------------------------------------------------------------------------------


def test_both_sections_run_on_two_cpu_ranks() -> None:
    jobs = [OverheadJob(section, Effort(2, 0.5)) for section in ("launch", "forms")]
    outcomes: list[Outcome] = run_ranks(run_rank, jobs, LAUNCH)
    one, two = outcomes
    assert one.rows == two.rows
    found = {(row.op, row.model) for row in one.rows}
    assert found == {
        ("graph launch", "kernel"),
        ("graph launch", "exchange of ours"),
        ("handshake form", "barrier of gloo"),
    }
    by_units = [row for row in one.rows if row.model == "kernel"]
    assert [(row.details or {})["units"] for row in by_units] == [4, 8, 16]
    assert {(row.details or {})["us_per_unit"] for row in by_units} != {0.0}
    assert one.not_run["launch: graph launch: copy to a peer, 2-D"] == "needs a GPU"
    assert one.finished == ("launch", "forms")


def _fails_on_one(context: RankContext, argument: None) -> tuple[list[Row], dict[str, str]]:
    def broken() -> handshake_forms.Form:
        if context.rank == 1:
            message = "no such signal"
            raise ValueError(message)
        return handshake_forms.Form(lambda count: None, lambda run, stack: run)

    def unanswered() -> handshake_forms.Form:
        rest = context.rank == 0
        return handshake_forms.Form(lambda count: None, lambda run, stack: run, lambda: rest)

    not_run: dict[str, str] = {}
    forms = {"broken": broken, "unanswered": unanswered}
    gemms = Shape("gemms", "GEMMs", 64, 4, 16)
    rows = handshake_forms.form_rows(context, forms, Effort(1, 0.5), not_run, gemms=gemms)
    return rows, not_run


def test_a_form_that_fails_on_one_rank_runs_on_none_and_one_left_waiting_is_wrong() -> None:
    for rows, not_run in run_ranks(_fails_on_one, None, LAUNCH):
        assert not_run == {"handshake form: broken": "rank 1: ValueError: no such signal"}
        assert [(row.model, row.exact) for row in rows] == [("unanswered", False)]


# ---- plans ---------------------------------------------------------------------------------------


def test_each_section_has_a_file_of_its_own_and_is_named() -> None:
    effort = Effort(2, 8.0)
    plans = plan_benchmark(LAUNCH, Choice(only="forms,launch"), effort)
    assert [(plan.name, plan.jobs[0].section) for plan in plans] == [
        ("graph_launch", "launch"),
        ("handshake_forms", "forms"),
    ]
    names = {plan.name for plan in plan_benchmark(LAUNCH, Choice(), effort)}
    assert names == {"attention_step", "block"}


def test_one_rank_is_enough_for_launches_alone() -> None:
    alone = Launch(1, "cuda", 1)
    (plan,) = plan_benchmark(alone, Choice(only="launch"), Effort())
    assert plan.launch.world_size == 1
    for only in ("forms", "launch,block", "all"):
        with pytest.raises(ValueError, match="world_size=1"):
            plan_benchmark(alone, Choice(only=only), Effort())


def test_parts_of_a_step_are_chosen() -> None:
    (plan,) = plan_benchmark(
        LAUNCH, Choice(only="step", models="flux", parts="graphs,step"), Effort()
    )
    assert plan.jobs[0].parts == ("step", "graphs")
    for parts, complaint in (("speed", "are unknown"), ("launches", "name it as well")):
        with pytest.raises(ValueError, match=complaint):
            plan_benchmark(LAUNCH, Choice(only="step", parts=parts), Effort())


def test_a_step_of_another_size_is_timed_and_the_rest_stays() -> None:
    (usual,) = select_cases("wan-14b")
    (short,) = select_cases("wan-14b", None, "256x128x17")
    assert short.resolution == Resolution(128, 256, 17)
    assert short.resolutions == usual.resolutions
    assert short.loop_resolution == usual.loop_resolution
    assert "256x128, 17 frames" in short.shape(short.resolution).title
    names = [_section(part, case) for case in (usual, short) for part in ("step", "graphs")]
    assert names == [
        "step/wan-14b",
        "graphs/wan-14b",
        "step/wan-14b/256x128, 17 frames",  # a resumed run does not take one for the other
        "graphs/wan-14b",
    ]
    for size in ("256", "250x256", "256x256x16", "0x16", "axb", "16x16x1x1"):
        with pytest.raises(ValueError, match="size: "):
            select_cases("wan-14b", None, size)
    with pytest.raises(ValueError, match="makes images"):
        select_cases("flux", None, "256x256x5")


def test_trials_are_left_out_where_they_are_not_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def try_variants(*arguments: Any) -> dict[str, Any]:
        tried.append("tried")
        return {}

    monkeypatch.setattr(benchmark_run, "try_variants", try_variants)
    monkeypatch.setattr(benchmark_run, "unavailable", lambda device: {"zero-CTA": "no NCCL"})
    found: dict[bool, dict[str, Any]] = {}
    for trial in (False, True):
        choice = Choice(only="block", shapes="wan-720p", trial=trial)
        (plan,) = plan_benchmark(Launch(2, "cuda", 2), choice, Effort())
        found[trial] = benchmark_run._try_blocks(plan, 5.0, lambda text: None)
    assert tried == ["tried"]
    assert found[False]["zero-CTA"].not_run == {"zero-CTA": "no NCCL"}  # what is known is told


def test_blocks_are_timed_in_the_modes_that_are_named() -> None:
    def modes_of(named: str) -> tuple[str, ...]:
        (plan,) = plan_benchmark(LAUNCH, Choice(only="block", modes=named), Effort())
        (job,) = plan.jobs
        assert isinstance(job, BlockJob)
        return job.modes

    assert modes_of("all") == ("eager", "graph")
    assert modes_of("graph") == ("graph",)
    with pytest.raises(ValueError, match=r"modes: \['fast'\] are unknown"):
        modes_of("fast,graph")


# ---- tables --------------------------------------------------------------------------------------


def _times(median_us: float) -> Summary:
    return Summary(median_us, median_us, (median_us,), 24)


def _launches(name: str, nodes: int, us_a_unit: float) -> list[Row]:
    context: Any = SimpleNamespace(world_size=2, device=torch.device("cuda"))
    found = {
        units: (_times(10.0 + us_a_unit * units), {"batch": nodes * units} if nodes else {})
        for units in (16, 64)
    }
    return rows_of(name, found, context, "ce")


def test_launches_have_a_table() -> None:
    table = launch_table(_record(_launches("handshake", 2, 3.0) + _launches("odd", 0, 1.0)))
    assert "| handshake | 2.0 batch | 16: 58, 64: 202 | 3.00 | 1.50 | 10 |" in table
    assert "| odd |  | 16: 26, 64: 74 | 1.00 |  | 10 |" in table
    assert launch_table(_record([a_row()])) == ""


def test_the_nodes_of_a_whole_step_are_told() -> None:
    nodes = {"kernel": 1200, "batch": 300}
    details = {"variant": "ours", "nodes": nodes}
    step = a_row(op="step", model="FLUX", host_us=3000.0, details=details)
    table = launch_table(_record([step, a_row(op="step", host_us=1.0)]))
    assert "| FLUX, ours, in a graph | 1,200 kernel, 300 batch | 3,000 | 2.00 |" in table
    assert table.count("in a graph") == 1


def test_forms_and_forks_have_a_table() -> None:
    def form(mode: Any, alone: float, **details: Any) -> Row:
        told = {"under_gemms_us": 2 * alone, "gemms_lose_us": 0.25, "is_covered": True, **details}
        return a_row(op="handshake form", model="spin", mode=mode, median_us=alone, details=told)

    fork = a_row(op="fork and join", model="a fork", median_us=2.5, details={"over_line_us": 0.75})
    rows = [form("eager", 5.0), form("graph", 6.0, is_covered=False), fork]
    table = forms_table(_record(rows))
    assert "| spin | 5.0 | 10.0 | 0.25 | 6.0 | 12.0 (in part) | 0.25 |" in table
    assert "| a fork | 2.50 | 0.75 |" in table
    assert forms_table(_record([a_row()])) == ""
