"""Which row of a growing sequence lies where, in a cache that is sharded between ranks. Pure.

Every rank has ``capacity`` slots. New rows come with the shards that the ranks hold of them, or are
divided so that the ranks fill up evenly. So the rows of a rank are no range of the sequence, and a
slot knows the position of its row, or -1.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from .kinds import is_whole, shown
from .plan import checked_splits, even_splits

Keep = Literal["all", "latest"]


@dataclass(frozen=True)
class Placement:
    """Where new rows go.

    Attributes:
        first: Position of the first of them in the whole sequence.
        splits: New rows of each rank: those of rank 0 come first in the sequence.
        slots: For each rank, the slot of each of its new rows.
    """

    first: int
    splits: tuple[int, ...]
    slots: tuple[tuple[int, ...], ...]


class RowSlots:
    """The slots of all ranks; every rank keeps the same account of them."""

    def __init__(self, capacity: int, world_size: int, keep: Keep = "all") -> None:
        """Begin empty.

        Args:
            capacity: Slots of a rank.
            world_size: Number of ranks.
            keep: ``"all"`` refuses rows that do not fit; ``"latest"`` overwrites a rank's oldest.

        Raises:
            ValueError: there is no slot or no rank, or ``keep`` is unknown.
        """
        if capacity < 1 or world_size < 1 or keep not in ("all", "latest"):
            message = (
                f"RowSlots: capacity={capacity} and world_size={world_size} must be at least 1, "
                f"keep={keep!r} 'all' or 'latest'"
            )
            raise ValueError(message)
        self.capacity, self.world_size, self.keep = capacity, world_size, keep
        self.length = 0
        self._positions = [[-1] * capacity for _ in range(world_size)]

    def positions(self, rank: int) -> tuple[int, ...]:
        """Position of the row in each slot of ``rank``; -1 where there is none."""
        return tuple(self._positions[rank])

    def used(self) -> tuple[int, ...]:
        """Rows that each rank holds."""
        return tuple(sum(row >= 0 for row in slots) for slots in self._positions)

    def divide(self, rows: int) -> tuple[int, ...]:
        """Shares of new rows that leave the ranks as evenly filled as it goes.

        One row at a time, as in decoding, goes to the emptiest rank, of equal ones the lowest.
        Where the latest rows are kept and none is free, it goes to the rank that holds the oldest
        row of all: so rows that are always divided like this leave the latest
        ``world_size * capacity``.

        Raises:
            ValueError: ``rows`` is no whole number from 0.
        """
        if not is_whole(rows) or rows < 0:
            message = f"SequenceCache: rows={shown(rows)} to place must be a whole number from 0"
            raise ValueError(message)
        held = sum(self.used())
        free = self.capacity * self.world_size - held
        replaced = max(0, rows - free) if self.keep == "latest" else 0
        if replaced > held:  # more rows than slots: divided evenly, for place to refuse
            replaced = 0
        shares = list(self._levelled(rows - replaced))
        if replaced:  # not while slots are free: it looks at every one
            numbered = (
                (position, rank)
                for rank, slots in enumerate(self._positions)
                for position in slots
                if position >= 0
            )
            for _, rank in heapq.nsmallest(replaced, numbered):
                shares[rank] += 1
        return tuple(shares)

    def _levelled(self, rows: int) -> tuple[int, ...]:
        """Shares by which the emptiest ranks catch up with the others."""
        used, active = self.used(), list(range(self.world_size))
        while True:
            held = sum(used[rank] for rank in active)
            goal = dict(zip(active, even_splits(rows + held, len(active)), strict=True))
            fuller = [rank for rank in active if used[rank] > goal[rank]]
            if not fuller:
                shares = [0] * self.world_size
                for rank in active:
                    shares[rank] = goal[rank] - used[rank]
                return tuple(shares)
            active = [rank for rank in active if rank not in fuller]

    def place(self, splits: Sequence[int]) -> Placement:
        """Take slots for new rows.

        Args:
            splits: New rows of each rank.

        Raises:
            ValueError: as :meth:`choose`; nothing is taken then.
        """
        placement = self.choose(splits)
        self.take(placement)
        return placement

    def choose(self, splits: Sequence[int]) -> Placement:
        """The slots that new rows would get; nothing is taken.

        Args:
            splits: New rows of each rank.

        Raises:
            ValueError: splits are wrong, more rows than a rank has slots, or too few are free where
                all rows are kept.
        """
        op = "SequenceCache"
        sizes = checked_splits(op, "seq", splits, None, self.world_size)
        chosen = []
        for rank, size in enumerate(sizes):
            slots = self._positions[rank]
            # Free ones come first, at -1, and then the oldest.
            order = sorted(range(self.capacity), key=slots.__getitem__)[:size]
            free = self.capacity - self.used()[rank]
            if size > self.capacity or (self.keep == "all" and size > free):
                message = (
                    f"{op}: rank {rank} has {free} of {self.capacity} slots free and is given "
                    f"{size} rows; make the cache larger, or keep='latest'"
                )
                raise ValueError(message)
            chosen.append(tuple(order))
        return Placement(self.length, sizes, tuple(chosen))

    def take(self, placement: Placement) -> None:
        """Take the slots of a placement that was chosen, before any other change."""
        for rank, taken in enumerate(placement.slots):
            for slot in taken:
                self._positions[rank][slot] = self.length
                self.length += 1

    def truncate(self, length: int) -> None:
        """Forget the rows from position ``length`` on, as after drafts that were refused.

        Raises:
            ValueError: it is not a length up to the present one.
        """
        if not is_whole(length) or not 0 <= length <= self.length:
            message = (
                f"SequenceCache: length={shown(length)} must be from 0 to the {self.length} there "
                f"is, a whole number"
            )
            raise ValueError(message)
        for slots in self._positions:
            slots[:] = [position if position < length else -1 for position in slots]
        self.length = length
