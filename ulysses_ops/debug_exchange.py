"""An exchange of marks: every element says where it comes from, and each rank looks at each.

A mark is 64 bits: the rank that sent it, its index in that rank's tensor, and a number of the call
mixed in, so that what an earlier call left behind is told apart. Elements are as wide as those of
the tensor in question, so that the same copies carry them; narrow ones carry a mark in pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .communicator import UlyssesCommunicator
from .errors import UlyssesError
from .functional import Functional, all_heads, exchange_once
from .kinds import check_dense, check_sizes, check_tensors, shown
from .names import check_communicator
from .plan import Direction, Layout, as_tuple, layout_of_source

RESOURCE = "debug exchange"
OP = "debug_exchange"
RANK_SHIFT = 48
INDEX_MASK = (1 << RANK_SHIFT) - 1
MARK_BYTES = 8


@dataclass(frozen=True)
class Misplaced:
    """What is wrong on one rank.

    Attributes:
        place: ``(b, s, h, d)`` of the first wrong element of the result.
        expected: Rank and flat index of the element that belongs there.
        found: Rank and flat index of the one that is there; ``None`` for what no rank sent.
        count: Wrong elements in all.
    """

    place: tuple[int, int, int, int]
    expected: tuple[int, int]
    found: tuple[int, int] | None
    count: int

    def describe(self) -> str:
        """One clause."""
        there = "bytes that no rank sent"
        if self.found is not None:
            there = f"element {self.found[1]} of rank {self.found[0]}"
        return (
            f"{self.count} wrong, first at {list(self.place)}: {there} instead of element "
            f"{self.expected[1]} of rank {self.expected[0]}"
        )


@dataclass(frozen=True)
class ExchangeReport:
    """What every rank found; the same on all of them.

    Attributes:
        exchange: What was tried.
        misplaced: By rank; ``None`` where all is right.
    """

    exchange: str
    misplaced: tuple[Misplaced | None, ...]

    @property
    def is_right(self) -> bool:
        """Whether every element of every rank is where the equation says."""
        return not any(self.misplaced)

    def describe(self) -> str:
        """One line a rank."""
        lines = [
            f"  rank {rank}: {'right' if found is None else found.describe()}"
            for rank, found in enumerate(self.misplaced)
        ]
        return "\n".join([self.exchange, *lines])

    def raise_if_wrong(self) -> None:
        """Raise with :meth:`describe` unless all is right.

        Raises:
            UlyssesError: an element is misplaced.
        """
        if not self.is_right:
            raise UlyssesError(self.describe())


class _Calls:
    """How many calls a communicator has seen; alike on every rank."""

    def __init__(self) -> None:
        self.count = 0

    def next_salt(self) -> int:
        self.count += 1
        mixed = (self.count * 0x9E3779B97F4A7C15) & ((1 << 64) - 1)
        return mixed - (1 << 64) if mixed >> 63 else mixed  # as a signed number

    def close(self) -> None:
        """Nothing to give back."""


def debug_exchange(
    comm: UlyssesCommunicator,
    x: Tensor,
    *,
    op: Literal["scatter", "gather", "all_gather"] = "scatter",
    seq_splits: Sequence[int] | None = None,
    head_splits: Sequence[int] | None = None,
) -> ExchangeReport:
    """Find the first element that an exchange like that of ``x`` puts in the wrong place.

    ``x`` itself is not sent: marks are, in its shape, strides and width of elements, through the
    window and the copies of ``op(x, comm, seq_splits=..., head_splits=...)``. Each rank then
    compares every element with the equation of that operator.

    Args:
        comm: An open communicator.
        x: The tensor in question.
        op: The operator in question.
        seq_splits: As that operator takes them.
        head_splits: As that operator takes them; not for ``"all_gather"``.

    Returns:
        What each rank found, the same on every rank. ``raise_if_wrong()`` makes it an error.

    Raises:
        ValueError: as the operator.
        UlyssesError: as the operator.

    Collective; waits on the host. Not inside a capture.
    """
    check_communicator(OP, comm)
    check_tensors(OP, x=x)
    check_dense(OP, x)
    if x.device != comm.device:
        message = f"{OP}: x is on {x.device}, the communicator on {comm.device}; move it there"
        raise ValueError(message)
    if op not in ("scatter", "gather", "all_gather"):
        message = f"{OP}: op={shown(op)} must be 'scatter', 'gather' or 'all_gather'"
        raise ValueError(message)
    if x.dim() != 4:
        message = f"{OP}: x must have shape (B, S, H, D), got {list(x.shape)}"
        raise ValueError(message)
    check_sizes(OP, "seq_splits", seq_splits)
    check_sizes(OP, "head_splits", head_splits)
    functional: Functional = op
    if op == "all_gather" and head_splits is not None:
        message = f"{OP}: all_gather sends all heads; leave head_splits out"
        raise ValueError(message)
    heads = all_heads(x.shape, comm.world_size) if op == "all_gather" else (head_splits, None)
    direction: Direction = "gather" if op == "gather" else "scatter"
    splits = (as_tuple(seq_splits), as_tuple(heads[0]), heads[1])
    layout = layout_of_source(op, direction, x.shape, comm.rank, comm.world_size, *splits)
    salt = comm.attach(RESOURCE, _Calls).next_salt()
    sent = _sent_marks(layout, comm.rank, x.device) ^ salt
    pieces = [
        exchange_once(functional, piece, comm.world_size, comm.name, *splits)
        for piece in _as_elements(sent, x)
    ]
    received = _as_marks(pieces, layout.window_shape(comm.rank)) ^ salt
    found = _compare(layout, comm.rank, received)
    record = None if found is None else [found.place, found.expected, found.found, found.count]
    records = comm.agreement.exchange(OP, {"found": record})
    what = f"{op} of {list(layout.global_shape)}, {x.dtype}, on '{comm.transport}'"
    return ExchangeReport(what, tuple(_from_json(entry["found"]) for entry in records))


def _sent_marks(layout: Layout, rank: int, device: torch.device) -> Tensor:
    shape = layout.source_shape(rank)
    count = shape[0] * shape[1] * shape[2] * shape[3]
    index = torch.arange(count, dtype=torch.int64, device=device).view(shape)
    return index | ((rank + 1) << RANK_SHIFT)


def _as_elements(marks: Tensor, x: Tensor) -> list[Tensor]:
    """The marks in tensors like ``x``, some of their bytes in each."""
    width = x.element_size()
    wide = marks.unsqueeze(-1).view(torch.uint8)
    if width > MARK_BYTES:  # the rest of an element is empty
        wide = torch.nn.functional.pad(wide, (0, width - MARK_BYTES))
    # A bool can be 0 and 1 alone, but a byte is as wide.
    dtype = torch.uint8 if x.dtype == torch.bool else x.dtype
    return [
        _strided(part.contiguous().view(dtype).squeeze(-1), x) for part in wide.split(width, dim=-1)
    ]


def _strided(values: Tensor, x: Tensor) -> Tensor:
    """The same values in memory laid out as that of ``x``, if each element has a place there."""
    if any(step == 0 for step, size in zip(x.stride(), x.shape, strict=True) if size > 1):
        return values
    reach = sum(step * (size - 1) for step, size in zip(x.stride(), x.shape, strict=True))
    memory = values.new_zeros(reach + 1 if values.numel() else 0)
    laid_out = memory.as_strided(x.shape, x.stride()).copy_(values)
    return laid_out if _bytes_equal(laid_out, values) else values  # elements of x may overlap


def _bytes_equal(a: Tensor, b: Tensor) -> bool:
    flat = (t.contiguous().view(-1).view(torch.uint8) for t in (a, b))
    return torch.equal(*flat)


def _as_marks(pieces: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
    parts = [piece.unsqueeze(-1).view(torch.uint8) for piece in pieces]
    wide = torch.cat(parts, dim=-1)[..., :MARK_BYTES].contiguous()
    return wide.view(torch.int64).view(tuple(shape))


def _compare(layout: Layout, rank: int, received: Tensor) -> Misplaced | None:
    expected = _expected_marks(layout, rank, received.device)
    wrong = (received != expected).nonzero()
    if len(wrong) == 0:
        return None
    b, s, h, d = (int(number) for number in wrong[0])
    belongs, there = int(expected[b, s, h, d]), int(received[b, s, h, d])
    sender, index = (there >> RANK_SHIFT) - 1, there & INDEX_MASK
    is_mark = 0 <= sender < layout.world_size and index < _size(layout.source_shape(sender))
    return Misplaced(
        (b, s, h, d),
        ((belongs >> RANK_SHIFT) - 1, belongs & INDEX_MASK),
        (sender, index) if is_mark else None,
        len(wrong),
    )


def _expected_marks(layout: Layout, rank: int, device: torch.device) -> Tensor:
    """The equation, written with index arithmetic and no copy of a source."""
    out = torch.empty(layout.window_shape(rank), dtype=torch.int64, device=device)
    scatter = layout.direction == "scatter"
    batch, _, _, depth = out.shape
    for sender in range(layout.world_size):
        _, rows, heads, _ = layout.source_shape(sender)
        first_row = 0 if scatter else layout.seq_offset(rank)
        first_head = layout.head_offset(rank) if scatter else 0
        num_rows = rows if scatter else layout.seq_splits[rank]
        num_heads = layout.head_splits[rank] if scatter else heads
        b = torch.arange(batch, device=device).view(-1, 1, 1, 1)
        s = torch.arange(first_row, first_row + num_rows, device=device).view(1, -1, 1, 1)
        h = torch.arange(first_head, first_head + num_heads, device=device).view(1, 1, -1, 1)
        d = torch.arange(depth, device=device)
        marks = (((b * rows + s) * heads + h) * depth + d) | ((sender + 1) << RANK_SHIFT)
        if scatter:
            out.narrow(1, layout.seq_offset(sender), rows).copy_(marks)
        else:
            out.narrow(2, layout.head_offset(sender), heads).copy_(marks)
    return out


def _size(shape: Sequence[int]) -> int:
    return shape[0] * shape[1] * shape[2] * shape[3]


def _from_json(record: list[object] | None) -> Misplaced | None:
    if record is None:
        return None
    place, expected, found, count = record
    return Misplaced(
        tuple(place),  # type: ignore[arg-type]
        tuple(expected),  # type: ignore[arg-type]
        None if found is None else tuple(found),  # type: ignore[arg-type]
        int(count),  # type: ignore[call-overload]
    )
