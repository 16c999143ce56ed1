"""The block at every shape, on one rank."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import get_args

from ulysses_ops.communicator import UlyssesCommunicator
from ulysses_ops.tools.block import WeightStore, block_flops
from ulysses_ops.tools.block_rows import BlockSite, block_rows, give_memory_back
from ulysses_ops.tools.block_trial import open_zero_cta
from ulysses_ops.tools.block_variants import VARIANTS, BlockVariant, select_variants
from ulysses_ops.tools.budget import Budget
from ulysses_ops.tools.launch import RankContext
from ulysses_ops.tools.power import POWER
from ulysses_ops.tools.projection_variants import PROJECTIONS, QKV
from ulysses_ops.tools.replays import PARTING_S
from ulysses_ops.tools.report import NO_TIME, Report, ResumeFrom, describe_transport
from ulysses_ops.tools.results import Mode, Row
from ulysses_ops.tools.shapes import Shape
from ulysses_ops.tools.timing import Effort
from ulysses_ops.tools.zero_cta import NAME as ZERO_CTA
from ulysses_ops.tools.zero_cta import ZeroCta

SECTION = "block"
VARIANTS_OF = {
    SECTION: VARIANTS,
    QKV: PROJECTIONS,
    POWER: tuple(variant for variant in VARIANTS if not variant.is_risky),
}
LONG_FLOPS = 5e12  # from here on a block takes some 10 ms, and fewer rounds will do
LONG_ROUNDS = 5
SHORT_ROUNDS = 8
FIXED_FLOPS = 6e12  # weight of what takes as long at every shape, such as captures


@dataclass(frozen=True)
class BlockJob:
    """What to measure.

    Attributes:
        shapes: Shapes of Q, K and V.
        effort: How long to measure.
        variants: Names, separated by commas, or ``"all"``.
        not_run: Reasons found already, by variant or ``variant/mode``.
        launches: Launches of a step counted already, by ``variant/mode``.
        transport: Transport to insist on.
        mapping: Mapping to insist on.
        signal: Signal to insist on.
        resume: An earlier run to go on with.
        op: The whole ``"block"``, its ``"power"``, or its stage ``"qkv"`` before attention.
        trial: Whether variants are tried in processes of their own first.
        modes: Which are timed.
    """

    shapes: tuple[Shape, ...]
    effort: Effort
    variants: str = "all"
    not_run: dict[str, str] = field(default_factory=dict)
    launches: dict[str, int] = field(default_factory=dict)
    transport: str | None = None
    mapping: str | None = None
    signal: str | None = None
    resume: ResumeFrom | None = None
    op: str = SECTION
    trial: bool = True
    modes: tuple[Mode, ...] = get_args(Mode)


def run_block_job(context: RankContext, job: BlockJob, report: Report) -> None:
    """Measure every shape that the report lacks. Collective."""
    if job.op == POWER and context.device.type == "cpu":
        report.leave_out(POWER, "needs GPUs")
        return
    if job.resume is not None:
        report.resume(job.resume)
    variants = select_variants(job.variants, VARIANTS_OF[job.op])
    not_run = dict(job.not_run)
    shapes = [shape for shape in job.shapes if not report.has(_section(job, shape))]
    zero_cta = _zero_cta(context, shapes, variants, not_run)
    for name, reason in not_run.items():
        report.leave_out(f"{job.op}: {name}", reason)
    site = BlockSite(context, WeightStore(), zero_cta)
    flops = {_section(job, shape): block_flops(shape, context.world_size) for shape in shapes}
    weights = {section: FIXED_FLOPS + count for section, count in flops.items()}
    budget = Budget(context.deadline - PARTING_S, weights)
    for shape in shapes:
        effort = budget.effort(_section(job, shape), _effort(job, shape, context))
        if context.gather(budget.left_s <= 0)[0]:
            report.leave_out(_section(job, shape), NO_TIME)
            continue
        _measure(site, job, shape, variants, effort, not_run, report)
        give_memory_back(context.device)
    if zero_cta is not None:
        zero_cta.close()


def _section(job: BlockJob, shape: Shape) -> str:
    return f"{job.op}/{shape.key}"


def _effort(job: BlockJob, shape: Shape, context: RankContext) -> Effort:
    is_long = block_flops(shape, context.world_size) >= LONG_FLOPS
    return replace(job.effort, min_rounds=LONG_ROUNDS if is_long else SHORT_ROUNDS)


def _zero_cta(
    context: RankContext,
    shapes: list[Shape],
    variants: tuple[BlockVariant, ...],
    not_run: dict[str, str],
) -> ZeroCta | None:
    wanted = any(variant.name == ZERO_CTA for variant in variants) and ZERO_CTA not in not_run
    return open_zero_cta(context, shapes, not_run) if wanted and shapes else None


def _measure(
    site: BlockSite,
    job: BlockJob,
    shape: Shape,
    variants: tuple[BlockVariant, ...],
    effort: Effort,
    not_run: dict[str, str],
    report: Report,
) -> None:
    context = site.context
    found = dict(not_run)
    comm = UlyssesCommunicator(
        device=context.device,
        transport=job.transport,
        mapping=job.mapping,  # type: ignore[arg-type]  # the communicator checks it
        signal=job.signal,  # type: ignore[arg-type]
        name=f"bench.{job.op}.{shape.key}",
    )
    with comm:
        report.transport = report.transport or describe_transport(comm)
        rows = block_rows(site, comm, shape, variants, effort, found, job.op, job.modes)
    here = {
        f"{_section(job, shape)}: {name}": reason
        for name, reason in found.items()
        if name not in not_run
    }
    report.add(_section(job, shape), [_counted(row, job.launches) for row in rows], here)


def _counted(row: Row, launches: dict[str, int]) -> Row:
    variant = (row.details or {}).get("variant")
    return replace(row, launches=launches.get(f"{variant}/{row.mode}"))
