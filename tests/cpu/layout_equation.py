"""What the exchanges mean, element by element, and layouts to try it on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from ulysses_ops.plan import Direction, Layout

Bytes = npt.NDArray[np.uint8]

SENTINEL = 0xEE  # memory that nobody wrote


def starts_of(splits: Sequence[int], starts: Sequence[int] | None) -> Sequence[int]:
    """Where each rank's range starts."""
    return [sum(splits[:rank]) for rank in range(len(splits))] if starts is None else starts


def equation(layout: Layout, shards: Sequence[Bytes], receiver: int) -> Bytes:
    """``y_r[b, off_s(p) + s, h, d] = x_p[b, s, off_h(r) + h, d]``, or the inverse for gather.

    What nobody sends keeps the sentinel.
    """
    seq_starts = starts_of(layout.seq_splits, layout.seq_starts)
    head_starts = starts_of(layout.head_splits, layout.head_starts)
    itemsize = shards[0].shape[-1]
    y: Bytes = np.full((*layout.window_shape(receiver), itemsize), SENTINEL, np.uint8)
    for p, x in enumerate(shards):
        if layout.direction == "scatter":
            for s, h in product(range(layout.seq_splits[p]), range(layout.head_splits[receiver])):
                y[:, seq_starts[p] + s, h] = x[:, s, head_starts[receiver] + h]
        else:
            for s, h in product(range(layout.seq_splits[receiver]), range(layout.head_splits[p])):
                y[:, s, head_starts[p] + h] = x[:, seq_starts[receiver] + s, h]
    return y


@st.composite
def layouts(draw: st.DrawFn, world_size: int | None = None) -> Layout:
    if world_size is None:
        world_size = draw(st.integers(1, 4))
    rows, heads = (
        tuple(draw(st.lists(st.integers(0, most), min_size=world_size, max_size=world_size)))
        for most in (4, 3)
    )
    direction: Direction = draw(st.sampled_from(("scatter", "gather")))
    layout = Layout(direction, draw(st.integers(0, 3)), draw(st.integers(1, 4)), rows, heads)
    return with_starts(draw, layout) if draw(st.booleans()) else layout


def with_starts(draw: st.DrawFn, layout: Layout) -> Layout:
    """Ranges that overlap where a source is cut, and leave gaps where a window is put together."""
    scatter = layout.direction == "scatter"
    cut, placed = layout.head_splits, layout.seq_splits
    if not scatter:
        cut, placed = placed, cut
    cut_total = max(cut) + draw(st.integers(0, 3))
    cut_starts = tuple(draw(st.integers(0, cut_total - size)) for size in cut)
    placed_starts, first = [0] * len(placed), 0
    for rank in draw(st.permutations(range(len(placed)))):
        first += draw(st.integers(0, 2))
        placed_starts[rank] = first
        first += placed[rank]
    placed_total = first + draw(st.integers(0, 2))
    ranges = ((tuple(placed_starts), placed_total), (cut_starts, cut_total))
    (seq_starts, seq_total), (head_starts, head_total) = ranges if scatter else ranges[::-1]
    return replace(
        layout,
        seq_starts=seq_starts,
        head_starts=head_starts,
        seq_total=seq_total,
        head_total=head_total,
    )
