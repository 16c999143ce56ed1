"""Shape rules of scatter and gather, and the copies that carry them out.

``scatter``: ``y_r[b, off_s(p) + s, h, d] = x_p[b, s, off_h(r) + h, d]`` and ``gather`` is its
inverse, with ``off_s`` and ``off_h`` the first row and head of a rank, ``r`` the receiving rank and
``p`` a sending one. Ranges follow each other (prefix sums of the splits) unless starts are given. A
source is cut in the dimension that ``r`` indexes, where ranges may overlap: a head that several
ranks need goes to each of them. A window is put together in the dimension that ``p`` indexes, where
ranges may leave gaps: rows that nobody sends. Everything here is pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal, get_args

import torch

from .kinds import check_sizes, is_whole, shown

Direction = Literal["scatter", "gather"]
Shape4 = tuple[int, int, int, int]

EVERY_RANK = -1


@dataclass(frozen=True)
class Layout:
    """What every rank knows of one exchange; sizes in elements.

    Attributes:
        direction: ``"scatter"`` or ``"gather"``.
        batch: B.
        head_dim: D.
        seq_splits: Rows of the sequence held by each rank.
        head_splits: Heads held by each rank.
        seq_starts: First row of each rank; ``None`` where ranges follow each other.
        head_starts: First head of each rank; likewise.
        seq_total: ``S_global`` where ``seq_starts`` are given; else the sum of ``seq_splits``.
        head_total: ``H``; likewise.
    """

    direction: Direction
    batch: int
    head_dim: int
    seq_splits: tuple[int, ...]
    head_splits: tuple[int, ...]
    seq_starts: tuple[int, ...] | None = None
    head_starts: tuple[int, ...] | None = None
    seq_total: int | None = None
    head_total: int | None = None

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.seq_splits)

    @property
    def global_shape(self) -> Shape4:
        """``(B, S_global, H, D)``."""
        rows = sum(self.seq_splits) if self.seq_total is None else self.seq_total
        heads = sum(self.head_splits) if self.head_total is None else self.head_total
        return (self.batch, rows, heads, self.head_dim)

    @property
    def is_all_gather(self) -> bool:
        """Whether every rank gets all heads of all rows: a scatter whose ranges are the whole."""
        heads = self.global_shape[2]
        everything = all(
            size == heads and self.head_offset(rank) == 0
            for rank, size in enumerate(self.head_splits)
        )
        return self.direction == "scatter" and everything

    def source_shape(self, rank: int, peer: int | None = None) -> Shape4:
        """Shape that ``rank`` sends; of the part for ``peer`` when that is given."""
        batch, seq_global, heads, head_dim = self.global_shape
        if self.direction == "scatter":
            sent_heads = heads if peer is None else self.head_splits[peer]
            return (batch, self.seq_splits[rank], sent_heads, head_dim)
        sent_rows = seq_global if peer is None else self.seq_splits[peer]
        return (batch, sent_rows, self.head_splits[rank], head_dim)

    def window_shape(self, rank: int) -> Shape4:
        """Shape that ``rank`` receives."""
        batch, seq_global, heads, head_dim = self.global_shape
        if self.direction == "scatter":
            return (batch, seq_global, self.head_splits[rank], head_dim)
        return (batch, self.seq_splits[rank], heads, head_dim)

    def window_elems(self) -> int:
        """Elements of the largest rank's window: symmetric memory has one size."""
        return max(_product(self.window_shape(rank)) for rank in range(self.world_size))

    def seq_offset(self, rank: int) -> int:
        """First row of ``rank`` in the whole sequence."""
        return sum(self.seq_splits[:rank]) if self.seq_starts is None else self.seq_starts[rank]

    def head_offset(self, rank: int) -> int:
        """First head of ``rank`` among all heads."""
        return sum(self.head_splits[:rank]) if self.head_starts is None else self.head_starts[rank]

    def ranges(self) -> tuple[list[int], list[int], int, int]:
        """Starts and totals of rows and heads as the compiled plan takes them; empty for none."""
        seq, heads = list(self.seq_starts or ()), list(self.head_starts or ())
        return seq, heads, self.seq_total or 0, self.head_total or 0


@dataclass(frozen=True)
class PitchedCopy:
    """``num_slices`` slices of ``num_rows`` rows of ``row_bytes``; offsets and pitches in bytes."""

    peer: int
    src_offset: int
    dst_offset: int
    row_bytes: int
    num_rows: int
    src_pitch: int
    dst_pitch: int
    num_slices: int
    src_slice_pitch: int
    dst_slice_pitch: int


def _product(shape: Sequence[int]) -> int:
    result = 1
    for size in shape:
        result *= size
    return result


def as_tuple(splits: Sequence[int] | None) -> tuple[int, ...] | None:
    """Splits that can be compared and hashed."""
    check_sizes("splits", "splits", splits)
    return None if splits is None else tuple(splits)


def even_splits(total: int, world_size: int) -> tuple[int, ...]:
    """Split ``total`` as evenly as it goes: 1001 over 4 is ``(251, 250, 250, 250)``.

    ``size_r = floor((total + world_size - 1 - r) / world_size)``, written without a branch so that
    a compiler traces it once for every ``total``. The first ``total % world_size`` ranks get one
    more; with fewer than ``world_size``, the last ones get nothing.

    Args:
        total: Rows (or heads) on all ranks together.
        world_size: Number of ranks.

    Raises:
        ValueError: ``total`` is negative, or there is no rank.
    """
    if not is_whole(total) or not is_whole(world_size) or total < 0 or world_size < 1:
        message = (
            f"even_splits: total={shown(total)} must be a whole number >= 0 and "
            f"world_size={shown(world_size)} one >= 1"
        )
        raise ValueError(message)
    return tuple((total + world_size - 1 - rank) // world_size for rank in range(world_size))


def _divided(op: str, what: str, total: int, world_size: int) -> tuple[int, ...]:
    """Equal splits, where none were given; ``what`` names the count in the error."""
    if total % world_size != 0:
        message = (
            f"{op}: {what}={total} must be divisible by world_size={world_size}; "
            f"pad it or give explicit splits"
        )
        raise ValueError(message)
    return (total // world_size,) * world_size


def checked_splits(
    op: str, what: str, splits: Sequence[int], total: int | None, world_size: int
) -> tuple[int, ...]:
    """Explicit splits, which must fit the rank count and, where it is known, the total."""
    check_sizes(op, f"{what}_splits", splits)
    result = tuple(splits)
    # Not min(): a compiler would note which of them is the smallest, and compile anew for others.
    if len(result) != world_size or any(n < 0 for n in result):
        message = (
            f"{op}: {what}_splits={list(result)} must be {world_size} sizes >= 0, one for each rank"
        )
        raise ValueError(message)
    if total is not None and sum(result) != total:
        message = (
            f"{op}: {what}_splits={list(result)} add up to {sum(result)}, the tensor has {total}; "
            f"give the sizes that all ranks hold"
        )
        raise ValueError(message)
    return result


def _checked_starts(
    op: str, what: str, starts: Sequence[int], splits: Sequence[int], total: int
) -> tuple[int, ...] | None:
    """Explicit starts of the ranges; ``None`` where they say what the splits say already."""
    check_sizes(op, f"{what}_starts", starts)
    result = tuple(starts)
    fit = len(result) == len(splits) and all(
        start >= 0 and start + size <= total for start, size in zip(result, splits, strict=True)
    )
    if not fit:
        message = (
            f"{op}: {what}_starts={list(result)} with {what}_splits={list(splits)} must be one "
            f"range for each rank within the {total} that there are"
        )
        raise ValueError(message)
    follow = result == tuple(accumulate(splits[:-1], initial=0)) and sum(splits) == total
    return None if follow else result


def _refuse_overlap(op: str, layout: Layout) -> None:
    """A window is put together from ranges that are apart."""
    scatter = layout.direction == "scatter"
    what = "seq" if scatter else "head"
    starts = layout.seq_starts if scatter else layout.head_starts
    splits = layout.seq_splits if scatter else layout.head_splits
    if starts is None:
        return
    ranges = sorted((start, size) for start, size in zip(starts, splits, strict=True) if size > 0)
    for (first, size), (second, _) in pairwise(ranges):
        if first + size > second:
            message = (
                f"{op}: {what}_starts={list(starts)} with {what}_splits={list(splits)} overlap, "
                f"and {layout.direction} puts these together; give ranges that are apart"
            )
            raise ValueError(message)


def layout_of_source(
    op: str,
    direction: Direction,
    shape: Sequence[int],
    rank: int,
    world_size: int,
    seq_splits: Sequence[int] | None = None,
    head_splits: Sequence[int] | None = None,
    starts: Sequence[int] | None = None,
) -> Layout:
    """Layout of the exchange that a tensor of this shape takes part in on ``rank``.

    Args:
        op: Name for error messages.
        direction: ``"scatter"`` or ``"gather"``.
        shape: ``(B, S_local, H, D)`` for scatter, ``(B, S_global, H_local, D)`` for gather.
        rank: This rank.
        world_size: Number of ranks.
        seq_splits: Rows of each rank; even when left out.
        head_splits: Heads of each rank; even when left out.
        starts: First head (scatter) or first row (gather) that each rank gets, with the number of
            them in ``head_splits`` or ``seq_splits``; ranges may overlap.

    Raises:
        ValueError: not four dimensions, a count that cannot be split, or splits that disagree.
    """
    if len(shape) != 4:
        message = f"{op}: x must have shape (B, S, H, D), got {list(shape)}"
        raise ValueError(message)
    batch, rows, heads, head_dim = shape
    scatter = direction == "scatter"
    held, held_total, held_splits = (
        ("seq", rows, seq_splits) if scatter else ("head", heads, head_splits)
    )
    cut, cut_total, cut_splits = (
        ("head", heads, head_splits) if scatter else ("seq", rows, seq_splits)
    )
    held_sizes = (
        (held_total,) * world_size
        if held_splits is None
        else checked_splits(op, held, held_splits, None, world_size)
    )
    if held_sizes[rank] != held_total:
        what = "rows" if scatter else "heads"
        message = (
            f"{op}: rank {rank} holds {held_total} {what}, {held}_splits={list(held_sizes)} say "
            f"{held_sizes[rank]}; give the sizes that all ranks hold"
        )
        raise ValueError(message)
    if cut_splits is None:
        if starts is not None:
            message = f"{op}: {cut}_starts need {cut}_splits beside them; give both"
            raise ValueError(message)
        cut_sizes = _divided(op, "H" if scatter else "S_global", cut_total, world_size)
    else:
        known = cut_total if starts is None else None
        cut_sizes = checked_splits(op, cut, cut_splits, known, world_size)
    first = None if starts is None else _checked_starts(op, cut, starts, cut_sizes, cut_total)
    total = None if first is None else cut_total
    if scatter:
        return Layout(
            direction,
            batch,
            head_dim,
            held_sizes,
            cut_sizes,
            head_starts=first,
            head_total=total,
        )
    return Layout(
        direction, batch, head_dim, cut_sizes, held_sizes, seq_starts=first, seq_total=total
    )


def layout_of_global(
    op: str,
    direction: Direction,
    shape: Sequence[int],
    world_size: int,
    seq_splits: Sequence[int] | None = None,
    head_splits: Sequence[int] | None = None,
    seq_starts: Sequence[int] | None = None,
    head_starts: Sequence[int] | None = None,
) -> Layout:
    """Layout of an exchange of the global tensor ``(B, S_global, H, D)``.

    With starts, S_global and H count all rows and heads that there are, and the ranges need not
    cover them.

    Raises:
        ValueError: not four dimensions, a count that cannot be split, or splits that disagree.
    """
    if direction not in get_args(Direction):
        message = f"{op}: direction={direction!r} must be 'scatter' or 'gather'"
        raise ValueError(message)
    check_sizes(op, "shape", shape, "four whole numbers, (B, S_global, H, D)")
    if len(shape) != 4 or min(shape) < 0:
        message = f"{op}: shape must be (B, S_global, H, D), got {list(shape)}"
        raise ValueError(message)
    batch, seq_global, heads, head_dim = (int(size) for size in shape)

    def ranges(
        what: str,
        count: str,
        total: int,
        splits: Sequence[int] | None,
        starts: Sequence[int] | None,
    ) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
        if splits is None:
            if starts is not None:
                message = f"{op}: {what}_starts need {what}_splits beside them; give both"
                raise ValueError(message)
            return _divided(op, count, total, world_size), None
        sizes = checked_splits(op, what, splits, total if starts is None else None, world_size)
        first = None if starts is None else _checked_starts(op, what, starts, sizes, total)
        return sizes, first

    seq, seq_first = ranges("seq", "S_global", seq_global, seq_splits, seq_starts)
    head, head_first = ranges("head", "H", heads, head_splits, head_starts)
    layout = Layout(
        direction,
        batch,
        head_dim,
        seq,
        head,
        seq_first,
        head_first,
        None if seq_first is None else seq_global,
        None if head_first is None else heads,
    )
    _refuse_overlap(op, layout)
    return layout


def plan_copies(
    layout: Layout, rank: int, strides: Sequence[int], itemsize: int, peer: int | None = None
) -> list[PitchedCopy]:
    """The copies that ``rank`` issues, peers first in rotated order and its own share last.

    Args:
        layout: The exchange.
        rank: The sending rank.
        strides: Strides of the source in elements.
        itemsize: Bytes of an element.
        peer: The source is a part already cut for this rank.

    Raises:
        RuntimeError: the source cannot be read by pitch.
    """
    numbers: list[int] = torch.ops.ulysses._plan_copies(
        layout.direction == "gather",
        layout.batch,
        layout.head_dim,
        itemsize,
        list(layout.seq_splits),
        list(layout.head_splits),
        *layout.ranges(),
        rank,
        list(strides),
        EVERY_RANK if peer is None else peer,
    )
    return [PitchedCopy(*numbers[i : i + 10]) for i in range(0, len(numbers), 10)]
