"""The plan, carried out over byte buffers: one for each simulated rank, no transport.

Expected is the layout equation itself, and beside it what ``torch.split`` and ``torch.cat`` make of
the same shards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_equation import SENTINEL, Bytes, equation, layouts, starts_of

from ulysses_ops.heads import share_heads
from ulysses_ops.plan import Direction, Layout, PitchedCopy, even_splits, plan_copies

Plan = Callable[[Layout, int, Sequence[int], int, int | None], list[PitchedCopy]]

JUNK_STRIDES = (0, 1, 7, 1_000_003)  # what a dimension of size 1 may come with


@dataclass(frozen=True)
class Source:
    """Memory of one source, from its first element on, and its strides in elements."""

    memory: Bytes
    strides: tuple[int, ...]


@dataclass(frozen=True)
class Padding:
    """Elements between rows and between batch entries, and strides of dimensions of size 1.

    ``order`` is that of batch, rows and heads in memory, outermost first.
    """

    row: int = 0
    slice: int = 0
    junk: int | None = None
    order: tuple[int, ...] = (0, 1, 2)


def laid_out(values: Bytes, padding: Padding) -> Source:
    """Put ``values`` (B, S, H, D, itemsize) into memory with padding, bytes of it all around."""
    batch, rows, heads, head_dim, itemsize = values.shape
    sizes, gaps = (batch, rows, heads), (0, padding.slice, padding.row)
    steps, extent = [0, 0, 0], head_dim
    for dim in reversed(padding.order):
        steps[dim] = extent
        extent = extent * sizes[dim] + gaps[dim]
    strides = (*steps, 1)
    memory = np.full(max(1, extent) * itemsize, SENTINEL, np.uint8)
    if values.size:
        in_bytes = (*(stride * itemsize for stride in strides), 1)
        view: Bytes = np.lib.stride_tricks.as_strided(memory, values.shape, in_bytes)
        view[...] = values
    if padding.junk is not None:
        strides = tuple(
            padding.junk if size == 1 else stride
            for size, stride in zip(values.shape[:4], strides, strict=True)
        )
    return Source(memory, strides)


def carry_out(copies: Sequence[PitchedCopy], source: Bytes, windows: Sequence[Bytes]) -> list[int]:
    """Do the copies; return for each window how many bytes were written, none of them twice."""
    written = [np.zeros(window.size, np.int64) for window in windows]
    for copy in copies:
        for slice_number, row in product(range(copy.num_slices), range(copy.num_rows)):
            src = copy.src_offset + slice_number * copy.src_slice_pitch + row * copy.src_pitch
            dst = copy.dst_offset + slice_number * copy.dst_slice_pitch + row * copy.dst_pitch
            assert src >= 0
            assert src + copy.row_bytes <= source.size
            assert dst >= 0
            assert dst + copy.row_bytes <= windows[copy.peer].size
            windows[copy.peer][dst : dst + copy.row_bytes] = source[src : src + copy.row_bytes]
            written[copy.peer][dst : dst + copy.row_bytes] += 1
    assert all(count.max(initial=0) <= 1 for count in written)
    return [int(count.sum()) for count in written]


def by_torch(layout: Layout, shards: Sequence[Bytes], receiver: int) -> Bytes:
    """The same by splitting each shard and joining what a rank gets, as torch does."""
    scatter = layout.direction == "scatter"
    cut, join, sizes = (2, 1, layout.head_splits) if scatter else (1, 2, layout.seq_splits)
    parts = [torch.from_numpy(x).split(list(sizes), dim=cut)[receiver] for x in shards]
    joined: Bytes = torch.cat(parts, dim=join).numpy()
    return joined


def cut_for(layout: Layout, shard: Bytes, peer: int) -> Bytes:
    """The part of a shard that goes to one rank."""
    if layout.direction == "scatter":
        first = starts_of(layout.head_splits, layout.head_starts)[peer]
        return shard[:, :, first : first + layout.head_splits[peer]]
    first = starts_of(layout.seq_splits, layout.seq_starts)[peer]
    return shard[:, first : first + layout.seq_splits[peer]]


def check(
    layout: Layout,
    itemsize: int,
    padding: Padding,
    *,
    plan: Plan = plan_copies,
    parts: bool = False,
) -> None:
    """Every rank carries out its plan; every window must hold what the equation says, no more."""
    world_size = layout.world_size
    random = np.random.default_rng(0)
    shards: list[Bytes] = [
        random.integers(0, 256, (*layout.source_shape(rank), itemsize), np.uint8)
        for rank in range(world_size)
    ]
    expected = [equation(layout, shards, rank) for rank in range(world_size)]
    windows: list[Bytes] = [np.full(y.size, SENTINEL, np.uint8) for y in expected]
    totals = [0] * world_size
    for rank, shard in enumerate(shards):
        for peer in range(world_size) if parts else (None,):
            values = shard if peer is None else cut_for(layout, shard, peer)
            source = laid_out(values, padding)
            copies = plan(layout, rank, source.strides, itemsize, peer)
            for number, count in enumerate(carry_out(copies, source.memory, windows)):
                totals[number] += count
    follow = layout.seq_starts is None and layout.head_starts is None
    for rank, y in enumerate(expected):
        assert totals[rank] == sum(
            cut_for(layout, shard, rank).size for shard in shards
        )  # with no byte twice from one rank: each exactly once
        np.testing.assert_array_equal(windows[rank].reshape(y.shape), y)
        if follow:
            assert totals[rank] == y.size
            np.testing.assert_array_equal(by_torch(layout, shards, rank), y)


PADDINGS = st.builds(
    Padding,
    row=st.integers(0, 5),
    slice=st.integers(0, 5),
    junk=st.none() | st.sampled_from(JUNK_STRIDES),
    order=st.permutations(range(3)).map(tuple),
)


@settings(deadline=None, max_examples=200)
@given(layouts(), st.sampled_from((1, 2, 4, 8, 16)), PADDINGS, st.booleans())
def test_every_byte_goes_where_the_equation_says(
    layout: Layout, itemsize: int, padding: Padding, parts: bool
) -> None:
    check(layout, itemsize, padding, parts=parts)


SPLITS = {
    "13 over 2": ((7, 6), (3, 1)),
    "1001 over 4": ((251, 250, 250, 250), (1, 1, 1, 1)),
    "3 over 4": ((1, 1, 1, 0), (1, 2, 0, 1)),
    "29 over 4": ((8, 7, 7, 7), (2, 2, 2, 2)),
}


@pytest.mark.parametrize("direction", ["scatter", "gather"])
@pytest.mark.parametrize("splits", SPLITS.values(), ids=SPLITS.keys())
def test_uneven_splits(direction: Direction, splits: tuple[tuple[int, ...], ...]) -> None:
    seq_splits, head_splits = splits
    layout = Layout(direction, 2, 3, seq_splits, head_splits)
    check(layout, 2, Padding(row=4))
    check(layout, 2, Padding(), parts=True)


@pytest.mark.parametrize(("heads", "kv_heads", "world_size"), [(40, 8, 16), (12, 12, 8)])
def test_shared_kv_heads_of_many_ranks(heads: int, kv_heads: int, world_size: int) -> None:
    share = share_heads(heads, kv_heads, world_size)
    rows = even_splits(21, world_size)
    for splits, starts, total in (
        (share.q_splits, None, None),
        (share.kv_splits, share.kv_starts, kv_heads),
    ):
        layout = Layout("scatter", 2, 3, rows, splits, head_starts=starts, head_total=total)
        check(layout, 2, Padding(row=4))
    check(Layout("gather", 2, 3, rows, share.q_splits), 2, Padding())


# ---- the checks are not blind: a plan with one fault must fail -----------------------------------


def shift(name: str, by: int) -> Callable[[PitchedCopy], PitchedCopy]:
    return lambda copy: replace(copy, **{name: getattr(copy, name) + by})


FAULTS: dict[str, Callable[[PitchedCopy], PitchedCopy]] = {
    "one head too far in the source": shift("src_offset", 6),
    "one head too far in the window": shift("dst_offset", 6),
    "one byte too far": shift("dst_offset", 1),
    "row too short": shift("row_bytes", -1),
    "row too long": shift("row_bytes", 6),
    "row missing": shift("num_rows", -1),
    "batch entry missing": shift("num_slices", -1),
    "pitch of the source": shift("src_pitch", 6),
    "pitch of the window": shift("dst_pitch", 6),
    "batch stride of the source": shift("src_slice_pitch", 6),
    "batch stride of the window": shift("dst_slice_pitch", 6),
    "to the wrong rank": lambda copy: replace(copy, peer=(copy.peer + 1) % 2),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
@pytest.mark.parametrize("direction", ["scatter", "gather"])
def test_the_check_sees_a_wrong_plan(
    direction: Direction, fault: Callable[[PitchedCopy], PitchedCopy]
) -> None:
    layout = Layout(direction, 2, 3, (3, 4), (2, 2))

    def faulty(*args: Any) -> list[PitchedCopy]:
        first, *others = plan_copies(*args)
        return [fault(first), *others]

    check(layout, 2, Padding(row=3, slice=5))
    with pytest.raises(AssertionError):
        check(layout, 2, Padding(row=3, slice=5), plan=faulty)
    with pytest.raises(AssertionError):
        check(layout, 2, Padding(row=3), plan=lambda *args: plan_copies(*args)[1:])


@pytest.mark.parametrize("direction", ["scatter", "gather"])
def test_the_check_sees_starts_that_are_left_out(direction: Direction) -> None:
    heads_first, rows_first = ((2, 0), (5, 1)) if direction == "scatter" else ((4, 0), (2, 2))
    layout = Layout(direction, 2, 3, (3, 4), (2, 2), rows_first, heads_first, 8, 7)

    check(layout, 2, Padding())
    for left_out in ("seq_starts", "head_starts"):

        def blind(layout: Layout, *args: Any, name: str = left_out) -> list[PitchedCopy]:
            changes: dict[str, Any] = {name: None}
            return plan_copies(replace(layout, **changes), *args)

        with pytest.raises(AssertionError):
            check(layout, 2, Padding(), plan=blind)


# ---- order, and the fewest copies ----------------------------------------------------------------


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    return torch.empty(tuple(shape), device="meta").stride()


@pytest.mark.parametrize("rank", range(4))
def test_peers_come_in_rotated_order_and_the_own_share_last(rank: int) -> None:
    layout = Layout("scatter", 1, 8, (2,) * 4, (3,) * 4)
    copies = plan_copies(layout, rank, contiguous_strides(layout.source_shape(rank)), 2)
    assert [copy.peer for copy in copies] == [(rank + step) % 4 for step in (1, 2, 3, 4)]


def test_dense_parts_become_one_flat_copy() -> None:
    gather = Layout("gather", 1, 8, (2, 2), (3, 0))
    (copy, _) = plan_copies(gather, 0, contiguous_strides(gather.source_shape(0)), 2)
    # 2 rows of 3 heads of 8 elements of 2 bytes: both sides dense, so no pitch is left
    assert copy == PitchedCopy(1, 96, 0, 96, 1, 96, 96, 1, 0, 0)


def test_nothing_is_copied_for_an_empty_share() -> None:
    layout = Layout("scatter", 2, 8, (0, 3), (2, 2))
    assert plan_copies(layout, 0, contiguous_strides(layout.source_shape(0)), 4) == []
    assert len(plan_copies(layout, 1, contiguous_strides(layout.source_shape(1)), 4)) == 2


@pytest.mark.parametrize(
    "strides",
    [
        (96, 8, 24, 1),  # heads outermost, but closer than the rows of one head are long
        (192, 48, 16, 2),  # last stride 2
        (0, 0, 8, 1),  # expanded rows
        (96, 24, 0, 1),  # expanded heads
        (12, 24, 8, 1),  # batch entries overlap
    ],
)
def test_a_source_that_has_no_pitch_is_refused(strides: tuple[int, ...]) -> None:
    layout = Layout("scatter", 2, 8, (4, 4), (2, 1))
    with pytest.raises(RuntimeError, match=r"strides .* not dense .* copy the source first"):
        plan_copies(layout, 0, strides, 2)


def test_heads_outermost_are_one_copy_a_head_and_any_other_order_one_a_rank() -> None:
    layout = Layout("scatter", 1, 8, (4, 4), (3, 3))
    heads_outermost = plan_copies(layout, 0, (192, 8, 32, 1), 2)
    assert [copy.peer for copy in heads_outermost] == [1] * 3 + [0] * 3
    assert {(copy.row_bytes, copy.num_rows, copy.src_pitch) for copy in heads_outermost} == {
        (16, 4, 16)
    }
    two = Layout("scatter", 2, 8, (4, 4), (3, 3))
    for strides in ((192, 48, 8, 1), (48, 96, 8, 1), (600, 144, 8, 1)):
        assert len(plan_copies(two, 0, strides, 2)) == 2


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"seq_starts": (0, 3), "seq_total": 8}, "seq ranges of two ranks overlap"),
        ({"head_starts": (0, 2), "head_total": 3}, "head range of rank 1 starts at 2 and has 2"),
        ({"head_starts": (-1, 0), "head_total": 3}, "head range of rank 0 starts at -1"),
        ({"head_starts": (0,), "head_total": 3}, "head_starts has 1 entries; give one per rank"),
    ],
)
def test_ranges_that_make_no_exchange_are_refused(changes: dict[str, Any], match: str) -> None:
    layout = replace(Layout("scatter", 2, 8, (4, 4), (2, 2)), **changes)
    with pytest.raises((RuntimeError, ValueError), match=match):
        plan_copies(layout, 0, (96, 24, 8, 1), 2)


# ---- more than 2^31 elements ---------------------------------------------------------------------


@pytest.mark.parametrize("direction", ["scatter", "gather"])
@pytest.mark.parametrize("itemsize", [1, 2, 8])
def test_offsets_of_large_tensors_do_not_wrap(direction: Direction, itemsize: int) -> None:
    """5 * 2^32 elements a rank: the last byte that each copy touches is the last that there is."""
    seq, heads = (3 * 2**20 + 1, 2**20), (33, 31)
    layout = Layout(direction, 2, 128, seq, heads)
    for rank in range(2):
        source = layout.source_shape(rank)
        assert np.prod(source, dtype=object) > 2**31
        for copy in plan_copies(layout, rank, contiguous_strides(source), itemsize):
            window = layout.window_shape(copy.peer)
            ends = [
                offset
                + (copy.num_slices - 1) * slice_pitch
                + (copy.num_rows - 1) * pitch
                + copy.row_bytes
                for offset, slice_pitch, pitch in (
                    (copy.src_offset, copy.src_slice_pitch, copy.src_pitch),
                    (copy.dst_offset, copy.dst_slice_pitch, copy.dst_pitch),
                )
            ]
            batch, rows, some_heads, dim = source
            last_row = rows if direction == "scatter" else sum(seq[: copy.peer + 1])
            last_head = sum(heads[: copy.peer + 1]) if direction == "scatter" else some_heads
            elems = ((batch - 1) * rows + last_row - 1) * some_heads + last_head
            assert ends[0] == elems * dim * itemsize
            batch, rows, some_heads, dim = window
            last_row = sum(seq[: rank + 1]) if direction == "scatter" else rows
            last_head = some_heads if direction == "scatter" else sum(heads[: rank + 1])
            elems = ((batch - 1) * rows + last_row - 1) * some_heads + last_head
            assert ends[1] == elems * dim * itemsize
            assert copy.row_bytes * copy.num_rows * copy.num_slices == (
                2
                * seq[rank if direction == "scatter" else copy.peer]
                * heads[copy.peer if direction == "scatter" else rank]
                * 128
                * itemsize
            )


def test_no_pitch_is_longer_than_a_2d_copy_takes() -> None:
    """Dense batch entries that are further apart than that stay slices, each of them flat."""
    far = Layout("scatter", 2, 128, (2**21, 2**21), (8, 0))
    near = Layout("scatter", 2, 128, (2**12, 2**12), (8, 0))
    for layout, slices, rows in ((far, 2, 1), (near, 1, 2)):
        (copy,) = plan_copies(layout, 1, contiguous_strides(layout.source_shape(1)), 2)
        assert (copy.num_slices, copy.num_rows) == (slices, rows)
        assert max(copy.src_pitch, copy.dst_pitch) <= 2**31 - 1 or copy.num_rows == 1
