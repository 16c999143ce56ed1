"""The handshake as built, as a host would issue it, and the knobs that break it.

A script is what one rank's host does in a round, call by call. `Host` turns the calls into steps on
that rank's streams:

    caller   produces sources, reads windows; forks into the others and joins them by events
    copy     FIFO: open, copies to the peers in rotated order, close
    own      the rank's own share, joined by the caller alone
    wires    only for what `Protocol.late` names: lands after the stream that issued it has gone on

The host is never blocked, so it does not appear: each stream loops over the steps of all rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from state_space import Assembly, Cell, Model, Step
from stream_steps import (
    NEVER,
    Await,
    CopyBegin,
    CopyEnd,
    NextRound,
    Produce,
    ReadBegin,
    ReadEnd,
    Record,
    Reset,
    Signal,
    Store,
    Wait,
)


@dataclass(frozen=True)
class Protocol:
    """How words, streams and queues are used; the defaults are what is built."""

    opens: bool = True
    """The first send of a round opens its channel."""
    resets: str = "after"
    """When a word becomes 0 again: "after" its wait, "before" it, or "never" (words are epochs)."""
    own_joined: bool = True
    """The caller waits for its own share when it completes."""
    one_queue: bool = False
    """All streams of a rank share one hardware queue: one FIFO in the order of issue."""
    late: frozenset[str] = frozenset()
    """What lands late and on its own: "signals", "resets", "payload"."""


BUILT = Protocol()


class Host:
    """The calls of one rank; `rank` is public because broken scripts differ between ranks."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        protocol: Protocol,
        assembly: Assembly,
        generations: list[int],
    ) -> None:
        self.rank = rank
        self._world_size = world_size
        self._protocol = protocol
        self._assembly = assembly
        self._generations = generations
        self._peers = [(rank + hop) % world_size for hop in range(1, world_size)]
        self._open: set[str] = set()
        self._lanes = {"caller": "caller", "copy": "copy", "own": "own"}
        self._chain = ""

    # Calls of a script

    def produce(self, *windows: str) -> None:
        """Compute the sources of these windows."""
        for window in windows:
            source, readers = self._source(window)
            self._put("caller", Produce(source, readers, self._generation()))

    def send(
        self, *windows: str, channel: str, tag: int = 1, own: bool = True, opens: bool | None = None
    ) -> None:
        """`*_into`, one call a window; the first of a round opens the channel if `opens`."""
        for window in windows:
            self._fork("copy", window)
            if channel not in self._open:
                self._open.add(channel)
                if self._protocol.opens if opens is None else opens:
                    self.handshake("empty", channel, tag)
            for peer in self._peers:
                self._copy("copy", window, peer)
            if own:
                self._fork("own", window)
                self._copy("own", window, self.rank)
                if self._protocol.own_joined:
                    self._put("own", Record(self._event(f"own share of {window}")))

    def store_own(self, *windows: str) -> None:
        """Compute the own parts last, straight into the own windows."""
        for window in windows:
            part, reading = (
                self._part(window, self.rank, self.rank),
                self._reading(window, self.rank),
            )
            self._put("caller", Store(part, reading, self._generation()))

    def complete(
        self,
        *windows: str,
        channel: str,
        tag: int = 1,
        own: bool = True,
        signal_after: bool = False,
    ) -> None:
        """Close the channel (or several, "a+b") and join both streams.

        With `signal_after` the signals wait for what the caller was given before.
        """
        self._open -= set(channel.split("+"))
        if signal_after:
            self._fork("copy", f"close of {channel}")
        self.handshake("full", channel, tag)
        self._join("copy", f"close of {channel}")
        if own and self._protocol.own_joined:
            for window in windows:
                self._put("caller", Await(self._event(f"own share of {window}")))

    def read(self, *windows: str, age: int = 0, on: str = "caller") -> None:
        """Use the windows; `age` 1 expects what the round before left there.

        `on` another stream, which waits for the caller, but for which nobody waits.
        """
        if on != "caller":
            self._fork(on, f"reading {windows[0]}")
        senders = range(self._world_size)
        parts = [self._part(window, sender, self.rank) for window in windows for sender in senders]
        reading = tuple(self._reading(window, self.rank) for window in windows)
        self._put(on, ReadBegin(tuple(parts), reading, self._generation(), age))
        self._put(on, ReadEnd(reading))

    def end_round(self) -> None:
        """From here on sources are of the next generation."""
        reference = self.rank == 0 and not self._chain
        values = self._generations if reference else None
        self._put("caller", NextRound(self._generation(), values))

    def handshake(self, half: str, channel: str, tag: int = 1) -> None:
        """One half, for one channel or several: signal all peers, then wait for all and reset.

        The open is made of `empty` words, the close of `full` words.
        """
        protocol = self._protocol
        pairs = [(name, peer) for name in channel.split("+") for peer in self._peers]
        for name, peer in pairs:
            word = self._word(half, name, peer, self.rank)
            self._put_late("signals", word, Signal(word, tag, rising=protocol.resets == "never"))
        for name, peer in pairs:
            word = self._word(half, name, self.rank, peer)
            if protocol.resets == "before":
                self._put("copy", Reset(word))
            self._put("copy", Wait(word, tag))
            if protocol.resets == "after":
                self._put_late("resets", word, Reset(word))

    def zero(self, channel: str) -> None:
        """Write 0 into all own words of a channel."""
        for half in ("empty", "full"):
            for peer in self._peers:
                self._put("copy", Reset(self._word(half, channel, self.rank, peer)))

    def barrier(self) -> None:
        """All ranks arrive before one goes on."""
        for peer in self._peers:
            self._put("copy", Record(self._assembly.cell(f"arrival of {self.rank} at {peer}")))
        for peer in self._peers:
            self._put("copy", Await(self._assembly.cell(f"arrival of {peer} at {self.rank}")))

    # Streams

    @contextmanager
    def replay(self, graph: str, *, joined: bool = True) -> Iterator[None]:
        """Calls inside are nodes of a graph with branches of its own, on the launch stream.

        Joined: behind the caller and the live copy stream, and they behind it. Otherwise a chain
        by itself.
        """
        lanes, chain = self._lanes, self._chain
        launch = "launch" if joined else f"{graph} launch"
        if joined:
            for lane in ("caller", "copy"):
                self._order(lane, launch, f"{lane} before {graph}")
        self._lanes = {"caller": launch, "copy": f"{graph} copy", "own": f"{graph} own"}
        self._chain = "" if joined else graph
        yield
        self._lanes, self._chain = lanes, chain
        if joined:
            for lane in ("caller", "copy"):
                self._order(launch, lane, f"{lane} behind {graph}")

    def _order(self, before: str, after: str, what: str) -> None:
        event = self._event(what)
        self._put(before, Record(event))
        self._put(after, Await(event))

    def _fork(self, lane: str, what: str) -> None:
        self._order("caller", lane, f"fork of {lane} for {what}")

    def _join(self, lane: str, what: str) -> None:
        self._order(lane, "caller", f"join of {lane} for {what}")

    def _put(self, lane: str, step: Step) -> None:
        stream = "queue" if self._protocol.one_queue else self._lanes.get(lane, lane)
        self._assembly.put(f"rank {self.rank} {stream}", step)

    def _put_late(self, what: str, target: Cell, *steps: Step) -> None:
        lane = "copy"
        if what in self._protocol.late:
            lane = f"wire to {target.name}"
            self._order("copy", lane, f"{what} posted to {target.name}")
        for step in steps:
            self._put(lane, step)

    def _copy(self, lane: str, window: str, peer: int) -> None:
        source, readers = self._source(window)
        part = self._part(window, self.rank, peer)
        begin = CopyBegin(readers, part, self._reading(window, peer))
        end = CopyEnd(source, readers, part)
        if peer == self.rank:
            self._put(lane, begin)
            self._put(lane, end)
        else:
            self._put_late("payload", part, begin, end)

    # Cells

    def _event(self, what: str) -> Cell:
        branch = self._lanes["copy"]  # events of a graph are its own
        return self._assembly.cell(f"event [{what}] of rank {self.rank} {branch}")

    def _counted(self, name: str, value: int) -> Cell:
        cell = self._assembly.cell(name, value)
        if cell.at not in self._generations:
            self._generations.append(cell.at)
        return cell

    def _generation(self) -> Cell:
        return self._counted(f"rank {self.rank}{self._chain}", 0)

    def _source(self, window: str) -> tuple[Cell, Cell]:
        name = f"source {window}@{self.rank}{self._chain}"
        return self._counted(name, NEVER), self._assembly.cell(f"copies of {name}")

    def _part(self, window: str, sender: int, at: int) -> Cell:
        return self._counted(f"{window}@{at}[{sender}]", NEVER)

    def _reading(self, window: str, at: int) -> Cell:
        return self._assembly.cell(f"{window}@{at}")

    def _word(self, half: str, channel: str, owner: int, writer: int) -> Cell:
        return self._assembly.cell(f"{half}.{channel}@{owner}[{writer}]")


Script = Callable[[Host], None]


@dataclass(frozen=True)
class Scenario:
    """Every rank runs `prologue` once, then `script` for ever (or once)."""

    name: str
    world_size: int
    script: Script
    protocol: Protocol = BUILT
    prologue: Script | None = None
    forever: bool = True
    leftover: tuple[str, ...] = ()
    """Words that hold 1 at the start."""

    def model(self) -> Model:
        """The scenario as cells and streams."""
        assembly = Assembly(self.forever)
        generations: list[int] = []
        for word in self.leftover:
            assembly.cell(word, 1)
        for rank in range(self.world_size):
            host = Host(rank, self.world_size, self.protocol, assembly, generations)
            if self.prologue is not None:
                self.prologue(host)
            assembly.loop(f"rank {rank} ")
            self.script(host)
        return assembly.model()
