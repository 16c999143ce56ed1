"""Shape rules: every rank derives the same layout, and what cannot be split is said."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from layout_equation import equation, layouts

from ulysses_ops import reference
from ulysses_ops.plan import (
    Direction,
    Layout,
    even_splits,
    layout_of_global,
    layout_of_source,
)


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
            layout.head_starts if layout.direction == "scatter" else layout.seq_starts,
        )
        assert of_source.source_shape(rank) == layout.source_shape(rank)
        if layout.seq_starts is layout.head_starts is None:
            assert of_source == layout
    of_global = layout_of_global(
        "test",
        layout.direction,
        layout.global_shape,
        layout.world_size,
        layout.seq_splits,
        layout.head_splits,
        layout.seq_starts,
        layout.head_starts,
    )
    assert (of_global.seq_splits, of_global.head_splits) == (layout.seq_splits, layout.head_splits)
    sizes = [int(np.prod(layout.window_shape(rank))) for rank in range(layout.world_size)]
    assert [of_global.window_shape(rank) for rank in range(layout.world_size)] == [
        layout.window_shape(rank) for rank in range(layout.world_size)
    ]
    assert layout.window_elems() == of_global.window_elems() == max(sizes)
    if layout.seq_starts is layout.head_starts is None:
        assert of_global == layout
        assert sum(sizes) == int(np.prod(layout.global_shape))


@settings(deadline=None, max_examples=100)
@given(layouts())
def test_references_follow_the_equation(layout: Layout) -> None:
    whole = np.random.default_rng(0).integers(0, 256, (*layout.global_shape, 1), np.uint8)
    tensor = torch.from_numpy(whole[..., 0])
    ranks = range(layout.world_size)
    shards = [reference.shard_of(tensor, layout, rank) for rank in ranks]
    expected = [equation(layout, [x.numpy()[..., None] for x in shards], rank) for rank in ranks]
    ones = [np.ones((*x.shape, 1), np.uint8) for x in shards]
    for rank in ranks:
        is_sent = equation(layout, ones, rank)[..., 0] == 1
        window = reference.window_of(tensor, layout, rank)
        np.testing.assert_array_equal(window.numpy()[is_sent], expected[rank][..., 0][is_sent])
    if layout.seq_starts is not None or layout.head_starts is not None:
        return
    received = (
        reference.scatter_reference(shards, layout.head_splits)
        if layout.direction == "scatter"
        else reference.gather_reference(shards, layout.seq_splits)
    )
    for rank in ranks:
        np.testing.assert_array_equal(received[rank].numpy(), expected[rank][..., 0])
        window = reference.window_of(tensor, layout, rank)
        np.testing.assert_array_equal(window.numpy(), expected[rank][..., 0])


def test_even_splits_differ_by_one_at_most_and_the_first_ranks_hold_more() -> None:
    assert even_splits(1001, 4) == (251, 250, 250, 250)
    assert even_splits(3, 4) == (1, 1, 1, 0)
    for total in range(40):
        for world_size in range(1, 9):
            splits = even_splits(total, world_size)
            assert (sum(splits), len(splits)) == (total, world_size)
            assert list(splits) == sorted(splits, reverse=True)
            assert splits[0] - splits[-1] <= 1
    with pytest.raises(
        ValueError, match="total=-1 must be a whole number >= 0 and world_size=2 one >= 1"
    ):
        even_splits(-1, 2)
    with pytest.raises(ValueError, match=r"total=5\.5 must be a whole number"):
        even_splits(5.5, 2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("direction", "splits", "starts", "match"),
    [
        ("scatter", (3, 3), (0, 4), r"head_starts=\[0, 4\] with head_splits=\[3, 3\] must be one"),
        ("scatter", (3, 3), (-1, 3), r"within the 6 that there are"),
        ("gather", (4, 4), (0,), r"seq_starts=\[0\] with seq_splits=\[4, 4\]"),
        ("gather", None, (0, 0), "seq_starts need seq_splits beside them"),
    ],
)
def test_ranges_that_do_not_fit_are_said(
    direction: Direction, splits: Any, starts: Any, match: str
) -> None:
    seq, heads = (None, splits) if direction == "scatter" else (splits, None)
    with pytest.raises(ValueError, match=match):
        layout_of_source("op", direction, (1, 4, 6, 8), 0, 2, seq, heads, starts)


def test_ranges_that_overlap_where_a_window_is_put_together_are_said() -> None:
    shape = (1, 8, 4, 2)
    for direction, what in (("scatter", "seq"), ("gather", "head")):
        ranges: dict[str, Any] = {f"{what}_splits": (2, 3), f"{what}_starts": (0, 1)}
        with pytest.raises(ValueError, match=rf"{what}_starts=\[0, 1\] .* overlap"):
            layout_of_global("op", direction, shape, 2, **ranges)  # type: ignore[arg-type]
        other: Direction = "gather" if direction == "scatter" else "scatter"
        layout_of_global("op", other, shape, 2, **ranges)


@pytest.mark.parametrize(
    ("direction", "shape", "seq", "heads", "match"),
    [
        ("scatter", (4, 6, 8), None, None, r"x must have shape \(B, S, H, D\), got \[4, 6, 8\]"),
        ("scatter", (1, 4, 7, 8), None, None, "H=7 must be divisible by world_size=2; pad it"),
        ("gather", (1, 7, 4, 8), None, None, "S_global=7 must be divisible by world_size=2"),
        ("scatter", (1, 4, 6, 8), (5, 4), None, r"rank 0 holds 4 rows, seq_splits=\[5, 4\] say 5"),
        ("scatter", (1, 4, 6, 8), (4,), None, r"seq_splits=\[4\] must be 2 sizes >= 0"),
        ("scatter", (1, 4, 6, 8), (4, -1), None, r"seq_splits=\[4, -1\] must be 2 sizes >= 0"),
        ("scatter", (1, 4, 6, 8), (4, 4.0), None, "seq_splits holds 4.0 and must be sizes"),
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
