"""Schedules that are used, or may be: in none of them may anything go wrong."""

from __future__ import annotations

from handshake_model import Scenario, Script
from host_calls import Host, Protocol

ONE_QUEUE = Protocol(one_queue=True)
ELIDED = Protocol(opens=False)
EPOCHS = Protocol(resets="never")
LATE_SIGNALS = Protocol(late=frozenset({"signals"}))


def exchange(
    host: Host, window: str, channel: str, *, tag: int = 1, opens: bool | None = None
) -> None:
    """Send one window, complete it, read it."""
    host.produce(window)
    host.send(window, channel=channel, tag=tag, opens=opens)
    host.complete(channel, tag=tag)
    host.read(window)


def one_channel(host: Host) -> None:
    """The same exchange again and again."""
    exchange(host, "x", "c")
    host.end_round()


def two_channels(host: Host) -> None:
    """A layer, V first: Q, K, V before attention, its output behind."""
    exchange(host, "qkv", "qkv")
    exchange(host, "out", "out")
    host.end_round()


def deferred(windows: str, *, own: bool = True) -> Script:
    """Several copies, one close, all windows on one channel."""

    def script(host: Host) -> None:
        for window in windows:
            host.produce(window)
            host.send(window, channel="qkv", own=own)
        if not own:
            host.store_own(*windows)
        host.complete("qkv", own=own)
        host.read(*windows)
        host.end_round()

    return script


def two_channels_one_completion(host: Host) -> None:
    """Each window has the channel of its own name, as by default; one call completes both."""
    for window in "vk":
        host.produce(window)
        host.send(window, channel=window)
    host.complete("v+k")
    host.read(*"vk")
    host.end_round()


def peers_first(*windows: str, signal_after: bool = False) -> Script:
    """Peers' parts first, own last; the output is signalled while own rows still read Q, K, V."""

    def script(host: Host) -> None:
        for window in windows:
            host.produce(window)
            host.send(window, channel="qkv", own=False)
        host.store_own(*windows)
        host.complete("qkv", own=False)
        host.read(*windows)
        host.produce("out")
        host.send("out", channel="out", own=False)
        host.read(*windows)
        host.store_own("out")
        host.complete("out", own=False, signal_after=signal_after)
        host.read("out")
        host.end_round()

    return script


def two_graphs(*streams: str, joined: bool = True) -> Script:
    """Two graphs of one channel in turn; they move different windows, so their tags differ."""

    def script(host: Host) -> None:
        for stream, graph, window, tag in zip(streams, ("g1", "g2"), "xy", (1, 2), strict=True):
            with host.on(stream), host.replay(graph, joined=joined):
                exchange(host, window, "c", tag=tag)
                host.end_round()

    return script


def eager_and_graph(stream: str, *, joined: bool = True) -> Script:
    """An eager exchange, then a replay on `stream`, on the same channel and window."""

    def script(host: Host) -> None:
        one_channel(host)
        with host.on(stream), host.replay("graph", joined=joined):
            one_channel(host)

    return script


def replayed(script: Script) -> Script:
    """The same as a graph."""

    def graph(host: Host) -> None:
        with host.replay("graph"):
            script(host)

    return graph


def completed_elsewhere(host: Host) -> None:
    """A graph of two streams: one sends A and B and completes A; the other completes B.

    Between the two it sends a window of its own, when no own share but that of B is left to join.
    """
    with host.replay("graph"):
        host.fork("side")
        for window in "ab":
            host.produce(window)
            host.send(window, channel=window)
        host.complete("a")
        host.read("a")
        with host.on("side"):
            host.produce("c")
            host.send("c", channel="c")
            for window in "bc":
                host.complete(window)
                host.read(window)
        host.join("side")
        host.end_round()


def parts_from_two_streams(host: Host) -> None:
    """A graph whose side stream reads X while others send its next parts, the own one last."""
    with host.replay("graph"):
        for stream in ("side", "other"):
            host.fork(stream)
        with host.on("side"):
            host.produce("x")
            host.send("x", channel="c")
            host.complete("c")
        exchange(host, "y", "d")
        with host.on("side"):
            host.read("x")
        host.end_round()
        with host.on("other"):
            host.produce("x")
            host.send("x", channel="c", own=False)
        host.produce("x")
        host.send("x", channel="c", peers=False)
        host.complete("c")
        host.read("x")
        for stream in ("side", "other"):
            host.join(stream)
        host.end_round()


def caller_changes(host: Host) -> None:
    """Rounds are sent and read on two streams in turn, which only the open orders."""
    for stream in ("main", "other"):
        with host.on(stream):
            one_channel(host)


def caller_changes_own_in_place(host: Host) -> None:
    """The same, and each rank writes its own part itself, after its send."""
    for stream in ("main", "other"):
        with host.on(stream):
            host.produce("x")
            host.send("x", channel="c", own=False)
            host.store_own("x")
            host.complete("c", own=False)
            host.read("x")
            host.end_round()


def zeroed(*, barrier: bool) -> Script:
    """Each rank zeroes the words that are left over, and starts."""

    def prologue(host: Host) -> None:
        host.zero("c")
        if barrier:
            host.barrier()

    return prologue


def rising_epochs(host: Host) -> None:
    """Eager rounds with epochs 1, 2, 3, 1, ...: ranks are too near each other to mistake one."""
    for epoch in (1, 2, 3):
        exchange(host, "x", "c", tag=epoch)
        host.end_round()


SAFE = (
    Scenario("one channel", 2, one_channel),
    Scenario("one channel", 3, one_channel),
    Scenario("two channels with opens", 2, two_channels),
    Scenario("two channels with opens", 3, two_channels),
    Scenario("three deferred copies, one close", 2, deferred("vkq")),
    Scenario("two deferred copies, own parts in place", 3, deferred("vk", own=False)),
    Scenario("two channels, one completion", 2, two_channels_one_completion),
    Scenario("peers first with opens", 2, peers_first(*"vkq")),
    Scenario("peers first with opens", 3, peers_first("qkv")),
    Scenario("one hardware queue: two channels", 3, two_channels, ONE_QUEUE),
    Scenario("one hardware queue: two channels in a graph", 3, replayed(two_channels), ONE_QUEUE),
    Scenario("one hardware queue: three deferred copies", 3, deferred("vkq"), ONE_QUEUE),
    Scenario("one hardware queue: peers first", 3, peers_first(*"vkq"), ONE_QUEUE),
    Scenario("one hardware queue: eager calls and replays", 3, eager_and_graph("main"), ONE_QUEUE),
    Scenario("V first, opens elided", 2, two_channels, ELIDED),
    Scenario("V first, opens elided", 3, two_channels, ELIDED),
    Scenario(
        "peers first, opens elided, signal delayed",
        2,
        peers_first("qkv", signal_after=True),
        ELIDED,
    ),
    Scenario("two graphs on one stream", 2, two_graphs("main", "main")),
    Scenario(
        "two graphs on two streams, joined by us",
        2,
        two_graphs("launch 1", "launch 2"),
        prologue=two_graphs("launch 1", "launch 2"),
    ),
    Scenario("two channels in a graph", 2, replayed(two_channels)),
    Scenario("a graph completes on another stream", 2, completed_elsewhere),
    Scenario("a graph sends parts from two streams", 2, parts_from_two_streams),
    Scenario("eager calls and replays on one stream", 3, eager_and_graph("main")),
    Scenario(
        "eager calls and replays on two streams, joined by us",
        2,
        eager_and_graph("launch"),
        prologue=eager_and_graph("launch"),
    ),
    Scenario("caller stream changes", 2, caller_changes, prologue=caller_changes),
    Scenario(
        "caller stream changes, own part in place",
        2,
        caller_changes_own_in_place,
        prologue=caller_changes_own_in_place,
    ),
    Scenario("signals arrive late", 2, two_channels, LATE_SIGNALS),
    Scenario("signals arrive late, own part in place", 3, deferred("x", own=False), LATE_SIGNALS),
    Scenario(
        "words zeroed before a barrier",
        2,
        one_channel,
        prologue=zeroed(barrier=True),
        leftover=("full.c@0[1]",),
    ),
    Scenario("rising epochs with opens, eager only", 2, rising_epochs, EPOCHS),
)
