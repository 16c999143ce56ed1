"""Exhaustive breadth-first exploration of streams that share bytes.

A state is one byte string: the cells (words, windows, events) and behind them one position per
stream. In every state each stream may take its next step if that step is ready; all interleavings
are visited, so a failure that is not found does not exist in the model, and the first one found has
the fewest steps. No random choice, no limit on rounds: streams loop, and the search ends when no
new state turns up.

Quiet steps (events) are taken as soon as they are ready, and not counted. That loses nothing: each
event is recorded by one stream and awaited by one, so a quiet step disables nobody, nobody disables
it, and no failure shows in it; it can be moved before all steps of other streams. Only quiet steps
make quiet steps ready.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

DEADLOCK = "deadlock"
MAX_BYTE = 255


class Step(Protocol):
    """One indivisible step of a stream."""

    quiet: ClassVar[bool]

    @property
    def label(self) -> str:
        """What the step does, for a counterexample."""

    def ready(self, state: bytes | bytearray) -> bool:
        """Whether the step can be taken; a stream waits until it can."""

    def apply(self, state: bytearray) -> str | None:
        """Changes the state; returns the kind of failure if the step shows one."""


@dataclass(frozen=True)
class Stream:
    """Steps in order; behind the last one the stream goes on at `loop_to`, or halts at the end."""

    name: str
    steps: tuple[Step, ...]
    loop_to: int

    def after(self, position: int) -> int:
        """The position that follows."""
        following = position + 1
        return self.loop_to if following == len(self.steps) else following


@dataclass(frozen=True)
class Model:
    """Cells at rest and the streams that change them."""

    cells: bytes
    streams: tuple[Stream, ...]

    def __post_init__(self) -> None:
        for stream in self.streams:
            if not 0 < len(stream.steps) < MAX_BYTE:
                raise ValueError(
                    f"stream {stream.name} has {len(stream.steps)} steps, not 1 to 254"
                )


@dataclass(frozen=True)
class Cell:
    """Where a byte lies in the state, and its name."""

    at: int
    name: str


@dataclass
class Assembly:
    """A model while it is put together: cells by name, steps by stream."""

    forever: bool = True
    cells: dict[str, Cell] = field(default_factory=dict)
    values: bytearray = field(default_factory=bytearray)
    steps: dict[str, list[Step]] = field(default_factory=dict)
    loops: dict[str, int] = field(default_factory=dict)

    def cell(self, name: str, value: int = 0) -> Cell:
        """The cell of that name; a new one holds `value`."""
        if name not in self.cells:
            self.cells[name] = Cell(len(self.values), name)
            self.values.append(value)
        return self.cells[name]

    def put(self, stream: str, step: Step) -> None:
        """Appends a step."""
        self.steps.setdefault(stream, []).append(step)

    def loop(self, prefix: str) -> None:
        """Steps that these streams have so far happen once, later ones for ever."""
        for name, steps in self.steps.items():
            if name.startswith(prefix):
                self.loops[name] = len(steps)

    def model(self) -> Model:
        """The finished model; a stream that has nothing to do for ever halts."""
        return Model(
            bytes(self.values),
            tuple(
                Stream(name, tuple(steps), self.loops.get(name, 0) if self.forever else len(steps))
                for name, steps in self.steps.items()
            ),
        )


@dataclass(frozen=True)
class Failure:
    """What went wrong, the fewest steps that lead there, and who is stuck."""

    kind: str
    trace: tuple[str, ...]
    blocked: tuple[str, ...] = ()

    def __str__(self) -> str:
        steps = [f"{number:5d}  {line}" for number, line in enumerate(self.trace, 1)]
        stuck = [f"stuck  {line}" for line in self.blocked]
        return "\n".join([f"{self.kind} after {len(self.trace)} steps", *steps, *stuck])


@dataclass(frozen=True)
class Exploration:
    """Outcome of a search."""

    states: int
    transitions: int
    failure: Failure | None
    unused: tuple[str, ...]
    """Steps that were never taken: a model that is called safe must have none."""


class Search:
    """One search; `settle` set to false takes quiet steps one by one like all others."""

    def __init__(self, model: Model, *, settle: bool = True, max_states: int = 3_000_000) -> None:
        self._streams = model.streams
        self._base = len(model.cells)
        self._settles = settle
        self._max_states = max_states
        self._used: list[set[int]] = [set() for _ in model.streams]
        # One entry more than steps: what a halted stream would do next is nothing.
        self._quiet = [(*(s if s.quiet else None for s in m.steps), None) for m in model.streams]
        self._after = [tuple(map(m.after, range(len(m.steps)))) for m in model.streams]
        start = bytearray(model.cells) + bytearray(len(model.streams))
        self._settle(start)
        self._start = bytes(start)
        self._parents: dict[bytes, tuple[bytes, int] | None] = {self._start: None}
        self._transitions = 0

    def run(self, kinds: frozenset[str] | None = None) -> Exploration:
        """Visits all states, or stops at the first failure of one of `kinds` (None: of any kind).

        A step that shows a failure is not followed further.
        """
        queue = deque([self._start])
        failure: Failure | None = None
        while queue and failure is None:
            state = queue.popleft()
            moved = halted = 0
            for index, stream in enumerate(self._streams):
                position = state[self._base + index]
                if position == len(stream.steps):
                    halted += 1
                    continue
                step = stream.steps[position]
                if not step.ready(state):
                    continue
                moved += 1
                kind, reached = self._take(state, index, step)
                if kind is not None:
                    if kinds is None or kind in kinds:
                        failure = Failure(
                            kind, (*self._trace(state), f"{stream.name}: {step.label}")
                        )
                        break
                elif reached not in self._parents:
                    self._parents[reached] = (state, index)
                    queue.append(reached)
            stuck = not moved and halted < len(self._streams)
            if stuck and (kinds is None or DEADLOCK in kinds):
                failure = Failure(DEADLOCK, self._trace(state), self._blocked(state))
            if len(self._parents) > self._max_states:
                raise MemoryError(f"more than {self._max_states} states; choose smaller bounds")
        return Exploration(len(self._parents), self._transitions, failure, self._unused())

    def _take(self, state: bytes, index: int, step: Step) -> tuple[str | None, bytes]:
        reached = bytearray(state)
        kind = step.apply(reached)
        self._advance(reached, index)
        self._transitions += 1
        if kind is None and self._quiet[index][reached[self._base + index]] is not None:
            self._settle(reached)
        return kind, bytes(reached)

    def _advance(self, state: bytearray, index: int) -> None:
        at = self._base + index
        self._used[index].add(state[at])
        state[at] = self._after[index][state[at]]

    def _settle(self, state: bytearray) -> None:
        again = self._settles
        while again:
            again = False
            for at, quiet in enumerate(self._quiet, self._base):
                step = quiet[state[at]]
                if step is not None and step.ready(state):
                    step.apply(state)
                    self._advance(state, at - self._base)
                    again = True

    def _trace(self, state: bytes) -> tuple[str, ...]:
        lines: list[str] = []
        link = self._parents[state]
        while link is not None:
            state, index = link
            stream = self._streams[index]
            lines.append(f"{stream.name}: {stream.steps[state[self._base + index]].label}")
            link = self._parents[state]
        return tuple(reversed(lines))

    def _blocked(self, state: bytes) -> tuple[str, ...]:
        positions = state[self._base :]
        return tuple(
            f"{stream.name}: {stream.steps[position].label}"
            for stream, position in zip(self._streams, positions, strict=True)
            if position < len(stream.steps)
        )

    def _unused(self) -> tuple[str, ...]:
        return tuple(
            f"{stream.name}: {step.label}"
            for stream, used in zip(self._streams, self._used, strict=True)
            for position, step in enumerate(stream.steps)
            if position not in used
        )


def explore(
    model: Model, *kinds: str, settle: bool = True, max_states: int = 3_000_000
) -> Exploration:
    """Searches for a failure of any of `kinds`; of any kind at all when none is named."""
    return Search(model, settle=settle, max_states=max_states).run(frozenset(kinds) or None)
