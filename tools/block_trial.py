"""Every variant of the block tried once, in processes of its own, before any is timed.

A baseline that hangs, or leaves the GPU in a state of no use, takes its processes with it and
nothing else: it is ended, the reason is kept, and the variants behind it are tried in new
processes. What a step launches, and when its kernels and copies ran, is recorded here too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import torch

from ulysses_ops.communicator import UlyssesCommunicator
from ulysses_ops.tools.attempts import attempt
from ulysses_ops.tools.block import DTYPE, WeightStore
from ulysses_ops.tools.block_bench import BlockBench
from ulysses_ops.tools.block_rows import BlockSite, open_block
from ulysses_ops.tools.block_variants import (
    COMPUTE,
    NAIVE,
    NOT_BUILT,
    BlockVariant,
    select_variants,
)
from ulysses_ops.tools.launch import Launch, RankContext, RankError, run_ranks
from ulysses_ops.tools.profiled import profile_step
from ulysses_ops.tools.shapes import Shape
from ulysses_ops.tools.timeline import Timeline
from ulysses_ops.tools.zero_cta import NAME as ZERO_CTA
from ulysses_ops.tools.zero_cta import ZeroCta, bytes_needed
from ulysses_ops.tools.zero_cta import unavailable as why_no_zero_cta

STALL_S = 80.0  # a library may compile its kernels first; a stream is waited for half as long


@dataclass(frozen=True)
class TrialJob:
    """What to try.

    Attributes:
        shape: Of Q, K and V.
        names: Variants, in this order.
        transport: Transport to insist on.
        mapping: Mapping to insist on.
        signal: Signal to insist on.
        is_profiled: Whether to record launches and timelines.
    """

    shape: Shape
    names: tuple[str, ...]
    transport: str | None = None
    mapping: str | None = None
    signal: str | None = None
    is_profiled: bool = True


@dataclass(frozen=True)
class Tried:
    """What came of one variant.

    Attributes:
        name: Which.
        not_run: Why it, or a mode of it, does not run, by ``name`` or ``name/mode``.
        timelines: One step of rank 0, by mode.
        is_done: Whether its profile was taken, or is not wanted.
    """

    name: str
    not_run: dict[str, str] = field(default_factory=dict)
    timelines: dict[str, Timeline] = field(default_factory=dict)
    is_done: bool = True


def unavailable(device: torch.device) -> dict[str, str]:
    """Reasons that are known without trying, by variant."""
    reasons = {name: why(device) for name, why in NOT_BUILT.items()}
    reasons |= {variant.name: variant.unavailable(device) for variant in select_variants("all")}
    return {name: reason for name, reason in reasons.items() if reason}


def try_variants(
    job: TrialJob, launch: Launch, on_progress: Callable[[str], None] = lambda text: None
) -> dict[str, Tried]:
    """Try all variants, in as many launches as there are hangs, within the limit of ``launch``.

    Never raises for a variant. What is risky and could not be tried is not run.
    """
    found: dict[str, Tried] = {}
    until = time.monotonic() + launch.limit_s
    left, why_not = job.names, "the time limit left none for its trial"

    def note(tried: Tried) -> None:
        found[tried.name] = tried

    def is_done(name: str) -> bool:
        return name in found and found[name].is_done

    while left and time.monotonic() < until:
        limit_s = until - time.monotonic()
        try:
            run_ranks(
                try_rank,
                replace(job, names=left),
                replace(launch, limit_s=limit_s, stall_s=min(launch.stall_s, STALL_S)),
                on_progress=lambda text: on_progress(f"trial: {text}"),
                on_part=note,
            )
        except RankError as error:
            stuck = next((name for name in left if not is_done(name)), None)
            if stuck in (COMPUTE, NAIVE) and stuck not in found:
                why_not = f"no trial: {_last(error)}"
                break  # nothing can be tried without these
            if stuck in found:  # it works, and its profile does not
                reasons = {**found[stuck].not_run, f"{stuck}/profile": _last(error)}
                found[stuck] = replace(found[stuck], not_run=reasons, is_done=True)
                job = replace(job, is_profiled=False)
            elif stuck is not None:
                found[stuck] = Tried(stuck, {stuck: f"did not survive its trial: {_last(error)}"})
        left = tuple(name for name in left if not is_done(name))
    risky = {variant.name for variant in select_variants("all") if variant.is_risky}
    return found | {
        name: Tried(name, {name: why_not}) for name in left if name in risky and name not in found
    }


def _last(error: RankError) -> str:
    """The line that says most: the last one of a traceback."""
    return str(error).strip().splitlines()[-1][:300]


def open_zero_cta(
    context: RankContext, shapes: Sequence[Shape], not_run: dict[str, str]
) -> ZeroCta | None:
    """Memory for NCCL on copy engines, large enough for every shape, or the reason. Collective."""
    reason = why_no_zero_cta(context.device)
    if reason:
        not_run[ZERO_CTA] = reason
        return None
    size = max(bytes_needed(shape, context.world_size, DTYPE.itemsize) for shape in shapes)
    made = attempt(context, lambda: ZeroCta(context, size))
    if made.reason:
        not_run[ZERO_CTA] = made.reason
        return None
    return made.value


def try_rank(context: RankContext, job: TrialJob) -> None:
    """Build, check and profile each variant in turn, and deliver what came of it. Collective."""
    site = BlockSite(context, WeightStore())
    closing = ExitStack()
    comm = UlyssesCommunicator(
        device=context.device,
        transport=job.transport,
        mapping=job.mapping,  # type: ignore[arg-type]  # the communicator checks it
        signal=job.signal,  # type: ignore[arg-type]
        name="bench.trial",
    )
    with torch.no_grad(), comm, closing:
        # Those that others are compared with first; no other one can be tried without.
        first = select_variants(f"{COMPUTE},{NAIVE}")
        bench = open_block(site, comm, job.shape, first, {}, closing)
        by_name = {variant.name: variant for variant in select_variants("all")}
        for name in job.names:
            context.progress(name)
            _try(context, bench, by_name[name], job, closing)


def _try(
    context: RankContext,
    bench: BlockBench,
    variant: BlockVariant,
    job: TrialJob,
    closing: ExitStack,
) -> None:
    if variant.name == ZERO_CTA:
        not_run: dict[str, str] = {}
        zero_cta = open_zero_cta(context, [job.shape], not_run)
        if zero_cta is None:
            context.deliver(Tried(variant.name, not_run))
            return
        closing.callback(zero_cta.close)
        bench.setting = replace(bench.setting, zero_cta=zero_cta)
    if f"{variant.name}/eager" not in bench.built:
        bench.add(variant)
        bench.check()
    tried = Tried(variant.name, _reasons(bench.not_run, variant.name), {}, not job.is_profiled)
    context.deliver(tried)
    if job.is_profiled:
        timelines: dict[str, Timeline] = {}
        for mode in ("eager", "graph"):
            built = bench.built.get(f"{variant.name}/{mode}")
            if built is not None:
                timelines[mode] = profile_step(context, built.run, built.key)
        context.deliver(replace(tried, timelines=timelines, is_done=True))


def _reasons(not_run: Mapping[str, str], name: str) -> dict[str, str]:
    return {key: why for key, why in not_run.items() if key.partition("/")[0] == name}
