"""What is not bytes, on one rank: launches of graphs, and handshakes by their form."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist

from ulysses_ops.communicator import UlyssesCommunicator
from ulysses_ops.graphs import capture_step
from ulysses_ops.tools.baselines import PlainGraph
from ulysses_ops.tools.graph_launch import launch_rows
from ulysses_ops.tools.handshake_forms import BRANCHES, Form, branch_rows, form_rows
from ulysses_ops.tools.launch import RankContext
from ulysses_ops.tools.report import Report, ResumeFrom, describe_transport
from ulysses_ops.tools.results import Row
from ulysses_ops.tools.shapes import Shape
from ulysses_ops.tools.spin_kernel import SpinHandshake
from ulysses_ops.tools.timing import Effort

LAUNCH = "launch"
FORMS = "forms"
FILES = {LAUNCH: "graph_launch", FORMS: "handshake_forms"}
SPIN = "spinning kernel"
FUNCTIONAL_UNITS = (4, 8, 16)
FUNCTIONAL_GEMMS = Shape("gemms", "GEMMs", 64, 4, 16)


@dataclass(frozen=True)
class OverheadJob:
    """What to measure.

    Attributes:
        section: ``"launch"`` or ``"forms"``.
        effort: How long to measure forms; launches are counted.
        transport: Transport to insist on.
        mapping: Mapping to insist on.
        resume: An earlier run to go on with.
    """

    section: str
    effort: Effort
    transport: str | None = None
    mapping: str | None = None
    resume: ResumeFrom | None = None


def run_overhead_job(context: RankContext, job: OverheadJob, report: Report) -> None:
    """Measure one section. Collective."""
    if job.resume is not None:
        report.resume(job.resume)
    if report.has(job.section):
        return
    not_run: dict[str, str] = {}
    with ExitStack() as closing:
        if job.section == LAUNCH:
            # One rank has no peers, and needs no communicator.
            comm = _open(context, job, None, closing) if context.world_size > 1 else None
            report.transport = "none" if comm is None else describe_transport(comm)
            units = FUNCTIONAL_UNITS if context.device.type == "cpu" else ()
            rows = launch_rows(context, comm, not_run, units=units)
        else:
            rows = _measure_forms(context, job, report, not_run, closing)
    report.add(job.section, rows, {f"{job.section}: {key}": why for key, why in not_run.items()})


def _open(
    context: RankContext, job: OverheadJob, signal: str | None, closing: ExitStack
) -> UlyssesCommunicator:
    context.progress(f"{job.section}: communicator")
    return closing.enter_context(
        UlyssesCommunicator(
            device=context.device,
            transport=job.transport,
            mapping=job.mapping,  # type: ignore[arg-type]  # the communicator checks it
            signal=signal,  # type: ignore[arg-type]
            name=f"bench.{job.section}.{signal or 'any'}",
        )
    )


def _measure_forms(
    context: RankContext,
    job: OverheadJob,
    report: Report,
    not_run: dict[str, str],
    closing: ExitStack,
) -> list[Row]:
    if context.device.type == "cpu":
        report.transport = "none"
        not_run[BRANCHES] = "needs GPUs"
        forms = {"barrier of gloo": _barrier_of_gloo}
        return form_rows(context, forms, job.effort, not_run, gemms=FUNCTIONAL_GEMMS)
    forms = {
        "written word (`write_value`)": partial(_ours, context, job, "write_value", closing),
        "copied word (`memcpy`)": partial(_ours, context, job, "memcpy", closing),
        f"{SPIN} (comparison only)": partial(_spinning, context, job, closing),
    }
    report.transport = "ce"
    rows = branch_rows(context, job.effort.share(4))
    return form_rows(context, forms, job.effort, not_run) + rows


def _ours(context: RankContext, job: OverheadJob, signal: str, closing: ExitStack) -> Form:
    comm = _open(context, job, signal, closing)
    engine = comm.copy_engine
    if engine is None:
        message = f"transport {comm.transport} signals nothing"
        raise ValueError(message)

    def capture(run: Callable[[], object], stack: ExitStack) -> Callable[[], object]:
        step = capture_step(comm, run, warmup=1)
        stack.callback(step.close)
        return step.replay

    def is_at_rest() -> bool:
        comm.check()  # raises if a wait was given up
        return True

    return Form(lambda count: engine.run_handshakes(count // 2), capture, is_at_rest)


def _spinning(context: RankContext, job: OverheadJob, closing: ExitStack) -> Form:
    comm = _open(context, job, None, closing)
    spin = SpinHandshake(comm)
    context.line_up("words of the spinning kernel")

    def capture(run: Callable[[], Any], stack: ExitStack) -> Callable[[], object]:
        graph = PlainGraph(context, run, SPIN, warm_up=1)
        stack.callback(graph.close)
        return graph.run

    return Form(spin.run, capture, spin.is_at_rest)


def _barrier_of_gloo() -> Form:
    """What CPU ranks have instead: it shows that the measurement works."""

    def run(count: int) -> None:
        for _ in range(count):
            dist.barrier()

    return Form(run, lambda run, stack: run)
