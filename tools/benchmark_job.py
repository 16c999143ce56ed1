"""What one rank does: the benchmark, replays or small checks, by the type of each job."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from ulysses_ops.communicator import UlyssesCommunicator
from ulysses_ops.tools.attention_rows import attention_rows
from ulysses_ops.tools.exchange_rows import exchange_rows
from ulysses_ops.tools.handshake_rows import handshake_rows, host_cost_rows
from ulysses_ops.tools.launch import RankContext
from ulysses_ops.tools.parity import ParityJob, parity_rows
from ulysses_ops.tools.replays import ReplayJob, replay_rows
from ulysses_ops.tools.results import Machine, Row, read_machine
from ulysses_ops.tools.shapes import Shape
from ulysses_ops.tools.timing import Effort


@dataclass(frozen=True)
class BenchmarkJob:
    """What to measure.

    Attributes:
        shapes: Shapes of Q, K and V.
        effort: How long to measure; attention steps get 3 times the batch.
        attention: Whether to measure the attention step.
        transport: Transport to insist on.
        mapping: Mapping to insist on.
        signal: Signal to insist on.
    """

    shapes: tuple[Shape, ...]
    effort: Effort
    attention: bool = True
    transport: str | None = None
    mapping: str | None = None
    signal: str | None = None


@dataclass(frozen=True)
class Outcome:
    """What a rank hands back.

    Attributes:
        machine: Where it ran.
        rows: What was measured; the same on every rank.
        transport: Transport, mapping and signal in use, and why.
    """

    machine: Machine
    rows: list[Row]
    transport: str


def run_rank(context: RankContext, jobs: list[Any]) -> Outcome:
    """Run every job in turn; which it is follows from its type. Collective."""
    machine = read_machine(context.device, _num_gpus(context))
    rows: list[Row] = []
    transport = ""
    with torch.no_grad():
        for job in jobs:
            if isinstance(job, BenchmarkJob):
                found, transport = _benchmark(context, job)
                rows += found
            elif isinstance(job, ReplayJob):
                rows += replay_rows(context, job)
            elif isinstance(job, ParityJob):
                rows += parity_rows(context, job)
    return Outcome(machine, rows, transport or (rows[0].transport if rows else ""))


def _num_gpus(context: RankContext) -> int:
    if context.device.type == "cpu":
        return 0
    return min(context.world_size, torch.cuda.device_count())


def _benchmark(context: RankContext, job: BenchmarkJob) -> tuple[list[Row], str]:
    rows: list[Row] = []
    description = ""
    with _communicator(context, job, "handshake") as comm:
        description = f"{comm.transport}, mapping {comm.mapping}, signal {comm.signal}"
        description += f" ({'; '.join(comm.reasons)})"
        machine = read_machine(context.device, _num_gpus(context))
        if context.device.type == "cuda":
            rows += handshake_rows(context, comm, job.effort)
            rows += host_cost_rows(context, comm)
            context.deliver(Outcome(machine, rows, description))
    longer = replace(job.effort, batch_ms=3 * job.effort.batch_ms)
    for shape in job.shapes:
        # A communicator a shape: closing it gives the windows of the last one back.
        with _communicator(context, job, shape.key) as comm:
            rows += exchange_rows(context, comm, shape, job.effort)
            if job.attention:
                rows += attention_rows(context, comm, shape, longer)
        context.deliver(Outcome(machine, rows, description))
        if context.device.type == "cuda":
            torch.cuda.empty_cache()
    return rows, description


def _communicator(context: RankContext, job: BenchmarkJob, name: str) -> UlyssesCommunicator:
    context.progress(f"{name}: communicator")
    return UlyssesCommunicator(
        device=context.device,
        transport=job.transport,
        mapping=job.mapping,  # type: ignore[arg-type]  # the communicator checks it
        signal=job.signal,  # type: ignore[arg-type]
        name=f"bench.{name}",
    )
