"""One exchange at one shape, ready to be run by ours and by a baseline, and its check."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ulysses_ops.communicator import UlyssesCommunicator
from ulysses_ops.plan import even_splits
from ulysses_ops.reference import all_gather_reference, gather_reference, scatter_reference
from ulysses_ops.tools.baselines import NcclAllGather, NcclGather, NcclScatter
from ulysses_ops.tools.launch import RankContext
from ulysses_ops.tools.noise import random_values
from ulysses_ops.tools.shapes import Shape
from ulysses_ops.window_spec import WindowSpec
from ulysses_ops.windows import Window, reserve

CALLS = 8  # calls in a graph: one replay shows the operator as it is inside a larger graph
ROTATED_BYTES = 256 << 20  # of sources used in turn, so that no cache holds them all


@dataclass(frozen=True)
class Exchanged:
    """One operator at one shape, ready to be run.

    Attributes:
        op: Which.
        shape: Global shape.
        window: Where ours arrives.
        sources: Sources, used in turn.
        baseline: The same operator by NCCL.
        expected: What this rank receives of the first sources, by the reference.
        sent_bytes: What each rank sends to one peer, by rank.
    """

    op: Literal["scatter", "gather", "all_gather"]
    shape: Shape
    window: Window
    sources: list[Tensor]
    baseline: NcclScatter | NcclGather | NcclAllGather
    expected: Callable[[], Tensor]
    sent_bytes: tuple[int, ...]

    @property
    def bytes_per_peer(self) -> int:
        """What the rank that sends most sends to one peer."""
        return max(self.sent_bytes)

    def source(self, call: int) -> Tensor:
        """The source of a call."""
        return self.sources[call % len(self.sources)]


def _num_sources(source_bytes: int) -> int:
    return max(1, min(CALLS, -(-ROTATED_BYTES // source_bytes)))


def scatter_of(context: RankContext, comm: UlyssesCommunicator, shape: Shape) -> Exchanged:
    """Sources are V's view of fused projections, as a model's would be."""
    spec = WindowSpec("bench.scatter", "scatter", shape.dims, torch.bfloat16)
    (window,) = reserve(comm, [spec])
    batch, seq, heads, dim = shape.local_source(context.world_size)

    def values_of(rank: int, salt: int) -> Tensor:
        return random_values((batch, seq, 3, heads, dim), context, rank, salt)[:, :, 2]

    def expected() -> Tensor:
        shards = [values_of(rank, 0) for rank in range(context.world_size)]
        return scatter_reference(shards)[context.rank]

    sent = shape.bytes_per_peer(context.world_size, 2)
    count = _num_sources(sent * context.world_size)
    sources = [values_of(context.rank, salt) for salt in range(count)]
    baseline = NcclScatter(shape, context, torch.bfloat16)
    by_rank = (sent,) * context.world_size
    return Exchanged("scatter", shape, window, sources, baseline, expected, by_rank)


def gather_of(context: RankContext, comm: UlyssesCommunicator, shape: Shape) -> Exchanged:
    """Sources are contiguous, as what attention returns is."""
    spec = WindowSpec("bench.gather", "gather", shape.dims, torch.bfloat16)
    (window,) = reserve(comm, [spec])

    def values_of(rank: int, salt: int) -> Tensor:
        return random_values(shape.local_window(context.world_size), context, rank, 100 + salt)

    def expected() -> Tensor:
        shards = [values_of(rank, 0) for rank in range(context.world_size)]
        return gather_reference(shards)[context.rank]

    sent = shape.bytes_per_peer(context.world_size, 2)
    count = _num_sources(sent * context.world_size)
    sources = [values_of(context.rank, salt) for salt in range(count)]
    baseline = NcclGather(shape, context, torch.bfloat16)
    by_rank = (sent,) * context.world_size
    return Exchanged("gather", shape, window, sources, baseline, expected, by_rank)


def all_gather_of(context: RankContext, comm: UlyssesCommunicator, shape: Shape) -> Exchanged:
    """Sources are contiguous shards of the sequence, uneven where it does not divide."""
    splits = even_splits(shape.seq, context.world_size)
    spec = WindowSpec.all_gather(
        "bench.all_gather", shape.dims, torch.bfloat16, context.world_size, seq_splits=splits
    )
    (window,) = reserve(comm, [spec])

    def values_of(rank: int, salt: int) -> Tensor:
        shard = (shape.batch, splits[rank], shape.heads, shape.head_dim)
        return random_values(shard, context, rank, 400 + salt)

    def expected() -> Tensor:
        return all_gather_reference([values_of(rank, 0) for rank in range(context.world_size)])

    row_bytes = shape.batch * shape.heads * shape.head_dim * 2
    sent = tuple(rows * row_bytes for rows in splits)
    sources = [values_of(context.rank, salt) for salt in range(_num_sources(max(sent)))]
    baseline = NcclAllGather(shape, context, torch.bfloat16)
    return Exchanged("all_gather", shape, window, sources, baseline, expected, sent)


def poison(context: RankContext, window: Window) -> None:
    """Fill the window with NaN bytes while no rank is sending."""
    context.line_up("before the check")
    window.tensor.view(-1).view(torch.uint8).fill_(0xFF)
    context.line_up("check")


def matches_baseline(
    context: RankContext, prepared: Exchanged, run: Callable[[], object], last_call: int
) -> bool:
    """Whether the window holds, bit for bit, what NCCL delivers for the last call's source."""
    poison(context, prepared.window)
    run()
    context.finish(f"check of {prepared.op}")
    found = prepared.window.tensor.clone()
    context.line_up("after the check")
    return context.agree(torch.equal(found, prepared.baseline(prepared.source(last_call))))
