"""Shape rules: every rank derives the same layout, and what cannot be split is said."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from layout_equation import equation, layouts

from ulysses_ops import reference
from ulysses_ops.plan import Direction, Layout, layout_of_global, layout_of_source


@settings(deadline=None, max_examples=200)
@given(layouts())
def test_every_rank_derives_the_same_layout(layout: Layout) -> None:
    for rank in range(layout.world_size):
        of_source = layout_of_source(
            "test",
            layout.direction,
            layout.source_shape(rank),
            rank,
            layout.world_size,
            layout.seq_splits,
            layout.head_splits,
        )
        assert of_source == layout
    of_global = layout_of_global(
        "test",
        layout.direction,
        layout.global_shape,
        layout.world_size,
        layout.seq_splits,
        layout.head_splits,
    )
    assert of_global == layout
    sizes = [int(np.prod(layout.window_shape(rank))) for rank in range(layout.world_size)]
    assert layout.window_elems() == max(sizes)
    assert sum(sizes) == int(np.prod(layout.global_shape))


@settings(deadline=None, max_examples=100)
@given(layouts())
def test_references_follow_the_equation(layout: Layout) -> None:
    whole = np.random.default_rng(0).integers(0, 256, (*layout.global_shape, 1), np.uint8)
    tensor = torch.from_numpy(whole[..., 0])
    ranks = range(layout.world_size)
    shards = [reference.shard_of(tensor, layout, rank) for rank in ranks]
    expected = [equation(layout, [x.numpy()[..., None] for x in shards], rank) for rank in ranks]
    received = (
        reference.scatter_reference(shards, layout.head_splits)
        if layout.direction == "scatter"
        else reference.gather_reference(shards, layout.seq_splits)
    )
    for rank in ranks:
        np.testing.assert_array_equal(received[rank].numpy(), expected[rank][..., 0])
        window = reference.window_of(tensor, layout, rank)
        np.testing.assert_array_equal(window.numpy(), expected[rank][..., 0])


@pytest.mark.parametrize(
    ("direction", "shape", "seq", "heads", "match"),
    [
        ("scatter", (4, 6, 8), None, None, r"x must have shape \(B, S, H, D\), got \[4, 6, 8\]"),
        ("scatter", (1, 4, 7, 8), None, None, "H=7 must be divisible by world_size=2; pad it"),
        ("gather", (1, 7, 4, 8), None, None, "S_global=7 must be divisible by world_size=2"),
        ("scatter", (1, 4, 6, 8), (5, 4), None, r"rank 0 holds 4 rows, seq_splits=\[5, 4\] say 5"),
        ("scatter", (1, 4, 6, 8), (4,), None, r"seq_splits=\[4\] must be 2 sizes >= 0"),
        ("scatter", (1, 4, 6, 8), (4, -1), None, r"seq_splits=\[4, -1\] must be 2 sizes >= 0"),
        ("scatter", (1, 4, 6, 8), None, (4, 4), "add up to 8, the tensor has 6"),
        ("gather", (1, 8, 3, 8), None, (4, 2), r"rank 0 holds 3 heads, head_splits=\[4, 2\] say 4"),
        ("gather", (1, 8, 3, 8), (4, 3), None, "add up to 7, the tensor has 8"),
    ],
)
def test_what_cannot_be_split_is_said(
    direction: Direction, shape: Any, seq: Any, heads: Any, match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        layout_of_source("op", direction, shape, 0, 2, seq, heads)


@pytest.mark.parametrize(
    ("direction", "shape", "match"),
    [
        ("sideways", (1, 4, 4, 8), "direction='sideways' must be 'scatter' or 'gather'"),
        ("scatter", (1, 4, 4), r"shape must be \(B, S_global, H, D\), got \[1, 4, 4\]"),
        ("scatter", (1, -4, 4, 8), "shape must be"),
        ("scatter", (1, 5, 4, 8), "S_global=5 must be divisible"),
        ("gather", (1, 4, 5, 8), "H=5 must be divisible"),
    ],
)
def test_what_cannot_be_reserved_is_said(direction: Any, shape: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        layout_of_global("op", direction, shape, 2)
