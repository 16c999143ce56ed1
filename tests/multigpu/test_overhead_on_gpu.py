"""The measurements of launches and handshakes on GPUs: what they count, and that nothing hangs."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from on_gpu import communicator, settle
from rank_pool import RankPool

from ulysses_ops.graphs import capture_step
from ulysses_ops.tools.cuda_driver import captured_nodes
from ulysses_ops.tools.launch_kinds import EXCHANGE, HANDSHAKE, ROWS_TO_PEER, kinds_with_peers
from ulysses_ops.tools.spin_kernel import SpinHandshake

UNITS = 4


def spin(rank: int, world_size: int) -> tuple[bool, bool, bool, float]:
    """At rest after eager handshakes, and after replays; and not after one that nobody answers."""
    with communicator() as comm:
        handshake = SpinHandshake(comm, limit_ns=300_000_000)
        settle()  # no word is written before all are 0
        handshake.run(10)
        eager = handshake.is_at_rest()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            handshake.run(10)
        for _ in range(20):
            graph.replay()
        replayed = handshake.is_at_rest()
        settle()
        begin = time.monotonic()
        if rank == 0:
            handshake.run(2)
        settle()
        seconds = time.monotonic() - begin
        unanswered = handshake.is_at_rest()
        settle()
        graph.reset()
        return eager, replayed, unanswered, seconds


def test_a_spinning_handshake_is_answered_and_gives_up_when_it_is_not(pair: RankPool) -> None:
    one, two = pair.run(spin, timeout_s=60)
    assert one[:2] == two[:2] == (True, True)
    assert not one[2], "the control: a handshake of one rank alone went unnoticed"
    assert not two[2], "rank 0 has written words that rank 1 has not put back"
    assert one[3] < 5.0


def counted(rank: int, world_size: int) -> dict[str, dict[str, int]]:
    """Nodes of graphs of a few units."""
    found: dict[str, dict[str, int]] = {}
    with communicator() as comm:
        for name, make in kinds_with_peers(comm).items():
            issue = make()

            def step(name: str = name, issue: Callable[[int], None] = issue) -> None:
                issue(UNITS)
                if torch.cuda.is_current_stream_capturing():
                    found[name] = captured_nodes()

            capture_step(comm, step, warmup=1).close()
        settle()
    return found


def test_nodes_of_a_capture_are_counted(pair: RankPool) -> None:
    for found in pair.run(counted, timeout_s=60):
        assert found[ROWS_TO_PEER] == {"copy": UNITS}
        assert found[HANDSHAKE] == {"batch": UNITS}
        assert found[EXCHANGE]["batch"] == 2 * UNITS  # an open and a close
