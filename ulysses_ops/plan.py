"""Shape rules of scatter and gather, and the copies that carry them out.

``scatter``: ``y_r[b, off_s(p) + s, h, d] = x_p[b, s, off_h(r) + h, d]`` and ``gather`` is its
inverse, with ``off_s`` and ``off_h`` the prefix sums of the splits, ``r`` the receiving and ``p`` a
sending rank. Everything here is pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch

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
        seq_splits: Rows of the sequence held by each rank; their sum is ``S_global``.
        head_splits: Heads held by each rank; their sum is ``H``.
    """

    direction: Direction
    batch: int
    head_dim: int
    seq_splits: tuple[int, ...]
    head_splits: tuple[int, ...]

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.seq_splits)

    @property
    def global_shape(self) -> Shape4:
        """``(B, S_global, H, D)``."""
        return (self.batch, sum(self.seq_splits), sum(self.head_splits), self.head_dim)

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
        return sum(self.seq_splits[:rank])

    def head_offset(self, rank: int) -> int:
        """First head of ``rank`` among all heads."""
        return sum(self.head_splits[:rank])


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


def even_splits(op: str, what: str, total: int, world_size: int) -> tuple[int, ...]:
    """Split ``total`` evenly; ``what`` names the count in the error.

    Raises:
        ValueError: ``total`` is not divisible by ``world_size``.
    """
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
    """Check explicit splits against the rank count and, where it is known, the total.

    Raises:
        ValueError: wrong number of entries, a negative one, or a sum that is not ``total``.
    """
    result = tuple(int(size) for size in splits)
    if len(result) != world_size or min(result) < 0:
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


def layout_of_source(
    op: str,
    direction: Direction,
    shape: Sequence[int],
    rank: int,
    world_size: int,
    seq_splits: Sequence[int] | None = None,
    head_splits: Sequence[int] | None = None,
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

    Raises:
        ValueError: not four dimensions, a count that cannot be split, or splits that disagree.
    """
    if len(shape) != 4:
        message = f"{op}: x must have shape (B, S, H, D), got {list(shape)}"
        raise ValueError(message)
    batch, rows, heads, head_dim = shape
    if direction == "scatter":
        seq = (
            (rows,) * world_size
            if seq_splits is None
            else checked_splits(op, "seq", seq_splits, None, world_size)
        )
        if seq[rank] != rows:
            message = (
                f"{op}: rank {rank} holds {rows} rows, seq_splits={list(seq)} say {seq[rank]}; "
                f"give the sizes that all ranks hold"
            )
            raise ValueError(message)
        head = (
            even_splits(op, "H", heads, world_size)
            if head_splits is None
            else checked_splits(op, "head", head_splits, heads, world_size)
        )
    else:
        head = (
            (heads,) * world_size
            if head_splits is None
            else checked_splits(op, "head", head_splits, None, world_size)
        )
        if head[rank] != heads:
            message = (
                f"{op}: rank {rank} holds {heads} heads, head_splits={list(head)} say "
                f"{head[rank]}; give the sizes that all ranks hold"
            )
            raise ValueError(message)
        seq = (
            even_splits(op, "S_global", rows, world_size)
            if seq_splits is None
            else checked_splits(op, "seq", seq_splits, rows, world_size)
        )
    return Layout(direction, batch, head_dim, seq, head)


def layout_of_global(
    op: str,
    direction: Direction,
    shape: Sequence[int],
    world_size: int,
    seq_splits: Sequence[int] | None = None,
    head_splits: Sequence[int] | None = None,
) -> Layout:
    """Layout of an exchange of the global tensor ``(B, S_global, H, D)``.

    Raises:
        ValueError: not four dimensions, a count that cannot be split, or splits that disagree.
    """
    if direction not in get_args(Direction):
        message = f"{op}: direction={direction!r} must be 'scatter' or 'gather'"
        raise ValueError(message)
    if len(shape) != 4 or min(shape) < 0:
        message = f"{op}: shape must be (B, S_global, H, D), got {list(shape)}"
        raise ValueError(message)
    batch, seq_global, heads, head_dim = (int(size) for size in shape)
    seq = (
        even_splits(op, "S_global", seq_global, world_size)
        if seq_splits is None
        else checked_splits(op, "seq", seq_splits, seq_global, world_size)
    )
    head = (
        even_splits(op, "H", heads, world_size)
        if head_splits is None
        else checked_splits(op, "head", head_splits, heads, world_size)
    )
    return Layout(direction, batch, head_dim, seq, head)


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
        rank,
        list(strides),
        EVERY_RANK if peer is None else peer,
    )
    return [PitchedCopy(*numbers[i : i + 10]) for i in range(0, len(numbers), 10)]
