"""What a stream does to words, windows, sources and events: the steps that models are made of.

A window holds one byte for each sender's part: the generation that the part is of, or
`BEING_WRITTEN`, or `NEVER`. Generations count rounds modulo `GENERATIONS`; ranks are at most one
round apart where the handshake holds, so eight tell fresh from stale in both directions. They are
kept relative to a reference stream: when that one starts its loop again, all go down by its rounds,
which makes states of different rounds equal and the state space small.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from state_space import Cell

LOST_SIGNAL = "lost signal"
OVERWRITE_WHILE_READING = "overwrite while reading"
STALE_READ = "stale read"
TORN_READ = "torn read"
SOURCE_CHANGED = "source changed while being sent"

GENERATIONS = 8
BEING_WRITTEN = 254
NEVER = 253


@dataclass(frozen=True)
class _Always:
    """A step that never waits."""

    quiet: ClassVar[bool] = False

    def ready(self, state: bytes | bytearray) -> bool:
        return True


@dataclass(frozen=True)
class Record(_Always):
    """Records an event; each record is answered by one `Await`."""

    event: Cell
    quiet: ClassVar[bool] = True

    @property
    def label(self) -> str:
        return f"record {self.event.name}"

    def apply(self, state: bytearray) -> str | None:
        state[self.event.at] += 1
        return None


@dataclass(frozen=True)
class Await:
    """Waits for an event; only one stream waits for each."""

    event: Cell
    quiet: ClassVar[bool] = True

    @property
    def label(self) -> str:
        return f"wait for {self.event.name}"

    def ready(self, state: bytes | bytearray) -> bool:
        return state[self.event.at] > 0

    def apply(self, state: bytearray) -> str | None:
        state[self.event.at] -= 1
        return None


@dataclass(frozen=True)
class Signal(_Always):
    """Writes a tag into a word; `rising` words may be written over, self-resetting ones may not."""

    word: Cell
    tag: int
    rising: bool = False

    @property
    def label(self) -> str:
        return f"write {self.word.name} = {self.tag}"

    def apply(self, state: bytearray) -> str | None:
        lost = state[self.word.at] != 0 and not self.rising
        state[self.word.at] = self.tag
        return LOST_SIGNAL if lost else None


@dataclass(frozen=True)
class Wait:
    """Waits until a word equals a tag."""

    word: Cell
    tag: int
    quiet: ClassVar[bool] = False

    @property
    def label(self) -> str:
        return f"wait {self.word.name} == {self.tag}"

    def ready(self, state: bytes | bytearray) -> bool:
        return state[self.word.at] == self.tag

    def apply(self, state: bytearray) -> str | None:
        return None


@dataclass(frozen=True)
class Reset(_Always):
    """Writes 0 into a word."""

    word: Cell

    @property
    def label(self) -> str:
        return f"write {self.word.name} = 0"

    def apply(self, state: bytearray) -> str | None:
        state[self.word.at] = 0
        return None


@dataclass(frozen=True)
class Round:
    """A round as one stream counts it: rounds of loops gone by, and the place in this loop."""

    counter: Cell
    place: int

    def of(self, state: bytearray) -> int:
        """Its generation."""
        return (state[self.counter.at] + self.place) % GENERATIONS


@dataclass(frozen=True)
class Produce(_Always):
    """Computes a source afresh; wrong while a copy still reads it."""

    source: Cell
    readers: Cell
    round: Round

    @property
    def label(self) -> str:
        return f"produce {self.source.name}"

    def apply(self, state: bytearray) -> str | None:
        state[self.source.at] = self.round.of(state)
        return SOURCE_CHANGED if state[self.readers.at] else None


@dataclass(frozen=True)
class CopyBegin(_Always):
    """Starts to write one part of a window; wrong while that window is read."""

    readers: Cell
    part: Cell
    reading: Cell

    @property
    def label(self) -> str:
        return f"begin to write {self.part.name}"

    def apply(self, state: bytearray) -> str | None:
        state[self.readers.at] += 1
        state[self.part.at] = BEING_WRITTEN
        return OVERWRITE_WHILE_READING if state[self.reading.at] else None


@dataclass(frozen=True)
class CopyEnd(_Always):
    """The part now holds what the source holds."""

    source: Cell
    readers: Cell
    part: Cell

    @property
    def label(self) -> str:
        return f"end of writing {self.part.name}"

    def apply(self, state: bytearray) -> str | None:
        state[self.readers.at] -= 1
        state[self.part.at] = state[self.source.at]
        return None


@dataclass(frozen=True)
class Store(_Always):
    """A producer writes its own part of its own window in place."""

    part: Cell
    reading: Cell
    round: Round

    @property
    def label(self) -> str:
        return f"compute straight into {self.part.name}"

    def apply(self, state: bytearray) -> str | None:
        state[self.part.at] = self.round.of(state)
        return OVERWRITE_WHILE_READING if state[self.reading.at] else None


@dataclass(frozen=True)
class ReadBegin(_Always):
    """Starts to read windows; every part must be whole and of the round."""

    parts: tuple[Cell, ...]
    reading: tuple[Cell, ...]
    round: Round

    @property
    def label(self) -> str:
        return f"begin to read {', '.join(cell.name for cell in self.reading)}"

    def apply(self, state: bytearray) -> str | None:
        for cell in self.reading:
            state[cell.at] += 1
        held = {state[part.at] for part in self.parts}
        if BEING_WRITTEN in held:
            return TORN_READ
        return None if held == {self.round.of(state)} else STALE_READ


@dataclass(frozen=True)
class ReadEnd(_Always):
    """Has read the windows."""

    reading: tuple[Cell, ...]

    @property
    def label(self) -> str:
        return f"end of reading {', '.join(cell.name for cell in self.reading)}"

    def apply(self, state: bytearray) -> str | None:
        for cell in self.reading:
            state[cell.at] -= 1
        return None


@dataclass(frozen=True)
class EndOfLoop(_Always):
    """Counts the rounds of a loop; the reference takes everybody else down by as many instead."""

    counter: Cell
    rounds: int
    generations: list[int] | None
    quiet: ClassVar[bool] = True

    @property
    def label(self) -> str:
        return f"end of loop of {self.counter.name}"

    def apply(self, state: bytearray) -> str | None:
        if self.generations is None:
            state[self.counter.at] = (state[self.counter.at] + self.rounds) % GENERATIONS
            return None
        for at in self.generations:
            if at != self.counter.at and state[at] < GENERATIONS:
                state[at] = (state[at] - self.rounds) % GENERATIONS
        return None
