"""Rows of what an exchange costs besides its bytes: the handshake, and the host's part."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from ulysses_ops.communicator import UlyssesCommunicator
from ulysses_ops.exchange import Exchange
from ulysses_ops.graphs import capture_step
from ulysses_ops.tools.baselines import PlainGraph
from ulysses_ops.tools.launch import RankContext
from ulysses_ops.tools.peer_copy import PeerCopy
from ulysses_ops.tools.results import Row
from ulysses_ops.tools.shapes import Shape
from ulysses_ops.tools.timing import Effort, Rounds, Variant, measure, summarise
from ulysses_ops.window_spec import WindowSpec
from ulysses_ops.windows import Window, reserve

ROUNDS_IN_GRAPH = 50
PART_ELEMS = 8
HOST_CALLS = 200
HOST_ROUNDS = 10
CALLS_A_WAIT = 4  # few enough to find room in every queue


def handshake_rows(context: RankContext, comm: UlyssesCommunicator, effort: Effort) -> list[Row]:
    """Time rounds of a few bytes in a graph, and the same copies without handshakes. Collective.

    A round is open, one copy to each peer, and close; the own share is left to its producer. Bare
    handshakes follow each other with nothing between them.
    """
    world_size = context.world_size
    shape = Shape("handshake", "handshake", world_size, world_size, PART_ELEMS)
    (window,) = reserve(
        comm, [WindowSpec("bench.handshake", "scatter", shape.dims, torch.bfloat16)]
    )
    part = torch.full(
        (1, 1, 1, PART_ELEMS), 1.0 + context.rank, dtype=torch.bfloat16, device=context.device
    )

    def rounds() -> None:
        for _ in range(ROUNDS_IN_GRAPH):
            with Exchange(comm) as exchange:
                for peer in range(world_size):
                    if peer != context.rank:
                        exchange.send(part, window, peer=peer)

    step = capture_step(comm, rounds)
    context.line_up("before the check")
    window.tensor.zero_()
    context.line_up("check of the handshake")
    step.replay()
    context.line_up("handshake")
    exact = context.agree(_has_parts(window, context))
    num_bytes = shape.bytes_per_peer(world_size, 2)
    variants = {"round": Variant(step.replay, ROUNDS_IN_GRAPH)}
    copies = None
    if window.memory is not None:
        flat = PeerCopy(window, context.rank, num_bytes, part)
        copies = PlainGraph(context, lambda: _repeat(flat.run), "tiny copies")
        variants["copies"] = Variant(copies.run, ROUNDS_IN_GRAPH)
    engine = comm.copy_engine
    bare = None
    if engine is not None:
        bare = capture_step(comm, lambda: engine.run_handshakes(ROUNDS_IN_GRAPH // 2))
        variants["bare"] = Variant(bare.replay, ROUNDS_IN_GRAPH)
    times = measure(context, variants, effort, "handshake")
    step.close()
    if bare is not None:
        bare.close()
    if copies is not None:
        copies.close()
    copy_us = times["copies"].median_us if "copies" in times else 0.0
    round_us = times["round"].median_us
    return [
        Row.of_times(
            "handshake round",
            shape,
            world_size=world_size,
            transport=comm.transport,
            mode="graph",
            times=times["round"],
            exact=exact,
            bytes_per_peer=num_bytes,
            details={
                "round_us": round(round_us, 3),
                "copy_us": round(copy_us, 3),
                "handshake_us": round((round_us - copy_us) / 2, 3),
                "handshake_with_copy_us": round(round_us / 2, 3),
                "bare_handshake_us": round(times["bare"].median_us, 3) if bare else None,
                "signal": comm.signal,
                "mapping": comm.mapping,
            },
        )
    ]


def _repeat(run: Callable[[], None]) -> None:
    for _ in range(ROUNDS_IN_GRAPH):
        run()


def _has_parts(window: Window, context: RankContext) -> bool:
    rows = window.tensor.float().flatten(2)[0]
    return all(
        bool((rows[peer] == 1.0 + peer).all())
        for peer in range(context.world_size)
        if peer != context.rank
    )


def host_cost_rows(context: RankContext, comm: UlyssesCommunicator) -> list[Row]:
    """Time the host's part of eager calls. Collective.

    A few calls behind a synchronisation, so that no queue is full, with a core that did not sleep;
    and ``in_a_row_us`` with no wait between the calls at all: the GPU is about as fast as the host
    at this size, and may hold it up.
    """
    world_size = context.world_size
    shape = Shape("host", "host cost", 64 * world_size, 8 * world_size, 64)
    spec = WindowSpec("bench.host", "scatter", shape.dims, torch.bfloat16)
    (window,) = reserve(comm, [spec])
    source = torch.randn(
        shape.local_source(world_size), dtype=torch.bfloat16, device=context.device
    )
    scatter_into = torch.ops.ulysses.scatter_into
    complete = torch.ops.ulysses.complete
    exchange = Exchange(comm)

    def send_by_op() -> None:
        scatter_into(source, window.tensor, comm.token, world_size, comm.name)

    def complete_by_op() -> None:
        complete([window.tensor], [source], comm.token, world_size, comm.name)

    def send_by_exchange() -> None:
        exchange.send(source, window)

    pairs: dict[str, tuple[Callable[[], None], Callable[[], None]]] = {
        "host cost of scatter_into": (send_by_op, complete_by_op),
        "host cost of Exchange.send": (send_by_exchange, exchange.complete),
    }
    samples = {name: _HostSamples() for name in pairs}
    for turn in range(1 + HOST_ROUNDS):
        for name, (send, finish) in pairs.items():
            context.progress(name)
            times = _time_pairs(send, finish, context.device)
            context.line_up(name)
            in_a_row = _time_pairs(send, finish)
            context.line_up(name)
            if turn > 0:  # the first round warms up
                samples[name].add(times, in_a_row)
    return [
        Row.of_times(
            name,
            shape,
            world_size=world_size,
            transport=comm.transport,
            mode="eager",
            times=summarise(context.gather(found.sends)),
            exact=None,
            bytes_per_peer=0,
            details={
                "complete_us": round(max(context.gather(statistics.median(found.ends))), 3),
                "in_a_row_us": round(max(context.gather(statistics.median(found.in_a_row))), 3),
            },
        )
        for name, found in samples.items()
    ]


@dataclass(frozen=True)
class _HostSamples:
    """Microseconds of sends, by round; of completions; and of sends without a wait between them."""

    sends: Rounds = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    in_a_row: list[float] = field(default_factory=list)

    def add(self, times: list[tuple[float, float]], in_a_row: list[tuple[float, float]]) -> None:
        self.sends.append([send_us for send_us, _ in times])
        self.ends.extend(end_us for _, end_us in times)
        self.in_a_row.extend(send_us for send_us, _ in in_a_row)


def _time_pairs(
    send: Callable[[], None], finish: Callable[[], None], waiting_for: torch.device | None = None
) -> list[tuple[float, float]]:
    """Microseconds of each send and of its completion."""
    times = []
    for call in range(HOST_CALLS):
        if waiting_for is not None and waiting_for.type == "cuda" and call % CALLS_A_WAIT == 0:
            torch.cuda.synchronize(waiting_for)  # what hangs here ends by the communicator's limit
        start = time.perf_counter()
        send()
        sent = time.perf_counter()
        finish()
        times.append(((sent - start) * 1e6, (time.perf_counter() - sent) * 1e6))
    return times
