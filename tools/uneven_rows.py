"""Rows of exchanges whose splits are uneven, beside the even ones of the same size, in graphs.

One row more than divides by the ranks, and heads that differ by two from rank to rank: what an
exchange costs more than its share of bytes is what the splits cost.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ulysses_ops.communicator import UlyssesCommunicator
from ulysses_ops.exchange import Exchange
from ulysses_ops.graphs import capture_step
from ulysses_ops.plan import even_splits
from ulysses_ops.reference import shard_of, window_of
from ulysses_ops.tools.exchanged import CALLS, poison
from ulysses_ops.tools.launch import RankContext
from ulysses_ops.tools.noise import random_values
from ulysses_ops.tools.results import Mode, Row
from ulysses_ops.tools.shapes import Shape
from ulysses_ops.tools.timing import Effort, Variant, measure, paired_ratio
from ulysses_ops.window_spec import WindowSpec
from ulysses_ops.windows import Window, reserve

DIRECTIONS = ("scatter", "gather")
EVEN = "even"


def _head_splits(heads: int, world_size: int) -> tuple[int, ...]:
    """One head moved from each odd rank to the even one before it."""
    each = heads // world_size
    moved = [each + 1 if rank % 2 == 0 else each - 1 for rank in range(world_size)]
    if world_size % 2:
        moved[-1] = each
    return tuple(moved)


def _specs(shape: Shape, world_size: int, direction: str) -> dict[str, WindowSpec]:
    batch, seq, heads, dim = shape.dims
    even = WindowSpec(f"{direction}.even", direction, shape.dims, torch.bfloat16)  # type: ignore[arg-type]
    rows = replace(
        even,
        name=f"{direction}.rows",
        shape=(batch, seq + 1, heads, dim),
        seq_splits=even_splits(seq + 1, world_size),
    )
    by_head = replace(even, name=f"{direction}.heads", head_splits=_head_splits(heads, world_size))
    return {EVEN: even, "uneven rows": rows, "uneven heads": by_head}


def uneven_rows(
    context: RankContext, comm: UlyssesCommunicator, shape: Shape, effort: Effort
) -> list[Row]:
    """Check and time both directions at one shape. Collective."""
    return [
        row
        for direction in DIRECTIONS
        for row in _rows_of(context, comm, shape, direction, effort.share(2))
    ]


def _send(comm: UlyssesCommunicator, window: Window, source: Tensor, calls: int) -> None:
    for _ in range(calls):
        with Exchange(comm) as exchange:
            exchange.send(source, window)


def _rows_of(
    context: RankContext, comm: UlyssesCommunicator, shape: Shape, direction: str, effort: Effort
) -> list[Row]:
    specs = _specs(shape, context.world_size, direction)
    windows = dict(zip(specs, reserve(comm, list(specs.values())), strict=True))
    mode: Mode = "graph" if context.device.type == "cuda" else "eager"
    variants: dict[str, Variant] = {}
    exact: dict[str, bool] = {}
    with ExitStack() as graphs:
        for name, window in windows.items():
            context.progress(f"{shape.title}, {direction}, {name}")
            whole = random_values(window.spec.shape, context, 0, 300)
            source = shard_of(whole, window.layout, context.rank).contiguous()
            run = partial(_send, comm, window, source, CALLS)
            if mode == "graph":
                step = capture_step(comm, run)
                graphs.callback(step.close)
                variants[name] = Variant(step.replay, CALLS)
            else:
                variants[name] = Variant(run, CALLS)
            poison(context, window)
            variants[name].run()
            context.finish(f"check of {name}")
            found = torch.equal(window.tensor, window_of(whole, window.layout, context.rank))
            exact[name] = context.agree(found)
        times = measure(context, variants, effort, f"{shape.title}, {direction}, uneven")
    return [
        Row.of_times(
            f"{direction}, {name}",
            replace(shape, seq=specs[name].shape[1]),
            world_size=comm.world_size,
            transport=comm.transport,
            mode=mode,
            times=mine,
            exact=exact[name],
            bytes_per_peer=_most_bytes(windows[name]),
            details={"variant": name, **_over(paired_ratio(mine, times[EVEN]), windows, name)},
        )
        for name, mine in times.items()
    ]


def _over(ratio: float, windows: Mapping[str, Window], name: str) -> dict[str, float]:
    """How much longer it takes, and how much of that its largest part does not explain."""
    by_bytes = _most_bytes(windows[name]) / _most_bytes(windows[EVEN])
    return {
        "percent_over_even": 100 * (ratio - 1),
        "percent_over_its_bytes": 100 * (ratio / by_bytes - 1),
    }


def _most_bytes(window: Window) -> int:
    """What the slowest rank sends to a peer: the largest part of any pair."""
    layout = window.layout
    sizes = (layout.seq_splits, layout.head_splits)
    ranks = range(layout.world_size)
    largest = max(
        sizes[0][a] * sizes[1][b] for a in ranks for b in ranks if a != b or len(ranks) == 1
    )
    batch, dim = window.spec.shape[0], window.spec.shape[3]
    return batch * largest * dim * window.spec.dtype.itemsize
