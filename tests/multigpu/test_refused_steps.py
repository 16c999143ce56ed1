"""Steps that cannot be captured, or would replay something else: refused with the reason."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from on_gpu import communicator, expected, filled, one_window, send, settle
from rank_pool import RankPool, on_gpus
from torch import Tensor

from ulysses_ops import UlyssesError
from ulysses_ops.graphs import capture_step

SHAPE = (1, 64, 8, 64)
Step = Callable[[Tensor], Tensor]


def refused_steps(rank: int, world_size: int) -> dict[str, str]:
    """Each is refused on all ranks, and a good step can be captured after it."""
    messages = {}
    with communicator() as comm:
        window = one_window(comm, SHAPE)
        stream = torch.cuda.Stream()
        stranger = torch.Generator(device="cuda")

        def synchronises(x: Tensor) -> Tensor:
            return x * x.sum().item()

        def forks(x: Tensor) -> Tensor:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                return x + 1

        def draws(x: Tensor) -> Tensor:
            return x + torch.rand(x.shape, device="cuda", generator=stranger)

        for bad in (synchronises, forks, draws):
            source = filled(window, rank, 0)
            with pytest.raises(UlyssesError) as refused:
                capture_step(comm, bad, [source])
            messages[bad.__name__] = str(refused.value)
            torch.cuda.synchronize()
            good = capture_step(comm, lambda x: send(comm, window, x).clone(), [source])
            good.verify(filled(window, rank, 3))
            good.close()
        settle()
    return messages


def test_what_cannot_be_captured_says_why(pair: RankPool) -> None:
    one, other = pair.run(refused_steps)
    assert one == other
    assert "synchronises with the host" in one["synchronises"]
    assert "did not join it" in one["forks"]
    assert "generator that the graph does not know" in one["draws"]


def unlike_their_graph(rank: int, world_size: int) -> dict[str, str]:
    """What a capture cannot see is found by verify; a good step passes."""
    messages = {}
    with communicator() as comm:
        elsewhere = torch.cuda.Stream()
        seen: list[float] = []

        def not_forked(x: Tensor) -> Tensor:
            torch.cuda.current_stream()
            y = torch.empty_like(x)
            if not torch.cuda.is_current_stream_capturing():
                torch.cuda.current_stream().synchronize()
            with torch.cuda.stream(elsewhere):
                y.copy_(x)
            if not torch.cuda.is_current_stream_capturing():
                elsewhere.synchronize()
            return y

        def stateful(x: Tensor) -> Tensor:
            seen.append(1.0)
            return x + len(seen)

        x = torch.full((8,), 1.0, device="cuda")
        for bad in (not_forked, stateful):
            step = capture_step(comm, bad, [x])
            with pytest.raises(UlyssesError) as refused:
                step.verify(torch.full((8,), 2.0, device="cuda"))
            messages[bad.__name__] = str(refused.value)
            settle()
            step.close()
        good = capture_step(comm, lambda x: x + 1, [x])
        good.verify(torch.full((8,), 2.0, device="cuda"))
        good.close()
    return messages


def test_verify_finds_what_a_capture_cannot_see(pair: RankPool) -> None:
    one, other = pair.run(unlike_their_graph)
    assert one == other
    for message in one.values():
        assert "replay and eager call differ" in message


def host_tensors(rank: int, world_size: int) -> str:
    with communicator() as comm:
        x = torch.zeros(4, device="cuda")
        with pytest.raises(ValueError, match="bake its values in") as refused:
            capture_step(comm, lambda x, t: x + t, [x, torch.tensor(1.0)])
        return str(refused.value)


def test_a_host_tensor_is_refused(pair: RankPool) -> None:
    for message in pair.run(host_tensors):
        assert "input [1] is on cpu" in message


def different_graphs(rank: int, world_size: int) -> list[str]:
    """Ranks that exchange alike when they warm up, and differently when they capture."""
    messages = []
    with communicator() as comm:
        window, other = one_window(comm, SHAPE), one_window(comm, SHAPE, name="other")
        x = filled(window, rank, 0)

        def swapped(x: Tensor) -> None:
            turned = rank == 1 and torch.cuda.is_current_stream_capturing()
            for one in (other, window) if turned else (window, other):
                send(comm, one, x)

        def shorter(x: Tensor) -> None:
            send(comm, window, x)
            if rank == 0 or not torch.cuda.is_current_stream_capturing():
                send(comm, other, x)

        for bad in (swapped, shorter):
            with pytest.raises(UlyssesError) as refused:
                capture_step(comm, bad, [x])
            messages.append(str(refused.value))
        capture_step(comm, lambda x: send(comm, window, x).clone(), [x]).verify(x + 1)
        settle()
    return messages


def test_graphs_that_do_not_belong_together(pair: RankPool) -> None:
    one, other = pair.run(different_graphs)
    assert one == other
    swapped, shorter = one
    assert "rank 0: exchange 0 of its graph is open of channel 'test'" in swapped
    assert "rank 1: exchange 0 of its graph is open of channel 'other'" in swapped
    assert "rank 1: exchange 2 of its graph is nothing" in shorter


def launches_of_a_step(rank: int, world_size: int) -> dict[str, int]:
    """What the runtime is asked for in a replay."""
    with communicator() as comm:
        window = one_window(comm, SHAPE)
        source = filled(window, rank, 0)

        def step(x: Tensor) -> Tensor:
            for _ in range(5):
                x = x + 1
                send(comm, window, x)
            return x

        captured = capture_step(comm, step, [source])
        captured.replay(source)
        settle()
        counts: dict[str, int] = {}
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            for _ in range(3):
                captured.replay()
            torch.cuda.synchronize()
        asked = ("cudaGraphLaunch", "cudaLaunchKernel", "cudaMemcpyAsync")
        events = [event for event in profile.events() if event.name in asked]
        ours = {event.device_resource_id for event in events if event.name == "cudaGraphLaunch"}
        for event in events:
            if event.device_resource_id in ours:  # the watchdog looks by copies of its own
                counts[event.name] = counts.get(event.name, 0) + 1
        settle()
        return counts


def test_a_step_is_one_launch(pair: RankPool) -> None:
    assert pair.run(launches_of_a_step, timeout_s=60) == [{"cudaGraphLaunch": 3}] * 2


def blocking_loop(rank: int, world_size: int) -> None:
    """Eager rounds and replays, with every launch waited for."""
    with communicator() as comm:
        window = one_window(comm, SHAPE)
        step = capture_step(comm, lambda x: send(comm, window, x) + 1, [filled(window, rank, 0)])
        for number in range(20):
            step.verify(filled(window, rank, number))
        settle()


def test_blocking_launches() -> None:
    env = {"CUDA_LAUNCH_BLOCKING": "1"}
    with on_gpus(2, env) as pool:
        pool.run(blocking_loop, timeout_s=60)


def beside_another_thread(rank: int, world_size: int) -> list[str]:
    """While a thread is in a call, another may neither replay nor send; afterwards it may."""
    messages = []
    with communicator() as comm:
        window = one_window(comm, SHAPE)
        step = capture_step(
            comm, lambda x: send(comm, window, x).clone(), [filled(window, rank, 0)]
        )
        settle()
        is_in, may_leave = threading.Event(), threading.Event()

        def call() -> None:
            with comm.turn.of("test"):
                is_in.set()
                may_leave.wait(20.0)

        thread = threading.Thread(target=call, name="first")
        thread.start()
        assert is_in.wait(20.0)
        x = filled(window, rank, 1)
        for second in (lambda: step.replay(x), lambda: send(comm, window, x)):
            with pytest.raises(UlyssesError) as refused:
                second()
            messages.append(str(refused.value))
        may_leave.set()
        thread.join()
        assert torch.equal(step.replay(x), expected(window, 1))
        comm.synchronize()
        settle()
    return messages


def test_a_replay_beside_another_thread_is_refused(pair: RankPool) -> None:
    for messages in pair.run(beside_another_thread):
        assert len(messages) == 2
        for message in messages:
            assert "is in use by thread 'first' at this moment" in message


def asserting(rank: int, world_size: int) -> list[str]:
    """After a device-side assert, dropping what we hold does not hide it."""
    comm = communicator()
    window = one_window(comm, SHAPE)
    step = capture_step(comm, lambda x: send(comm, window, x) + 1, [filled(window, rank, 0)])
    settle()
    index = torch.full((1,), 1 << 30, device="cuda")
    torch.zeros(4, device="cuda")[index]
    messages = []
    with pytest.raises(RuntimeError) as first:
        torch.cuda.synchronize()
    messages.append(str(first.value))
    with pytest.raises(RuntimeError) as closed:
        step.close()
    messages.append(str(closed.value))
    with pytest.warns(RuntimeWarning, match="the device failed") as warned:
        comm.close()
    messages.append(str(warned[0].message))
    with pytest.raises(RuntimeError) as again:
        torch.cuda.synchronize()
    messages.append(str(again.value))
    return messages


def test_a_device_side_assert_is_not_hidden() -> None:
    with on_gpus(2) as pool:
        for messages in pool.run(asserting, timeout_s=60):
            assert all("device-side assert" in message for message in messages)
