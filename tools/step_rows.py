"""Rows of whole steps: every variant, eager and in a graph, in one interleaved run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ulysses_ops.tools.block_variants import COMPUTE, OURS
from ulysses_ops.tools.denoising_step import (
    DenoisingStep,
    NoiseLevels,
    StepArgs,
    step_arguments,
)
from ulysses_ops.tools.launch import RankContext
from ulysses_ops.tools.models import Resolution
from ulysses_ops.tools.paired import tax_percent
from ulysses_ops.tools.results import Row
from ulysses_ops.tools.step_bench import BuiltStep, SharedModel, StepBench
from ulysses_ops.tools.step_cases import StepCase
from ulysses_ops.tools.step_variants import NCCL, Comms, StepVariant
from ulysses_ops.tools.timing import (
    VERY_LONG_US,
    Effort,
    Summary,
    Variant,
    measure,
    paired_ratio,
    percentile,
)

OP = "step"
STEPS = 50  # of the schedule that noise levels are taken from
REPLAYS = 100  # whose host time is taken
CALLS = 10  # of everything else
HOST_S = 25.0  # for all of that


@dataclass(frozen=True)
class StepSite:
    """Where a model is measured.

    Attributes:
        context: This rank.
        case: Which model.
        shared: Its weights.
        comms: Communicators, by what they are for.
        dtype: Of weights and activations.
    """

    context: RankContext
    case: StepCase
    shared: SharedModel
    comms: Comms
    dtype: torch.dtype

    def step(self) -> DenoisingStep:
        """A step of this model."""
        return DenoisingStep(self.shared.model, self.case.model, self.dtype)

    def arguments(
        self, resolution: Resolution, branches: int = 1, *, seed: int = 0, at: int = 0
    ) -> StepArgs:
        """Arguments of the step number ``at`` of a schedule."""
        noise = NoiseLevels.of_flow_matching(STEPS, self.context.device).at(at)
        return step_arguments(
            self.case.model, resolution, noise, branches=branches, dtype=self.dtype, seed=seed
        )

    @property
    def dtype_name(self) -> str:
        """As rows have it."""
        return str(self.dtype).removeprefix("torch.")


def open_bench(
    site: StepSite, variants: Sequence[StepVariant], closing: ExitStack, not_run: dict[str, str]
) -> StepBench:
    """Build and check the variants; ``closing`` gives back what they hold. Collective."""
    context, case = site.context, site.case
    args = site.arguments(case.resolution)
    bench = StepBench(context, site.shared, site.step(), args, closing)
    for variant in variants:
        context.progress(f"{case.model.title}, step: {variant.name}")
        bench.add(variant, site.comms)
    context.progress(f"{case.model.title}, step: check")
    bench.check(site.arguments(case.resolution, seed=1, at=STEPS // 2))
    not_run.update(bench.not_run)
    return bench


def step_rows(site: StepSite, bench: StepBench, effort: Effort) -> list[Row]:
    """Time the variants. Collective."""
    host_us: dict[str, list[float]] = {key: [] for key in bench.built}
    runs = {
        key: Variant(partial(_recorded, built.run, host_us[key]), 1, built.prepare)
        for key, built in bench.built.items()
    }
    times = measure(site.context, runs, effort, f"{site.case.model.title}, step")
    until = time.monotonic() + HOST_S
    return [
        _row(site, built, times, _host(bench, built, times[key], host_us[key], until))
        for key, built in bench.built.items()
    ]


def _recorded(run: Callable[[], Tensor], host_us: list[float]) -> Tensor:
    start = time.perf_counter()
    output = run()
    host_us.append((time.perf_counter() - start) * 1e6)
    return output


def slowest(by_rank: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Median and 99th percentile of the rank whose median is largest."""
    samples = max(by_rank, key=statistics.median)
    return statistics.median(samples), percentile(samples, 99)


def sent_bytes(site: StepSite) -> int:
    """What a step sends to one peer: V, K, Q and the output of every layer, and the last rows."""
    case, world_size = site.case, site.context.world_size
    layer = 4 * case.shape(case.resolution).bytes_per_peer(world_size, site.dtype.itemsize)
    rows = case.resolution.rows // world_size * site.shared.model.proj_out.out_features
    return int(case.num_layers * layer + rows * site.dtype.itemsize)


def described_case(case: StepCase) -> dict[str, Any]:
    """What every row of a model says about it."""
    return {
        "layers": case.num_layers,
        "published_layers": case.published_layers,
        "text_rows": case.model.text_rows,
    }


def _host(
    bench: StepBench, built: BuiltStep, times: Summary, timed_us: list[float], until: float
) -> dict[str, float]:
    """The host's part of a call on an idle GPU, as entries of a row's details. Collective.

    Steps that are timed one by one find the GPU idle, so that those calls tell it already.
    """
    if built.prepare is not None:
        built.prepare()
    count = REPLAYS if built.variant.name == OURS and built.mode == "graph" else CALLS
    if times.median_us >= VERY_LONG_US:
        count = len(times.round_us)
        by_rank = bench.context.gather(timed_us[-len(times.round_us) :])
    else:
        by_rank = bench.host_us(built.run, count, until)
    found = {"host_samples": len(by_rank[0])}
    median, p99 = slowest(by_rank)
    details = {"host_us": median, "host_p99_us": p99}
    if built.renew is not None:
        median, p99 = slowest(bench.host_us(built.renew, count, until))
        details |= {"host_us_with_new_inputs": median, "host_p99_us_with_new_inputs": p99}
    return found | {key: round(value, 1) for key, value in details.items()}


def _row(
    site: StepSite, built: BuiltStep, times: Mapping[str, Summary], host: dict[str, float]
) -> Row:
    variant, mode, mine = built.variant, built.mode, times[built.key]
    compute = times.get(f"{COMPUTE}/{mode}")
    tax = None if compute is None or variant.is_blind else tax_percent(mine, compute)
    theirs = {other: times.get(f"{NCCL}/{other}") for other in ("eager", "graph")}
    over = {
        other: paired_ratio(found, mine)
        for other, found in theirs.items()
        if found is not None and variant.name == OURS
    }
    same = theirs[mode]
    return Row.of_times(
        OP,
        site.case.shape(site.case.resolution),
        world_size=site.context.world_size,
        transport=variant.transport(site.comms),
        mode=mode,
        times=mine,
        exact=built.exact,
        bytes_per_peer=0 if variant.is_blind else sent_bytes(site),
        dtype=site.dtype_name,
        is_exchange=False,
        nccl_us=same.median_us if over and same is not None else None,
        x_nccl_eager=over.get("eager"),
        x_nccl_graph=over.get("graph"),
        tax_percent=None if tax is None else tax.median,
        tax_quartiles=None if tax is None else tax.quartiles,
        host_us=host["host_us"],
        peak_bytes=built.peak_bytes,
        details={
            "variant": variant.name,
            "rounds": len(mine.round_us),
            **described_case(site.case),
            "guidance_branches": 1,
            **{key: value for key, value in host.items() if key != "host_us"},
            **({} if built.graph_bytes is None else {"graph_bytes": built.graph_bytes}),
            **({"nodes": dict(built.nodes)} if built.nodes else {}),
        },
    )
