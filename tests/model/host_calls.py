"""What one rank's host issues, call by call, and the streams that it issues to.

    caller   produces sources, reads windows; forks into the others and joins them by events
    copy     FIFO: open, copies to the peers in rotated order, close
    own      the rank's own share, joined by the caller alone; the live one is issued last, one of a
             graph first, and it follows only the caller that has joined all own shares before
    wires    only for what `Protocol.late` names: lands after the stream that issued it has gone on

The host is never blocked, so it does not appear: each stream loops over the steps of all rounds.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from state_space import Assembly, Cell, Step
from stream_steps import (
    NEVER,
    Await,
    CopyBegin,
    CopyEnd,
    EndOfLoop,
    Produce,
    ReadBegin,
    ReadEnd,
    Record,
    Reset,
    Round,
    Signal,
    Store,
    Wait,
)

LIVE = {"caller": "main", "copy": "copy", "own": "own"}


@dataclass(frozen=True)
class Protocol:
    """How words, streams and queues are used; the defaults are what is built."""

    opens: bool = True
    """The first send of a round opens its channel."""
    resets: str = "after"
    """When a word becomes 0 again: "after" all waits, "before" its own, "never" (words are epochs),
    or "in pairs" of neighbouring ranks, behind the wait for either."""
    own_joined: bool = True
    """The caller waits for its own share when it completes."""
    own_follows: str = "its joiner"
    """In a graph, which caller alone an own share follows: "its joiner", or "any" behind a join."""
    own_keeps_reader: bool = True
    """An own share does not go to its caller's place when its stream waits for a reader."""
    reader_ordered: bool = True
    """An open also waits for the stream that completed the round before, if it is another one."""
    caller_follows: bool = True
    """The caller waits for that stream too: it may write own parts in place."""
    one_queue: bool = False
    """All streams of a rank share one hardware queue: one FIFO in the order of issue."""
    late: frozenset[str] = frozenset()
    """What lands late and on its own: "signals", "resets", "payload"."""


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
        self._readers: dict[str, tuple[str, str]] = {}  # channel -> chain and stream of its reader
        self._lanes = dict(LIVE)
        self._own_joined_by: str | None = None  # the caller that has joined all own shares
        self._num_own = 0  # own-share streams of a graph, to tell them apart
        self._round = 0
        self._counters: dict[str, Cell] = {}

    # Exchanges

    def produce(self, *windows: str) -> None:
        """Compute the sources of these windows."""
        for window in windows:
            self._put("caller", Produce(*self._source(window), self._this_round()))

    def send(
        self,
        window: str,
        *,
        channel: str,
        tag: int = 1,
        own: bool = True,
        peers: bool = True,
        opens: bool | None = None,
    ) -> None:
        """`*_into`; the first of a round opens the channel if `opens`."""
        self._order("caller", "copy", f"send {window}")
        if own:
            self._place_own()
            self._order("caller", "own", f"send {window}")
        first = channel not in self._open
        if first:
            self._open.add(channel)
            self._wait_for_reader(channel)
        in_graph = self._lanes["copy"] != LIVE["copy"]
        if own and in_graph:
            self._copy("own", window, self.rank)
        if first and (self._protocol.opens if opens is None else opens):
            self.handshake("empty", channel, tag)
        for peer in self._peers if peers else ():
            self._copy("copy", window, peer)
        if own and not in_graph:
            self._copy("own", window, self.rank)

    def store_own(self, *windows: str) -> None:
        """Compute the own parts last, straight into the own windows."""
        for window in windows:
            part, reading = (
                self._part(window, self.rank, self.rank),
                self._reading(window, self.rank),
            )
            self._put("caller", Store(part, reading, self._this_round()))

    def complete(
        self, channel: str, *, tag: int = 1, own: bool = True, signal_after: bool = False
    ) -> None:
        """Close the channel (or several, "a+b") and join both streams.

        With `signal_after` the signals wait for what the caller was given before.
        """
        if signal_after:
            self._order("caller", "copy", f"close {channel}")
        self.handshake("full", channel, tag)
        self._order("copy", "caller", f"close {channel}")
        if own and self._protocol.own_joined:
            self._order("own", "caller", f"close {channel}")
            self._own_joined_by = self._lanes["caller"]
        for name in channel.split("+"):
            self._open.discard(name)
            self._readers[name] = (self._lanes["copy"], self._lanes["caller"])

    def read(self, *windows: str, age: int = 0) -> None:
        """Use the windows; `age` 1 expects what the round before left there."""
        senders = range(self._world_size)
        parts = [self._part(window, sender, self.rank) for window in windows for sender in senders]
        reading = tuple(self._reading(window, self.rank) for window in windows)
        self._put("caller", ReadBegin(tuple(parts), reading, self._this_round(-age)))
        self._put("caller", ReadEnd(reading))

    def end_round(self) -> None:
        """From here on sources are of the next generation."""
        self._round += 1

    # Words

    def handshake(self, half: str, channel: str, tag: int = 1) -> None:
        """One half, for one channel or several: signal all peers, wait for all, then reset.

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
            if protocol.resets == "in pairs":
                for writer in {peer, peer ^ 1} & {*self._peers}:
                    self._put("copy", Reset(self._word(half, name, self.rank, writer)))
        if protocol.resets == "after":
            for name, peer in pairs:
                word = self._word(half, name, self.rank, peer)
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
    def on(self, stream: str) -> Iterator[None]:
        """Calls inside come from another caller stream."""
        caller = self._lanes["caller"]
        self._lanes = {**self._lanes, "caller": stream}
        yield
        self._lanes = {**self._lanes, "caller": caller}

    def fork(self, stream: str) -> None:
        """Another stream goes on from here."""
        self._order("caller", stream, "fork")

    def join(self, stream: str) -> None:
        """The caller waits for another stream."""
        self._order(stream, "caller", "join")

    @contextmanager
    def replay(self, graph: str, *, joined: bool = True) -> Iterator[None]:
        """Calls inside are nodes of a graph that is replayed on the caller stream.

        Its copy and own-share branches are its own. Joined: it waits for the live streams and all
        readers, and they for it.
        """
        live = self._lanes
        if joined:
            others = ["copy", "own", *sorted({stream for _, stream in self._readers.values()})]
            for stream in others:
                if stream != live["caller"]:
                    self._order(stream, "caller", f"{stream} before {graph}")
        self._lanes = {**live, "copy": f"{graph} copy", "own": f"{graph} own"}
        self._own_joined_by = None
        yield
        self._lanes = live
        if joined:
            for stream in ("copy", "own"):
                self._order("caller", stream, f"{stream} behind {graph}")
            self._readers = dict.fromkeys(self._readers, ("copy", live["caller"]))

    def end_of_loop(self) -> None:
        """Every caller stream counts the rounds that were issued since the loop began."""
        for stream, counter in self._counters.items():
            reference = self.rank == 0 and stream == next(iter(self._counters))
            generations = self._generations if reference else None
            self._put(stream, EndOfLoop(counter, self._round, generations))
        self._round = 0

    def _place_own(self) -> None:
        if self._lanes["copy"] == LIVE["copy"] or self._own_joined_by is None:
            return
        if self._protocol.own_follows == "any" or self._own_joined_by == self._lanes["caller"]:
            self._num_own += 1
            self._lanes = {**self._lanes, "own": f"{self._lanes['copy']}, own {self._num_own}"}
        self._own_joined_by = None

    def _wait_for_reader(self, channel: str) -> None:
        chain, stream = self._readers.get(channel, ("", ""))
        other = chain == self._lanes["copy"] and stream != self._lanes["caller"]
        if other and self._protocol.reader_ordered:
            followers = ["copy", "own", *(["caller"] if self._protocol.caller_follows else [])]
            if self._protocol.own_keeps_reader:
                self._own_joined_by = None
            for lane in followers:
                self._order(stream, lane, f"{lane} behind reader {stream} of {channel}")

    def _order(self, before: str, after: str, what: str) -> None:
        lanes = ", ".join(self._lanes[lane] for lane in ("caller", "copy", "own"))
        event = self._assembly.cell(f"event [{what}: {before} to {after}] of {self.rank} ({lanes})")
        self._put(before, Record(event))
        self._put(after, Await(event))

    def _put(self, lane: str, step: Step) -> None:
        stream = "queue" if self._protocol.one_queue else self._lanes.get(lane, lane)
        self._assembly.put(f"rank {self.rank} {stream}", step)

    def _put_late(self, what: str, target: Cell, *steps: Step) -> None:
        lane = "copy"
        if what in self._protocol.late:
            lane = f"wire to {target.name}"
            self._order("copy", lane, f"post {what}")
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

    def _counted(self, name: str, value: int) -> Cell:
        cell = self._assembly.cell(name, value)
        if cell.at not in self._generations:
            self._generations.append(cell.at)
        return cell

    def _this_round(self, later: int = 0) -> Round:
        caller = self._lanes["caller"]
        counter = self._counted(f"rounds of rank {self.rank} {caller}", 0)
        self._counters[caller] = counter
        return Round(counter, self._round + later)

    def _source(self, window: str) -> tuple[Cell, Cell]:
        name = f"source {window}@{self.rank} of {self._lanes['caller']}"
        return self._counted(name, NEVER), self._assembly.cell(f"copies of {name}")

    def _part(self, window: str, sender: int, at: int) -> Cell:
        return self._counted(f"{window}@{at}[{sender}]", NEVER)

    def _reading(self, window: str, at: int) -> Cell:
        return self._assembly.cell(f"{window}@{at}")

    def _word(self, half: str, channel: str, owner: int, writer: int) -> Cell:
        return self._assembly.cell(f"{half}.{channel}@{owner}[{writer}]")
