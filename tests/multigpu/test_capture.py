"""Captures: refused in time, aborted without a trace, pinned, alive without their makers."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
import torch.distributed as dist
from on_gpu import communicator, delay, expected, filled, one_window, send, settle
from rank_pool import RankPool
from torch import Tensor

from ulysses_ops import Exchange, UlyssesError, gather, scatter
from ulysses_ops.graphs import CapturedStep, capture_step

SHAPE = (1, 64, 8, 64)


def unreserved_in_capture(rank: int, world_size: int, warm_first: bool) -> str:
    """A shape met first inside a capture is refused, and the capture goes on being valid."""
    with communicator() as comm:
        if warm_first:
            scatter(torch.zeros(1, 4, 8, 16, device="cuda"), comm)
        x = torch.ones(1, 32, 8, 64, device="cuda")
        graph = torch.cuda.CUDAGraph()
        y = torch.zeros(1, device="cuda")
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            with pytest.raises(UlyssesError) as refused:
                scatter(x, comm)
            y += 1
        graph.replay()
        assert float(y) == 1.0
        assert torch.equal(gather(scatter(x, comm), comm), x)
        return str(refused.value)


@pytest.mark.parametrize("warm_first", [False, True])
def test_unreserved_shape_in_a_capture(pair: RankPool, warm_first: bool) -> None:
    messages = pair.run(unreserved_in_capture, warm_first)
    assert messages[0] == messages[1]
    assert "[1, 64, 8, 64] torch.float32" in messages[0]
    assert "call reserve() on every rank" in messages[0]


def never_completed(rank: int, world_size: int) -> list[str]:
    """A step that leaves an exchange open in the capture alone; then captures that work."""
    messages = []
    with communicator() as comm:
        window = one_window(comm, SHAPE)

        def forgetful(x: Tensor) -> None:
            exchange = Exchange(comm)
            exchange.send(x, window)
            if not torch.cuda.is_current_stream_capturing():
                exchange.complete()

        def failing(x: Tensor) -> None:
            send(comm, window, x)
            if torch.cuda.is_current_stream_capturing() and rank == 1:
                raise KeyError("on purpose")

        for step in (forgetful, failing):
            with pytest.raises(UlyssesError) as refused:
                capture_step(comm, step, [filled(window, rank, 0)])
            messages.append(str(refused.value))
        good = capture_step(comm, lambda x: send(comm, window, x), [filled(window, rank, 0)])
        for number in range(3):
            got = good.replay(filled(window, rank, number))
            assert torch.equal(got, expected(window, number))
        settle()
    return messages


def test_aborted_captures_leave_nothing(pair: RankPool) -> None:
    by_rank = pair.run(never_completed)
    assert by_rank[0] == by_rank[1]
    assert "left channel 'test' without complete" in by_rank[0][0]
    assert "rank 1: KeyError: 'on purpose'" in by_rank[0][1]
    assert "rank 0" not in by_rank[0][1]


def capture_inside_a_capture(rank: int, world_size: int) -> str:
    with communicator() as comm:
        window = one_window(comm, SHAPE)
        x = filled(window, rank, 0)
        graph = torch.cuda.CUDAGraph()
        y = torch.zeros(1, device="cuda")
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            with pytest.raises(UlyssesError) as refused:
                capture_step(comm, lambda x: send(comm, window, x), [x])
            y += 1
        graph.replay()
        assert float(y) == 1.0
        return str(refused.value)


def test_capture_inside_a_capture_is_refused(pair: RankPool) -> None:
    for message in pair.run(capture_inside_a_capture):
        assert "this stream is being captured already" in message


def two_threads(rank: int, world_size: int) -> str:
    """While one thread captures an exchange, another thread's exchange is refused."""
    with communicator() as comm:
        window, other = one_window(comm, SHAPE), one_window(comm, SHAPE, name="other")
        x = filled(window, rank, 1)
        send(comm, window, x)
        settle()
        messages: list[str] = []

        def eager() -> None:
            torch.cuda.set_device(x.device)
            with torch.cuda.stream(torch.cuda.Stream()):
                try:
                    send(comm, other, x)
                except UlyssesError as error:
                    messages.append(str(error))

        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            exchange = Exchange(comm)
            exchange.send(x, window)
            thread = threading.Thread(target=eager)
            thread.start()
            thread.join()
            exchange.complete()
        graph.replay()
        settle()
        assert torch.equal(window.tensor, expected(window, 1))
        graph.reset()
        return messages[0]


def test_two_threads(pair: RankPool) -> None:
    for message in pair.run(two_threads):
        assert "take part in another capture" in message


def two_communicators_in_a_step(rank: int, world_size: int) -> str:
    """A step that uses another communicator than it is captured for would be pinned by neither."""
    with communicator() as comm, communicator(name="second") as second:
        window, other = one_window(comm, SHAPE), one_window(second, SHAPE)

        def step(x: Tensor) -> Tensor:
            return send(comm, window, x) + send(second, other, x)

        with pytest.raises(UlyssesError) as refused:
            capture_step(comm, step, [filled(window, rank, 0)])
        good = capture_step(second, lambda x: send(second, other, x), [filled(other, rank, 0)])
        assert torch.equal(good.replay(filled(other, rank, 2)), expected(other, 2))
        settle()
        return str(refused.value)


def test_a_step_uses_one_communicator(pair: RankPool) -> None:
    for message in pair.run(two_communicators_in_a_step):
        assert "this step is captured for another communicator" in message


def captures_after_nccl(rank: int, world_size: int) -> None:
    """50 captures, each right behind an NCCL collective whose watchdog is polling."""
    with communicator() as comm:
        window = one_window(comm, SHAPE)
        for number in range(50):
            total = torch.ones(1, device="cuda")
            dist.all_reduce(total)
            step = capture_step(
                comm, lambda x: send(comm, window, x), [filled(window, rank, 0)], warmup=1
            )
            assert torch.equal(step.replay(filled(window, rank, number)), expected(window, number))
            step.close()
            assert float(total) == world_size


@pytest.mark.two_gpus
def test_capture_right_after_nccl(pair: RankPool) -> None:
    pair.run(captures_after_nccl, timeout_s=60)


def captured_send(rank: int) -> tuple[CapturedStep, list[Tensor], list[Tensor]]:
    """A step, sources, and what their replays give; nothing else stays referenced."""
    comm = communicator()
    window = one_window(comm, SHAPE)
    step = capture_step(comm, lambda x: send(comm, window, x).clone(), [filled(window, rank, 0)])
    numbers = range(5)
    return (
        step,
        [filled(window, rank, number) for number in numbers],
        [expected(window, number) for number in numbers],
    )


def outlives_its_makers(rank: int, world_size: int) -> None:
    """Every reference but the step is dropped, memory is churned, and replays stay right."""
    step, sources, right = captured_send(rank)
    gc.collect()
    torch.cuda.empty_cache()
    noise = torch.full((1 << 28,), 7.0, device="cuda")  # 1 GiB
    for source, result in zip(sources, right, strict=True):
        assert torch.equal(step.replay(source), result)
    del noise
    settle()
    if rank == 0:  # one rank alone lets go: nothing blocks
        del step
        gc.collect()
    dist.barrier()


def test_a_graph_outlives_its_makers(pair: RankPool) -> None:
    pair.run(outlives_its_makers)


def other_shape_between(rank: int, world_size: int) -> None:
    """Capture shape A, run shape B eagerly, collect garbage, replay A; windows of A are pinned."""
    with communicator(max_windows=2) as comm:
        window = one_window(comm, SHAPE)
        step = capture_step(comm, lambda x: send(comm, window, x), [filled(window, rank, 0)])
        for rows in (2, 4, 6, 8):  # more shapes than windows: those that no graph uses are evicted
            x = torch.randn(1, rows, 8, 16, device="cuda")
            y = scatter(x, comm)
            assert y.shape == (1, rows * world_size, 4, 16)
        gc.collect()
        assert torch.equal(step.replay(filled(window, rank, 3)), expected(window, 3))
        settle()
        step.close()
        for rows in (2, 4, 6):  # with the graph closed its window may go
            scatter(torch.randn(1, rows, 8, 16, device="cuda"), comm)
        with pytest.raises(ValueError, match="none of the windows"):
            send(comm, window, filled(window, rank, 0))


def test_pins_and_eviction(pair: RankPool) -> None:
    pair.run(other_shape_between)


def dropped_in_a_capture(rank: int, world_size: int) -> int:
    """The last reference to a communicator goes while a step is captured: the capture is valid."""
    with communicator() as comm:
        window = one_window(comm, SHAPE)
        dropped = communicator(name="dropped")
        one_window(dropped, (1, 1 << 15, 8, 64), name="big")
        makers = [dropped]
        del dropped

        def plain(x: Tensor) -> Tensor:
            return send(comm, window, x).clone()

        def step(x: Tensor) -> Tensor:
            if torch.cuda.is_current_stream_capturing():
                makers.clear()
                gc.collect()
            return plain(x)

        # What a first capture and comparison load stays, and is not to be counted.
        first = capture_step(comm, plain, [filled(window, rank, 0)])
        assert torch.equal(first.replay(filled(window, rank, 1)), expected(window, 1))
        settle()
        first.close()
        settle()
        before = torch.cuda.mem_get_info()[0]
        captured = capture_step(comm, step, [filled(window, rank, 0)])
        for number in range(3):
            assert torch.equal(
                captured.replay(filled(window, rank, number)), expected(window, number)
            )
        settle()
        captured.close()
    settle()
    return torch.cuda.mem_get_info()[0] - before


def test_a_communicator_dropped_in_a_capture(pair: RankPool) -> None:
    for freed in pair.run(dropped_in_a_capture):
        assert freed >= 32 << 20  # its window


def mixed_eager_and_graphs(rank: int, world_size: int) -> int:
    """Eager rounds and replays of two graphs, from two streams, in one order, with skew."""
    with communicator() as comm:
        window, other = one_window(comm, SHAPE), one_window(comm, SHAPE, name="other")
        x = filled(window, rank, 0)
        steps = [
            capture_step(comm, lambda x: send(comm, window, x).clone(), [x]),
            capture_step(comm, lambda x: send(comm, other, x).clone(), [x]),
        ]
        streams = [torch.cuda.Stream(), torch.cuda.Stream()]
        settle()
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        generator = torch.Generator().manual_seed(rank)
        for number in range(300):
            stream = streams[number % 2]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                delay(float(torch.rand(1, generator=generator)) * 0.2)
                x = filled(window, rank, number % 997)
                if number % 3 == 2:
                    got = send(comm, window, x)
                else:
                    got = steps[number % 3].replay(x)
                count = (got != expected(window, number % 997)).sum()
            torch.cuda.current_stream().wait_stream(stream)
            wrong += count
        settle()
        return int(wrong)


def test_eager_calls_and_replays_mixed(pair: RankPool) -> None:
    assert pair.run(mixed_eager_and_graphs, timeout_s=60) == [0, 0]


def wrong_replays(rank: int, world_size: int) -> list[str]:
    """What a step refuses at replay, before anything is issued."""
    messages = []
    comm = communicator()
    window = one_window(comm, SHAPE)
    step = capture_step(comm, lambda x: send(comm, window, x), [filled(window, rank, 0)])
    for bad in (torch.zeros(3, device="cuda"), filled(window, rank, 0).half()):
        with pytest.raises(ValueError, match=r"replay: input \[0\]") as refused:
            step.replay(bad)
        messages.append(str(refused.value))
    exchange = Exchange(comm)
    exchange.send(filled(window, rank, 1), window)
    with pytest.raises(UlyssesError) as pending:
        step.replay()
    messages.append(str(pending.value))
    exchange.complete()
    settle()
    comm.close()
    with pytest.raises(UlyssesError) as closed:
        step.replay()
    messages.append(str(closed.value))
    return messages


def test_refused_replays(pair: RankPool) -> None:
    for shape, dtype, pending, closed in pair.run(wrong_replays):
        assert "input [0] is [3]" in shape
        assert "float16, was" in dtype
        assert "channel 'test' has an exchange in flight" in pending
        assert "closed" in closed
