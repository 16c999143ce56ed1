"""What one rank does: the benchmark, replays or small checks, by the type of each job."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from ulysses_ops.communicator import UlyssesCommunicator
from ulysses_ops.tools.all_gather_rows import all_gather_rows
from ulysses_ops.tools.attention_rows import attention_rows
from ulysses_ops.tools.block_job import BlockJob, run_block_job
from ulysses_ops.tools.budget import Budget
from ulysses_ops.tools.exchange_rows import exchange_rows
from ulysses_ops.tools.handshake_rows import handshake_rows, host_cost_rows
from ulysses_ops.tools.launch import RankContext
from ulysses_ops.tools.load_rows import load_rows
from ulysses_ops.tools.overhead_job import OverheadJob, run_overhead_job
from ulysses_ops.tools.parity import ParityJob, parity_rows
from ulysses_ops.tools.replays import PARTING_S, ReplayJob, replay_rows
from ulysses_ops.tools.report import NO_TIME, Outcome, Report, ResumeFrom, describe_transport
from ulysses_ops.tools.results import Row, read_machine
from ulysses_ops.tools.shapes import Shape
from ulysses_ops.tools.step_job import StepJob, run_step_job
from ulysses_ops.tools.timing import Effort
from ulysses_ops.tools.uneven_rows import uneven_rows

HANDSHAKE = "handshake"
# What is measured at every shape, and its part of the time.
WEIGHTS = {"exchange": 1.0, "attention": 2.0, "load": 1.5, "uneven": 1.0, "all_gather": 1.0}
SECTIONS = (HANDSHAKE, *WEIGHTS)


@dataclass(frozen=True)
class BenchmarkJob:
    """What to measure.

    Attributes:
        shapes: Shapes of Q, K and V.
        effort: How long to measure; attention steps get 3 times the batch.
        sections: Some of ``SECTIONS``.
        transport: Transport to insist on.
        mapping: Mapping to insist on.
        signal: Signal to insist on.
        resume: An earlier run to go on with.
    """

    shapes: tuple[Shape, ...]
    effort: Effort
    sections: tuple[str, ...] = SECTIONS
    transport: str | None = None
    mapping: str | None = None
    signal: str | None = None
    resume: ResumeFrom | None = None


def run_rank(context: RankContext, jobs: list[Any]) -> Outcome:
    """Run every job in turn; which it is follows from its type. Collective."""
    report = Report(context, read_machine(context.device, _num_gpus(context)))
    with torch.no_grad():
        for number, job in enumerate(jobs):
            report.begin(job)
            if isinstance(job, BenchmarkJob):
                _benchmark(context, job, report)
            elif isinstance(job, BlockJob):
                run_block_job(context, job, report)
            elif isinstance(job, StepJob):
                run_step_job(context, job, report)
            elif isinstance(job, OverheadJob):
                run_overhead_job(context, job, report)
            elif isinstance(job, ReplayJob):
                report.add(f"replays {number}", replay_rows(context, job))
            elif isinstance(job, ParityJob):
                report.add(f"parity {number}", parity_rows(context, job))
    return report.outcome


def _num_gpus(context: RankContext) -> int:
    if context.device.type == "cpu":
        return 0
    return min(context.world_size, torch.cuda.device_count())


def _benchmark(context: RankContext, job: BenchmarkJob, report: Report) -> None:
    if job.resume is not None:
        report.resume(job.resume)
    if HANDSHAKE in job.sections and not report.has(HANDSHAKE):
        with _communicator(context, job, HANDSHAKE) as comm:
            report.transport = report.transport or describe_transport(comm)
            rows: list[Row] = []
            if context.device.type == "cuda":
                rows += handshake_rows(context, comm, job.effort)
                rows += host_cost_rows(context, comm)
            report.add(HANDSHAKE, rows)
    weights = {
        f"{section}/{shape.key}": weight
        for shape in job.shapes
        for section, weight in WEIGHTS.items()
        if section in job.sections and not report.has(f"{section}/{shape.key}")
    }
    budget = Budget(context.deadline - PARTING_S, weights)
    for shape in job.shapes:
        wanted = [section for section in WEIGHTS if f"{section}/{shape.key}" in weights]
        if wanted:
            _measure_shape(context, job, shape, wanted, budget, report)
        if context.device.type == "cuda":
            torch.cuda.empty_cache()


def _measure_shape(
    context: RankContext,
    job: BenchmarkJob,
    shape: Shape,
    sections: list[str],
    budget: Budget,
    report: Report,
) -> None:
    measures: dict[str, Callable[..., list[Row]]] = {
        "exchange": exchange_rows,
        "attention": attention_rows,
        "load": load_rows,
        "uneven": uneven_rows,
        "all_gather": all_gather_rows,
    }
    # A communicator a shape: closing it gives the windows of the last one back.
    with _communicator(context, job, shape.key) as comm:
        report.transport = report.transport or describe_transport(comm)
        for section in sections:
            key = f"{section}/{shape.key}"
            effort = budget.effort(key, job.effort)
            if context.gather(budget.left_s <= 0)[0]:
                report.leave_out(key, NO_TIME)
                continue
            if section == "attention":
                effort = replace(effort, batch_ms=3 * effort.batch_ms)
            report.add(key, measures[section](context, comm, shape, effort))


def _communicator(context: RankContext, job: BenchmarkJob, name: str) -> UlyssesCommunicator:
    context.progress(f"{name}: communicator")
    return UlyssesCommunicator(
        device=context.device,
        transport=job.transport,
        mapping=job.mapping,  # type: ignore[arg-type]  # the communicator checks it
        signal=job.signal,  # type: ignore[arg-type]
        name=f"bench.{name}",
    )
