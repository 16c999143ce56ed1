"""Whole denoising steps of one model, on one rank: timed, looped, held together, counted."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from ulysses_ops.communicator import UlyssesCommunicator
from ulysses_ops.tools.attempts import attempt
from ulysses_ops.tools.block_variants import OURS
from ulysses_ops.tools.budget import Budget
from ulysses_ops.tools.launch import RankContext
from ulysses_ops.tools.models import build
from ulysses_ops.tools.profiled import profile_step
from ulysses_ops.tools.replays import PARTING_S
from ulysses_ops.tools.report import NO_TIME, Report, ResumeFrom, describe_transport
from ulysses_ops.tools.results import Row
from ulysses_ops.tools.step_bench import StepBench, share_model
from ulysses_ops.tools.step_cases import StepCase, described
from ulysses_ops.tools.step_loop import generation_rows
from ulysses_ops.tools.step_memory import WINDOWS_PER_SHAPE, memory_rows
from ulysses_ops.tools.step_rows import OP, STEPS, StepSite, open_bench, step_rows
from ulysses_ops.tools.step_variants import FALLBACK, select_step_variants
from ulysses_ops.tools.timeline import Activity, Timeline
from ulysses_ops.tools.timing import Effort

SECTION = "step"
# Parts of a model, and their part of the time.
WEIGHTS = {"step": 5.0, "generation": 1.5, "graphs": 2.0, "launches": 1.5}
OF_SIZE = ("step", "launches")  # parts that are of the size that is timed
MIN_ROUNDS = 5
BATCHES = 5.0  # times the batch of other sections: steps are long


@dataclass(frozen=True)
class StepJob:
    """What to measure.

    Attributes:
        case: One model.
        effort: How long to measure.
        variants: Names, separated by commas, or ``"all"``.
        steps: Of a whole generation.
        transport: Transport to insist on.
        mapping: Mapping to insist on.
        signal: Signal to insist on.
        resume: An earlier run to go on with.
        parts: Some of ``WEIGHTS``.
    """

    case: StepCase
    effort: Effort
    variants: str = "all"
    steps: int = STEPS
    transport: str | None = None
    mapping: str | None = None
    signal: str | None = None
    resume: ResumeFrom | None = None
    parts: tuple[str, ...] = tuple(WEIGHTS)


def run_step_job(context: RankContext, job: StepJob, report: Report) -> None:
    """Measure every part of the model that the report lacks. Collective."""
    if job.resume is not None:
        report.resume(job.resume)
    case = job.case
    weights = {
        part: weight
        for part, weight in WEIGHTS.items()
        if part in job.parts and not report.has(_section(part, case))
    }
    if not weights:
        return
    found = attempt(context, _import_diffusers)
    if found.reason:
        report.leave_out(_section("step", case), found.reason)
        return
    with ExitStack() as closing:
        site = _open_site(context, job, closing)
        report.transport = report.transport or describe_transport(site.comms[OURS])
        _measure(site, job, weights, report)


def _section(part: str, case: StepCase) -> str:
    """Name of a part; what is timed at another size than the model's own is another section."""
    is_own = part not in OF_SIZE or case.resolution == case.resolutions[0]
    return f"{part}/{case.model.key}" + ("" if is_own else f"/{described(case.resolution)}")


def _import_diffusers() -> bool:
    import diffusers

    return bool(diffusers.__version__)


def _open_site(context: RankContext, job: StepJob, closing: ExitStack) -> StepSite:
    """Communicators, and a model with random weights. Collective."""
    case = job.case
    on_gpu = context.device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32

    def communicator(purpose: str, transport: str | None, **options: Any) -> UlyssesCommunicator:
        return closing.enter_context(
            UlyssesCommunicator(
                device=context.device,
                transport=transport,
                name=f"bench.step.{case.model.key}.{purpose}",
                # Of all shapes, of the loop, and of one more.
                max_windows=WINDOWS_PER_SHAPE * (len(case.resolutions) + 2),
                **options,
            )
        )

    context.progress(f"{case.model.title}: communicators")
    options = {"mapping": job.mapping, "signal": job.signal}
    comms = {OURS: communicator(OURS, job.transport, **options)}
    if any(variant.name == FALLBACK for variant in select_step_variants(job.variants)):
        comms[FALLBACK] = communicator(FALLBACK, "nccl" if on_gpu else None)
    context.progress(f"{case.model.title}: weights")

    def make() -> torch.nn.Module:
        return build(case.model, layers=case.layers, device=context.device, dtype=dtype)

    shared = share_model(context, make)
    closing.callback(shared.close)
    return StepSite(context, case, shared, comms, dtype)


def _measure(site: StepSite, job: StepJob, weights: dict[str, float], report: Report) -> None:
    """The step first, which is what the others are about; its launches last."""
    context, case = site.context, site.case
    budget = Budget(context.deadline - PARTING_S, weights)
    not_run: dict[str, str] = {}
    with ExitStack() as closing:
        bench: StepBench | None = None
        for part in weights:
            section = _section(part, case)
            effort = budget.effort(part, job.effort)
            assert effort.until is not None
            if context.gather(budget.left_s <= 0)[0]:
                report.leave_out(section, NO_TIME)
                continue
            if part in ("step", "launches") and bench is None:
                bench = open_bench(site, select_step_variants(job.variants), closing, not_run)
            rows: list[Row] = []
            if part == "step":
                assert bench is not None
                batch_ms = BATCHES * effort.batch_ms
                rows = step_rows(
                    site, bench, replace(effort, batch_ms=batch_ms, min_rounds=MIN_ROUNDS)
                )
            elif part == "generation":
                rows = generation_rows(site, job.steps, effort.until)
            elif part == "graphs":
                rows = memory_rows(site, effort.until, not_run)
            elif bench is not None:
                _count_launches(site, bench, effort.until, not_run, report)
            report.add(section, rows, {f"{section}: {key}": why for key, why in not_run.items()})
            not_run.clear()


def _count_launches(
    site: StepSite, bench: StepBench, until: float, not_run: dict[str, str], report: Report
) -> None:
    """Profile a few calls of each variant, graphs first, and add what was seen to its row.

    Last of all, since a process that has used the profiler is slower on the host.
    """
    if site.context.device.type == "cpu":
        return
    lines: dict[str, Timeline] = {}
    in_order = sorted(bench.built.values(), key=lambda built: built.mode != "graph")
    for number, built in enumerate(in_order):
        if number and site.context.gather(_is_over(until))[0]:
            not_run[built.key] = NO_TIME
            continue
        site.context.progress(f"{site.case.model.title}: launches of {built.key}")
        if built.prepare is not None:
            built.prepare()
        lines[built.key] = profile_step(site.context, built.run, built.key)
    told = site.context.gather({key: asdict(line) for key, line in lines.items()})[0]
    seen = {
        key: Timeline(tuple(Activity(**each) for each in line["activities"]), line["launches"])
        for key, line in told.items()
    }
    report.amend(lambda row: counted(row, site.case, seen))


def _is_over(until: float) -> bool:
    return time.monotonic() >= until


def counted(row: Row, case: StepCase, lines: dict[str, Timeline]) -> Row:
    """The row of a step with its launches, and how much of its exchange is exposed."""
    details = row.details or {}
    line = lines.get(f"{details.get('variant')}/{row.mode}")
    if row.op != OP or line is None or row.model != case.shape(case.resolution).title:
        return row
    return replace(row, launches=line.launches, details={**details, "profile": line.numbers()})
