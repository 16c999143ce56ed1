"""Rows of a whole DiT block: every variant, eager and in a graph, in one interleaved run."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import get_args

import torch

from ulysses_ops.communicator import UlyssesCommunicator
from ulysses_ops.tools.attention_rows import choose_attention
from ulysses_ops.tools.block import DTYPE, Block, WeightStore
from ulysses_ops.tools.block_bench import BlockBench, Built, open_bench
from ulysses_ops.tools.block_setting import Setting
from ulysses_ops.tools.block_variants import COMPUTE, NAIVE, OURS, BlockVariant
from ulysses_ops.tools.launch import RankContext
from ulysses_ops.tools.paired import tax_percent
from ulysses_ops.tools.power import POWER, Power, measure_power
from ulysses_ops.tools.projection_variants import GEMMS, QKV
from ulysses_ops.tools.results import Mode, Row
from ulysses_ops.tools.shapes import Shape
from ulysses_ops.tools.timing import Effort, Summary, Variant, measure, paired_ratio
from ulysses_ops.tools.zero_cta import ZeroCta

# In a step the stage is one of many parts of a graph; alone in one, it would pay for its launch.
STAGES_IN_GRAPH = 4


@dataclass(frozen=True)
class BlockSite:
    """Where blocks are measured.

    Attributes:
        context: This rank.
        weights: Kept from shape to shape.
        zero_cta: Memory and group for NCCL on copy engines, where that works.
    """

    context: RankContext
    weights: WeightStore
    zero_cta: ZeroCta | None = None


def block_rows(
    site: BlockSite,
    comm: UlyssesCommunicator,
    shape: Shape,
    variants: Sequence[BlockVariant],
    effort: Effort,
    not_run: dict[str, str],
    op: str = "block",
    modes: Sequence[Mode] = get_args(Mode),
) -> list[Row]:
    """Check and time the block, or a stage of it, at one shape. Collective.

    Args:
        site: Where.
        comm: Communicator, for this shape alone.
        shape: Of Q, K and V.
        variants: What to measure.
        effort: How long.
        not_run: Reasons by variant, or ``variant/mode``; those of this shape are added.
        op: What the variants do: ``"block"``, or ``"qkv"``; or ``"power"``, and graphs of the block
            are also run over and over, on GPUs.
        modes: In which they are timed. All are checked.
    """
    with ExitStack() as closing:
        repeats = STAGES_IN_GRAPH if op == QKV else 1
        bench = open_block(site, comm, shape, variants, not_run, closing, repeats)
        not_run.update(bench.not_run)
        timed = {key: built for key, built in bench.built.items() if built.mode in modes}
        runs = {key: Variant(built.run, built.calls) for key, built in timed.items()}
        times = measure(site.context, runs, effort, f"{shape.title}, {op}")
        host_us = {key: bench.host_us(built) for key, built in timed.items()}
        powers = {
            key: measure_power(site.context, built.run, times[key].median_us, key)
            for key, built in timed.items()
            if op == POWER and built.mode == "graph"
        }
        return [
            _row(op, shape, comm, built, times, host_us[key], powers.get(key))
            for key, built in timed.items()
        ]


def open_block(
    site: BlockSite,
    comm: UlyssesCommunicator,
    shape: Shape,
    variants: Sequence[BlockVariant],
    not_run: Mapping[str, str],
    closing: ExitStack,
    repeats: int = 1,
) -> BlockBench:
    """Build and check the variants; ``closing`` gives back what they hold. Collective."""
    context = site.context
    context.progress(f"{shape.title}, block: weights and kernels")
    weights = site.weights.of(shape, context)
    _, kernel = choose_attention(context, shape.head_dim)
    block = Block.prepare(shape, context, weights, kernel)
    setting = Setting(context, comm, block, site.zero_cta, closing)
    return open_bench(setting, variants, not_run, repeats)


def give_memory_back(device: torch.device) -> None:
    """Drop what a closed shape has left: pools of graphs, cached blocks, compiled kernels."""
    if device.type == "cuda":
        torch.compiler.reset()
        gc.collect()
        torch.cuda.empty_cache()


def _row(
    op: str,
    shape: Shape,
    comm: UlyssesCommunicator,
    built: Built,
    times: Mapping[str, Summary],
    host_us: float,
    power: Power | None,
) -> Row:
    variant, mode = built.variant, built.mode
    mine = times[built.key]
    compute = times.get(f"{COMPUTE}/{mode}")
    tax = None if compute is None or variant.name == COMPUTE else tax_percent(mine, compute)
    naive = {other: times.get(f"{NAIVE}/{other}") for other in ("eager", "graph")}
    over = {
        other: paired_ratio(theirs, mine)
        for other, theirs in naive.items()
        if theirs is not None and variant.name == OURS
    }
    same = naive[mode]
    sent = 0 if variant.is_blind else 3 if op == QKV else 4  # V, K, Q, and the output
    bare = times.get(f"{GEMMS}/{mode}")
    return Row.of_times(
        op,
        shape,
        world_size=comm.world_size,
        transport=variant.transport(comm),
        mode=mode,
        times=mine,
        exact=built.exact,
        bytes_per_peer=sent * shape.bytes_per_peer(comm.world_size, DTYPE.itemsize),
        is_exchange=False,
        nccl_us=same.median_us if over and same is not None else None,
        x_nccl_eager=over.get("eager"),
        x_nccl_graph=over.get("graph"),
        tax_percent=None if tax is None else tax.median,
        tax_quartiles=None if tax is None else tax.quartiles,
        host_us=host_us,
        peak_bytes=built.peak_bytes,
        details={
            "variant": variant.name,
            "rounds": len(mine.round_us),
            "calls_in_graph": built.calls if mode == "graph" else None,
            "relative_error": built.error,
            **({} if bare is None else {"ratio_to_gemm": paired_ratio(mine, bare)}),
            **({} if power is None else {POWER: asdict(power)}),
        },
    )
