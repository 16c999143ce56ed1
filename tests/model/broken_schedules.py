"""Ways to break the handshake: each takes one thing away and must fail in the way that is named."""

from __future__ import annotations

from handshake_model import Scenario, Script, Wrong
from host_calls import Host, Protocol
from schedules import (
    ELIDED,
    EPOCHS,
    ONE_QUEUE,
    caller_changes,
    caller_changes_own_in_place,
    completed_elsewhere,
    deferred,
    eager_and_graph,
    exchange,
    one_channel,
    parts_from_two_streams,
    peers_first,
    rising_epochs,
    two_channels,
    two_graphs,
    zeroed,
)
from state_space import DEADLOCK
from stream_steps import LOST_SIGNAL, OVERWRITE_WHILE_READING, STALE_READ, TORN_READ

EPOCHS_WITHOUT_OPEN = Protocol(opens=False, resets="never")
LEFT_FULL = ("full.c@0[1]",)
LEFT_EMPTY = ("empty.c@0[1]",)


def open_before_read(host: Host) -> None:
    """Opens the next round as soon as this one is complete."""
    host.produce("x")
    host.send("x", channel="c", opens=False)
    host.complete("c")
    host.handshake("empty", "c")
    host.read("x")
    host.end_round()


def first_open(host: Host) -> None:
    """What such a schedule needs before its first round."""
    host.handshake("empty", "c")


def channel_orders_differ(host: Host) -> None:
    """Odd ranks take the channels the other way round."""
    for name in "ba" if host.rank % 2 else "ab":
        exchange(host, name, name)
    host.end_round()


def window_orders_differ(host: Host) -> None:
    """Two windows share a channel; the open's tag is that of the window sent first, as built."""
    windows = [("v", 1), ("k", 2)]
    for window, tag in windows[::-1] if host.rank % 2 else windows:
        host.produce(window)
        host.send(window, channel="qkv", tag=tag)
    host.complete("qkv")
    host.read("v", "k")
    host.end_round()


def chains_of_differing_order(host: Host) -> None:
    """Two chains with a channel each; nothing orders them, so ranks queue them differently."""
    for name in "ba" if host.rank % 2 else "ab":
        with host.on(f"launch {name}"), host.replay(name, joined=False):
            exchange(host, name, name)
    host.end_round()


def mispaired(*tags: int) -> Script:
    """Ranks replay two graphs of one channel in different order."""

    def script(host: Host) -> None:
        graphs = list(zip(("g1", "g2"), "xy", tags, strict=True))
        for graph, window, tag in graphs[::-1] if host.rank else graphs:
            with host.replay(graph):
                exchange(host, window, "c", tag=tag)
        host.end_round()

    return script


def eager_then_elided(host: Host) -> None:
    """An eager call, then a V-first graph that trusts its windows to have been read."""
    exchange(host, "qkv", "qkv", opens=True)
    host.end_round()
    with host.replay("graph"):
        two_channels(host)


def replay_on_one_rank(host: Host) -> None:
    """Everyone replays once, rank 0 once more."""
    for _ in range(2 if host.rank == 0 else 1):
        with host.replay("graph"):
            one_channel(host)


def third_window_read_late(host: Host) -> None:
    """Reads what K held, after V's send has opened the channel that they share."""
    host.produce("v")
    host.send("v", channel="qkv")
    host.read("k", age=1)
    host.produce("k")
    host.send("k", channel="qkv")
    host.complete("qkv")
    host.read("v", "k")
    host.end_round()


WRONG = (
    Wrong(
        Scenario("no open", 2, one_channel, ELIDED),
        OVERWRITE_WHILE_READING,
        "a fast rank sends its next round into a window that is still read",
    ),
    Wrong(
        Scenario("no open, seen from the words", 2, one_channel, ELIDED),
        LOST_SIGNAL,
        "the fast rank's second `full` falls on its first, which nobody has waited for",
    ),
    Wrong(
        Scenario("open before the reader is done", 2, open_before_read, prologue=first_open),
        OVERWRITE_WHILE_READING,
        "the signal says that the window is free, and it is not",
    ),
    Wrong(
        Scenario(
            "caller stream changes, open follows the new one only",
            2,
            caller_changes,
            Protocol(reader_ordered=False),
            prologue=caller_changes,
        ),
        OVERWRITE_WHILE_READING,
        "the stream of the round before still reads",
    ),
    Wrong(
        Scenario(
            "caller stream changes, own part in place, copies alone follow the reader",
            2,
            caller_changes_own_in_place,
            Protocol(caller_follows=False),
            prologue=caller_changes_own_in_place,
        ),
        OVERWRITE_WHILE_READING,
        "the own part is written over one that the other stream still reads",
    ),
    Wrong(
        Scenario("epoch baked into a graph", 2, one_channel, EPOCHS),
        TORN_READ,
        "from the second replay on every wait passes at once",
    ),
    Wrong(
        Scenario("equality wait on rising epochs, no open", 2, rising_epochs, EPOCHS_WITHOUT_OPEN),
        DEADLOCK,
        "a peer one round ahead has written over the epoch that is waited for",
    ),
    Wrong(
        Scenario("reset before wait", 2, one_channel, Protocol(resets="before")),
        DEADLOCK,
        "the reset wipes a signal that came early",
    ),
    Wrong(
        Scenario("pairs reset behind one wait", 3, one_channel, Protocol(resets="in pairs")),
        DEADLOCK,
        "the reset of two words wipes the signal of the peer that was not waited for",
    ),
    Wrong(
        Scenario("resets land late", 2, one_channel, Protocol(late=frozenset({"resets"}))),
        LOST_SIGNAL,
        "the peer's next signal meets a word whose reset is still under way, and goes with it",
    ),
    Wrong(
        Scenario(
            "payload lands after its signal", 2, one_channel, Protocol(late=frozenset({"payload"}))
        ),
        TORN_READ,
        "`full` says that the part has arrived, and it has not",
    ),
    Wrong(
        Scenario("own share joined by nobody", 2, one_channel, Protocol(own_joined=False)),
        STALE_READ,
        "the peers' parts are there, the own one may not be",
    ),
    Wrong(
        Scenario(
            "a graph completes on another stream, own share behind any caller",
            2,
            completed_elsewhere,
            Protocol(own_follows="any"),
        ),
        STALE_READ,
        "an own share was joined elsewhere, and what took its place says nothing about it",
    ),
    Wrong(
        Scenario(
            "a graph sends parts from two streams, own share behind its caller alone",
            2,
            parts_from_two_streams,
            Protocol(own_keeps_reader=False),
        ),
        OVERWRITE_WHILE_READING,
        "its stream had been told of the reader, by the part that opened the round",
    ),
    Wrong(
        Scenario("channel orders differ", 2, channel_orders_differ),
        DEADLOCK,
        "each rank opens a channel that the other comes to only afterwards",
    ),
    Wrong(
        Scenario("orders within a channel differ", 2, window_orders_differ),
        DEADLOCK,
        "the open's tag is that of the window sent first, so a mispaired round stops there",
    ),
    Wrong(
        Scenario("two graphs not serialised", 2, two_graphs("launch 1", "launch 2", joined=False)),
        LOST_SIGNAL,
        "both branches write the same words at once",
    ),
    Wrong(
        Scenario("eager chain and replays not joined", 2, eager_and_graph("launch", joined=False)),
        LOST_SIGNAL,
        "the live copy stream and the graph's branch write the same words at once",
    ),
    Wrong(
        Scenario("two chains, one hardware queue", 2, chains_of_differing_order, ONE_QUEUE),
        DEADLOCK,
        "even with channels of their own: the ranks queue them in different order",
    ),
    Wrong(
        Scenario("peers first, opens elided", 2, peers_first("qkv"), ELIDED),
        OVERWRITE_WHILE_READING,
        "the output is signalled while the own rows still read K and V",
    ),
    Wrong(
        Scenario(
            "eager call, then a graph that elides its first open", 2, eager_then_elided, ELIDED
        ),
        OVERWRITE_WHILE_READING,
        "no other channel was closed since the eager call's read",
    ),
    Wrong(
        Scenario("replay on one rank only", 2, replay_on_one_rank, forever=False),
        DEADLOCK,
        "nobody answers; the time limit must name the peer",
    ),
    Wrong(
        Scenario("mispaired replays", 2, mispaired(1, 2)),
        DEADLOCK,
        "the tags differ, so both ranks stop before they send a byte",
    ),
    Wrong(
        Scenario("mispaired replays, words without tags", 2, mispaired(1, 1)),
        STALE_READ,
        "the signal of another graph is taken for the awaited one",
    ),
    Wrong(
        Scenario("words re-used, `full` left over", 2, one_channel, leftover=LEFT_FULL),
        STALE_READ,
        "a dead communicator's signal is taken for the first one",
    ),
    Wrong(
        Scenario("words re-used, `empty` left over", 2, one_channel, leftover=LEFT_EMPTY),
        LOST_SIGNAL,
        "the first `open` meets a word that is not 0",
    ),
    Wrong(
        Scenario("words zeroed without a barrier", 2, one_channel, prologue=zeroed(barrier=False)),
        DEADLOCK,
        "a late rank wipes the first signal of an early one",
    ),
    Wrong(
        Scenario(
            "third window read after the open", 2, third_window_read_late, prologue=deferred("vk")
        ),
        OVERWRITE_WHILE_READING,
        "one open frees all windows of the channel, not only the one that is sent first",
    ),
)
