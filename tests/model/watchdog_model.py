"""A late or dead peer, and the watchdogs that end the waits for it, as an explicit-state model.

Each rank has one stream that does the rounds of one channel, and a watchdog. Released waits run on,
so a released rank reads what has not arrived, computes from it, and sends that on. What must hold:
no rank hands out such a result as a good one, and every stream comes to its end.

A part of a window, and a result, is GOOD of this round, or SPOILED: stale, torn, NaN, or made of
such. A watchdog may act at any moment: the limit may be over at any of them, for a peer that is
late as for one that is dead. One that only obeys acts when it is told.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from state_space import Assembly, Cell, Model, Step
from stream_steps import Signal

HANDED_OUT = "spoiled result handed out"
SPOILED, GOOD = 0, 1


@dataclass(frozen=True)
class Watchdogs:
    """What they do, in which order; the defaults are what is built."""

    act_first: tuple[int, ...] = (0,)
    """Ranks whose watchdog may act by itself; the others are told."""
    tell: str = "before"
    """When peers are told: "before" the waits are released, "after" it, or "never"."""
    looks: bool = True
    """A rank looks at what it was told before it hands out a result."""
    dies: int | None = None
    """A rank that may die at any moment."""


@dataclass(frozen=True)
class _Step:
    label: str
    quiet: ClassVar[bool] = False

    def ready(self, state: bytes | bytearray) -> bool:
        return True


@dataclass(frozen=True)
class ReleasableWait(_Step):
    """Waits for a word, or until the watchdog of this rank writes into all that it waits for."""

    word: Cell
    tag: int
    released: Cell

    def ready(self, state: bytes | bytearray) -> bool:
        return state[self.word.at] == self.tag or state[self.released.at] > 0

    def apply(self, state: bytearray) -> str | None:
        return None


@dataclass(frozen=True)
class Reset(_Step):
    word: Cell

    def apply(self, state: bytearray) -> str | None:
        state[self.word.at] = 0
        return None


@dataclass(frozen=True)
class Copy(_Step):
    """Sends what was computed; while it is under way, and from a spoiled source, it is no good."""

    source: Cell
    part: Cell
    ends: bool

    def apply(self, state: bytearray) -> str | None:
        state[self.part.at] = state[self.source.at] if self.ends else SPOILED
        return None


@dataclass(frozen=True)
class Read(_Step):
    """Computes from all parts of a window, which are of no use for the next round."""

    parts: tuple[Cell, ...]
    result: Cell

    def apply(self, state: bytearray) -> str | None:
        state[self.result.at] = min(state[part.at] for part in self.parts)
        for part in self.parts:
            state[part.at] = SPOILED
        return None


@dataclass(frozen=True)
class HandOut(_Step):
    """Gives a result to its caller, unless this rank knows that somebody gave up."""

    result: Cell
    told: Cell
    looks: bool

    def apply(self, state: bytearray) -> str | None:
        refuses = self.looks and state[self.told.at] > 0
        return HANDED_OUT if state[self.result.at] == SPOILED and not refuses else None


@dataclass(frozen=True)
class Act(_Step):
    """A watchdog sets a word: it marks its group, tells a peer, or releases the waits."""

    sets: Cell
    needs: Cell | None = None

    def ready(self, state: bytes | bytearray) -> bool:
        return self.needs is None or state[self.needs.at] > 0

    def apply(self, state: bytearray) -> str | None:
        state[self.sets.at] = 1
        return None


@dataclass(frozen=True)
class Mortal(_Step):
    """A step of a rank that may have died: then it never happens, and nobody waits for it."""

    step: Step
    dead: Cell

    def ready(self, state: bytes | bytearray) -> bool:
        return state[self.dead.at] > 0 or self.step.ready(state)

    def apply(self, state: bytearray) -> str | None:
        return None if state[self.dead.at] else self.step.apply(state)


def rounds_with_watchdogs(world_size: int, num_rounds: int, how: Watchdogs) -> Model:
    """Rounds of one channel with watchdogs; no stream loops."""
    assembly = Assembly(forever=False)
    cell = assembly.cell
    for rank in range(world_size):
        cell(f"source@{rank}", GOOD)
        steps = list(_rounds(assembly, rank, world_size, num_rounds, how.looks))
        if rank == how.dies:
            dead = cell(f"dead@{rank}")
            steps = [Mortal(step.label, step, dead) for step in steps]
            assembly.put(f"fate of {rank}", Act(f"rank {rank} dies", dead))
        for step in steps:
            assembly.put(f"rank {rank}", step)
        # A dead rank has no watchdog; one whose rank is late has.
        if rank != how.dies and how.act_first:
            for step in _watchdog(assembly, rank, world_size, how):
                assembly.put(f"watchdog {rank}", step)
    return assembly.model()


def _rounds(
    assembly: Assembly, rank: int, world_size: int, num_rounds: int, looks: bool
) -> Iterator[Step]:
    cell = assembly.cell
    peers = [(rank + hop) % world_size for hop in range(1, world_size)]
    source, released = cell(f"source@{rank}"), cell(f"released@{rank}")
    for _ in range(num_rounds):
        yield from _handshake(assembly, "empty", rank, peers, released)
        for peer in peers:
            part = cell(f"part@{peer}[{rank}]")
            yield Copy(f"begin to write {part.name}", source, part, False)
            yield Copy(f"end of writing {part.name}", source, part, True)
        yield from _handshake(assembly, "full", rank, peers, released)
        parts = tuple(cell(f"part@{rank}[{peer}]") for peer in peers)
        yield Read(f"read at {rank}", parts, source)  # the next round is computed from this one
        yield HandOut(f"hand out at {rank}", source, cell(f"told@{rank}"), looks)


def _handshake(
    assembly: Assembly, half: str, rank: int, peers: list[int], released: Cell
) -> Iterator[Step]:
    cell = assembly.cell
    for peer in peers:
        yield Signal(cell(f"{half}@{peer}[{rank}]"), 1, rising=True)  # after a release, anything
    for peer in peers:
        word = cell(f"{half}@{rank}[{peer}]")
        yield ReleasableWait(f"wait {word.name}", word, 1, released)
    for peer in peers:
        word = cell(f"{half}@{rank}[{peer}]")
        yield Reset(f"reset {word.name}", word)


def _watchdog(assembly: Assembly, rank: int, world_size: int, how: Watchdogs) -> list[Step]:
    cell = assembly.cell
    told = cell(f"told@{rank}")
    needs = None if rank in how.act_first else told
    mark = [Act(f"watchdog {rank} marks its group", told, needs)]
    tell = [
        Act(f"watchdog {rank} tells {peer}", cell(f"told@{peer}"))
        for peer in range(world_size)
        if peer != rank
    ]
    release = [Act(f"watchdog {rank} releases", cell(f"released@{rank}"))]
    orders = {"before": mark + tell + release, "after": mark + release + tell}
    return list(orders.get(how.tell, mark + release))
