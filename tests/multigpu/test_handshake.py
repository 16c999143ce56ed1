"""The handshake on hardware: stale waits, readers that are not done, order, streams, held SMs.

Every test that could be blind runs again with one half of the handshake taken away, and must then
see wrong data.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from graph_nodes import graph_paths
from on_gpu import (
    NO_OPEN,
    NO_WAIT,
    communicator,
    delay,
    expected,
    fault,
    filled,
    is_seen,
    one_window,
    send,
    settle,
)
from rank_pool import RankPool

from ulysses_ops import Exchange, UlyssesCommunicator, UlyssesError, scatter
from ulysses_ops.graphs import CapturedStep, capture_step
from ulysses_ops.window_spec import WindowSpec
from ulysses_ops.windows import Window, reserve

SHAPE = (1, 64, 8, 64)


def captured_copy(comm: UlyssesCommunicator, window: Window, pause_ms: float = 0.0) -> CapturedStep:
    """Send the static input into the window, wait on the stream, and read the window."""

    def step(x: torch.Tensor) -> torch.Tensor:
        with Exchange(comm) as exchange:
            exchange.send(x, window)
        if pause_ms:
            delay(pause_ms)
        return window.tensor.clone()

    return capture_step(comm, step, [filled(window, comm.rank, 0)])


def replay_with_skew(rank: int, world_size: int, is_faulty: bool) -> int:
    """50 replays with changing data; each time the other rank comes 20 ms late. No host barrier.

    In the graph of rank 1 the second window's part leaves 20 ms behind the first's, with which both
    ranks have opened: a rank that does not wait for it reads what the replay before has left.
    """
    with communicator() as comm:
        window = one_window(comm, SHAPE)
        second = one_window(comm, SHAPE, name="second", channel=window.channel)

        def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = x.clone()
            with Exchange(comm) as exchange:
                exchange.send(x, window)
                if rank == 1:
                    delay(20)
                exchange.send(y, second)
            return window.tensor.clone(), second.tensor.clone()

        with fault(comm, NO_WAIT if is_faulty else 0):
            captured = capture_step(comm, step, [filled(window, rank, 0)])
        settle()
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        for number in range(1, 51):
            if number % 2 != rank:
                delay(20)
            for got in captured.replay(filled(window, rank, number)):
                wrong += (got != expected(window, number)).sum()
        settle()
        return int(wrong)


def test_every_replay_waits_anew(pair: RankPool) -> None:
    assert pair.run(replay_with_skew, False) == [0, 0]


@pytest.mark.two_gpus
def test_control_a_replay_that_does_not_wait_is_seen(pair: RankPool) -> None:
    assert is_seen(pair, replay_with_skew, True)


def slow_reader(rank: int, world_size: int, mode: str, is_faulty: bool) -> int:
    """Rank 0 reads its window 3 ms late; rank 1 sends the next round at once."""
    with communicator() as comm:
        window = one_window(comm, SHAPE)
        settle()
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        pause = 3.0 if rank == 0 else 0.0
        steps: CapturedStep | None = None
        with fault(comm, NO_OPEN if is_faulty else 0):
            if mode == "graph":
                steps = captured_copy(comm, window, pause)
            settle()
            for number in range(100):
                x = filled(window, rank, number)
                if steps is not None:
                    got = steps.replay(x)
                else:
                    with Exchange(comm) as exchange:
                        exchange.send(x, window)
                    if pause:
                        delay(pause)
                    got = window.tensor
                wrong += (got != expected(window, number)).sum()
            settle()
        return int(wrong)


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_no_window_is_overwritten_while_it_is_read(pair: RankPool, mode: str) -> None:
    assert pair.run(slow_reader, mode, False) == [0, 0]


@pytest.mark.two_gpus  # ranks on one GPU take turns, so nothing is overwritten
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_control_without_open_the_overwrite_is_seen(pair: RankPool, mode: str) -> None:
    assert max(pair.run(slow_reader, mode, True)) > 0


def too_many_in_flight(rank: int, world_size: int) -> list[str]:
    """A second send into a window before the first was completed; then all goes on as before."""
    with communicator() as comm:
        window = one_window(comm, SHAPE)
        x = filled(window, rank, 1)
        exchange = Exchange(comm)
        exchange.send(x, window)
        with pytest.raises(UlyssesError) as refused:
            exchange.send(x, window)
        exchange.complete()
        assert torch.equal(window.tensor, expected(window, 1))
        return [str(refused.value)]


def test_more_in_flight_than_windows(pair: RankPool) -> None:
    for (message,) in pair.run(too_many_in_flight):
        assert "window 'test' of channel 'test' already has an exchange in flight" in message


def runs_ahead(rank: int, world_size: int) -> None:
    """Rank 1 issues three generations before rank 0 begins its first."""
    with communicator() as comm:
        window = one_window(comm, SHAPE)
        settle()
        if rank == 0:
            time.sleep(0.5)
        results = []
        for number in range(3):
            with Exchange(comm) as exchange:
                exchange.send(filled(window, rank, number), window)
            results.append(window.tensor.clone())
        for number, got in enumerate(results):
            assert torch.equal(got, expected(window, number))


def test_a_peer_may_run_ahead(pair: RankPool) -> None:
    pair.run(runs_ahead, timeout_s=20)


def two_streams(rank: int, world_size: int) -> None:
    """Rounds alternate between two streams; on rank 1 the first is late every time."""
    with communicator() as comm:
        window = one_window(comm, SHAPE)
        settle()
        streams = [torch.cuda.Stream(), torch.cuda.Stream()]
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        for number in range(200):
            stream = streams[number % 2]
            with torch.cuda.stream(stream):
                if rank == 1 and number % 2 == 0:
                    delay(2)
                x = filled(window, rank, number)
                with Exchange(comm) as exchange:
                    exchange.send(x, window)
                count = (window.tensor != expected(window, number)).sum()
            torch.cuda.current_stream().wait_stream(stream)
            wrong += count
        settle()
        assert int(wrong) == 0


def test_one_group_from_two_streams(pair: RankPool) -> None:
    pair.run(two_streams, timeout_s=30)


def node_order(rank: int, world_size: int) -> list[list[str]]:
    """Every path from a root to a leaf of a captured scatter, as kinds of operation."""
    with communicator() as comm:
        window = one_window(comm, SHAPE)
        x = filled(window, rank, 1)
        send(comm, window, x)
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            send(comm, window, x)
        paths = graph_paths(graph.raw_cuda_graph())
        graph.reset()
        return paths


def test_order_of_nodes_in_a_graph(pair: RankPool) -> None:
    # The second write tells the host that the stream waits; one reset takes both words back.
    handshake = ["signal", "signal", "wait", "reset"]
    for chains in pair.run(node_order):
        assert sorted(chains) == sorted([["copy"], [*handshake, "copy", *handshake]])


def own_share_order(rank: int, world_size: int) -> list[list[list[str]]]:
    """Paths of two rounds with a kernel between them, one round of two windows, two streams."""
    with communicator() as comm:
        specs = [WindowSpec(name, "scatter", SHAPE, torch.float32) for name in "abc"]
        a, b, c = reserve(comm, specs)
        x = filled(a, rank, 1)
        sources = {window: x.clone() for window in (a, b, c)}
        after = (comm.token, comm.world_size, comm.name)
        side = torch.cuda.Stream()

        def two_rounds() -> None:
            send(comm, a, x)
            x.add_(1)
            send(comm, a, x)

        def two_windows() -> None:
            with Exchange(comm) as exchange:
                exchange.send(x, a)
                exchange.send(x, b)

        def begin(window: Window) -> None:
            torch.ops.ulysses.scatter_into(sources[window], window.tensor, *after)

        def end(window: Window) -> None:
            torch.ops.ulysses.complete([window.tensor], [sources[window]], *after)

        def completed_elsewhere() -> None:
            main = torch.cuda.current_stream()
            side.wait_stream(main)
            begin(a)
            begin(b)
            end(a)
            with torch.cuda.stream(side):
                begin(c)
                end(b)
                x.add_(1)
                end(c)
            main.wait_stream(side)

        paths = []
        for work in (two_rounds, two_windows, completed_elsewhere):
            work()
            graph = torch.cuda.CUDAGraph(keep_graph=True)
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                work()
            paths.append(graph_paths(graph.raw_cuda_graph()))
            graph.reset()
        return paths


def test_an_own_share_follows_what_is_not_joined_and_nothing_else(pair: RankPool) -> None:
    for rounds, windows, elsewhere in pair.run(own_share_order):
        assert ["copy", "kernel", "copy"] in rounds
        assert ["copy", "copy"] not in rounds
        assert ["copy", "copy"] in windows
        # The kernel reads `b`, whose own share another stream has joined, not its own.
        assert ["copy", "copy", "copy", "kernel"] in elsewhere


HOLD = r"""
extern "C" __global__ void hold(volatile int* release, long long limit, volatile float* sink) {
  __shared__ float kept[12 * 1024];  // 48 KiB
  kept[threadIdx.x] = *sink;
  const long long begin = clock64();
  while (*release == 0 && clock64() - begin < limit) {}
  *sink = kept[threadIdx.x];
}
"""
BLOCKS_PER_SM = 4  # of 48 KiB each: 192 of the 227 KiB of an H100's or H200's shared memory


def completes_while_held(threads: int, work: Callable[[], None]) -> bool:
    """Whether ``work`` completes within 0.5 s while a kernel holds every SM.

    The kernel takes the shared memory of every SM, as attention and matrix kernels do, and
    ``4 * threads`` of its 2048 threads.
    """
    hold = torch.cuda._compile_kernel(HOLD, "hold")
    release = torch.zeros(1, dtype=torch.int32, device="cuda")
    sink = torch.zeros(1, device="cuda")
    one = torch.ones(1, dtype=torch.int32).pin_memory()
    sms = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    # Streams of one priority share a few hardware queues, and with them what holds one of them.
    holder, caller = torch.cuda.Stream(priority=0), torch.cuda.Stream(priority=-1)
    settle()
    with torch.cuda.stream(holder):  # the limit, 3 s, only ends a broken test
        grid = (BLOCKS_PER_SM * sms, 1, 1)
        hold(grid=grid, block=(threads, 1, 1), args=[release, 6_000_000_000, sink])
    time.sleep(0.05)
    with torch.cuda.stream(caller):
        work()
        done = caller.record_event()
    deadline = time.monotonic() + 0.5
    while not done.query() and time.monotonic() < deadline:
        time.sleep(0.001)
    completed = bool(done.query())
    with torch.cuda.stream(torch.cuda.Stream()):
        release.copy_(one, non_blocking=True)
    settle()
    return completed


def exchange_while_held(
    rank: int, world_size: int, transport: str, threads: int, own_share: bool
) -> tuple[bool, bool]:
    """Whether an exchange completed while every SM was held, and whether its result is right."""
    with communicator(transport=transport) as comm:
        window = one_window(comm, (1, 2048, 8, 64))
        x, right = filled(window, rank, 2), expected(window, 2)
        cut = [part.contiguous() for part in x.split(list(window.layout.head_splits), dim=2)]
        window.own_view.copy_(x[:, :, : cut[0].shape[2]])

        def work() -> None:
            with Exchange(comm) as exchange:
                if own_share:
                    exchange.send(x, window)
                else:
                    exchange.send(cut[1 - rank], window, peer=1 - rank)

        work()  # what is loaded or connected at first use is there afterwards
        return completes_while_held(threads, work), torch.equal(window.tensor, right)


# The own share is a local copy, which the driver runs as a kernel: it needs threads, if no shared
# memory. Parts for peers need nothing of an SM.
@pytest.mark.two_gpus
@pytest.mark.parametrize(("threads", "own_share"), [(256, True), (512, False)])
def test_an_exchange_completes_while_all_sms_are_held(
    pair: RankPool, threads: int, own_share: bool
) -> None:
    assert pair.run(exchange_while_held, "ce", threads, own_share) == [(True, True)] * 2


@pytest.mark.two_gpus
def test_control_nccl_waits_for_sms(pair: RankPool) -> None:
    assert pair.run(exchange_while_held, "nccl", 256, True) == [(False, True)] * 2


def pending_at_close(rank: int, world_size: int) -> tuple[float, bool, bool]:
    """Rank 0 sends, rank 1 never does: close ends the wait, and no result looks good."""
    from ulysses_ops import lifetime

    lifetime.CLOSE_TIMEOUT_S = 1.0
    comm = communicator()
    scatter(filled(one_window(comm, SHAPE), rank, 0), comm)
    settle()
    begin = time.monotonic()
    nan, warned = False, False
    if rank == 0:
        got = scatter(filled(one_window(comm, SHAPE), rank, 0), comm)
        with pytest.warns(RuntimeWarning, match="peers did not answer within 1 s"):
            comm.close()
        warned = True
        nan = bool(torch.isnan(got).any())
    seconds = time.monotonic() - begin
    dist.barrier()
    comm.close()
    with communicator() as fresh:  # the process and the group go on
        got = scatter(filled(one_window(fresh, SHAPE), rank, 5), fresh)
        assert torch.equal(got, expected(one_window(fresh, SHAPE), 5))
    return seconds, nan, warned


def test_close_releases_a_wait_and_poisons(pair: RankPool) -> None:
    (seconds, nan, warned), _ = pair.run(pending_at_close, timeout_s=30)
    assert (nan, warned) == (True, True)
    assert seconds < 5.0
