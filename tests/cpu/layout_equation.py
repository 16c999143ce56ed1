"""What the exchanges mean, element by element, and layouts to try it on."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from ulysses_ops.plan import Direction, Layout

Bytes = npt.NDArray[np.uint8]

SENTINEL = 0xEE  # memory that nobody wrote


def equation(layout: Layout, shards: Sequence[Bytes], receiver: int) -> Bytes:
    """``y_r[b, off_s(p) + s, h, d] = x_p[b, s, off_h(r) + h, d]``, or the inverse for gather."""
    itemsize = shards[0].shape[-1]
    y: Bytes = np.full((*layout.window_shape(receiver), itemsize), SENTINEL, np.uint8)
    for p, x in enumerate(shards):
        if layout.direction == "scatter":
            for s, h in product(range(layout.seq_splits[p]), range(layout.head_splits[receiver])):
                y[:, sum(layout.seq_splits[:p]) + s, h] = x[
                    :, s, sum(layout.head_splits[:receiver]) + h
                ]
        else:
            for s, h in product(range(layout.seq_splits[receiver]), range(layout.head_splits[p])):
                y[:, s, sum(layout.head_splits[:p]) + h] = x[
                    :, sum(layout.seq_splits[:receiver]) + s, h
                ]
    return y


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    world_size = draw(st.integers(1, 4))
    splits = [
        tuple(draw(st.lists(st.integers(0, most), min_size=world_size, max_size=world_size)))
        for most in (4, 3)
    ]
    direction: Direction = draw(st.sampled_from(("scatter", "gather")))
    return Layout(direction, draw(st.integers(0, 3)), draw(st.integers(1, 4)), *splits)
