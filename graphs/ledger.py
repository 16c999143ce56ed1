"""Which graphs are kept: pure bookkeeping that every rank does alike."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Ledger(Generic[K, V]):
    """Entries by key, least recently used first, each with a number and a size.

    Ranks may key the same entry differently, so they compare the numbers.
    """

    def __init__(self, max_entries: int, max_bytes: int | None) -> None:
        """Start empty.

        Args:
            max_entries: Entries to hold, at least 1.
            max_bytes: Sum of their sizes; no bound when ``None``.
        """
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._entries: OrderedDict[K, tuple[int, int, V]] = OrderedDict()
        self._next = 0

    def __len__(self) -> int:
        """Number of entries."""
        return len(self._entries)

    def __iter__(self) -> Iterator[V]:
        """The entries, least recently used first."""
        return (value for _, _, value in list(self._entries.values()))

    @property
    def num_bytes(self) -> int:
        """Sum of the sizes."""
        return sum(size for _, size, _ in self._entries.values())

    def numbers(self) -> list[int]:
        """Numbers of the entries, least recently used first."""
        return [number for number, _, _ in self._entries.values()]

    def use(self, key: K) -> V | None:
        """The entry of this key, now the most recently used."""
        found = self._entries.get(key)
        if found is None:
            return None
        self._entries.move_to_end(key)
        return found[2]

    def add(self, key: K, value: V, num_bytes: int) -> None:
        """Take up an entry as the most recently used."""
        self._entries[key] = (self._next, num_bytes, value)
        self._next += 1

    def fits(self, num_bytes: int) -> bool:
        """Whether an entry of this size may be kept at all."""
        return self._max_bytes is None or num_bytes <= self._max_bytes

    def make_room(self, num_bytes: int = 0) -> list[V]:
        """Drop the least recently used entries until one of this size fits; return them."""
        dropped = []
        while self._entries and not self._has_room(num_bytes):
            _, (_, _, value) = self._entries.popitem(last=False)
            dropped.append(value)
        return dropped

    def _has_room(self, num_bytes: int) -> bool:
        if len(self._entries) >= self._max_entries:
            return False
        return self._max_bytes is None or self.num_bytes + num_bytes <= self._max_bytes

    def clear(self) -> list[V]:
        """Drop all entries and return them."""
        dropped = list(self)
        self._entries.clear()
        return dropped
