"""Peers that are late, gone or closed: named in time, and no result of theirs looks good."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from on_gpu import communicator, delay, expected, filled, one_window, send, settle
from rank_pool import RankPool, on_gpus
from torch import Tensor

from ulysses_ops import Exchange, PeerTimeoutError, UlyssesCommunicator
from ulysses_ops.graphs import CapturedStep, capture_step
from ulysses_ops.windows import Window

SHAPE = (1, 64, 8, 64)
LIMIT_S = 1.0
LAYERS = 6


def warm(comm: UlyssesCommunicator, rank: int) -> Window:
    """A window that has been through a round, with every kernel of the tests loaded."""
    window = one_window(comm, SHAPE)
    assert torch.equal(send(comm, window, filled(window, rank, 1)), expected(window, 1))
    assert not bool(torch.isnan(window.tensor).all())
    settle()
    return window


def layers(comm: UlyssesCommunicator, window: Window, rank: int) -> CapturedStep:
    """A step with several rounds, so that a replay waits many times."""

    def step(x: Tensor) -> Tensor:
        for _ in range(LAYERS):
            x = send(comm, window, x)[:, : x.shape[1], :1].expand(x.shape) + 1
        return x

    return capture_step(comm, step, [filled(window, rank, 0)])


def late_peer(rank: int, world_size: int, how: str, late_s: float) -> tuple[float, str, bool]:
    """Rank 1 comes late by some seconds; how long rank 0 took, what it was told, NaN or not."""
    with communicator(timeout_s=20.0) as comm:
        window = warm(comm, rank)
        step = layers(comm, window, rank)
        comm.set_timeout(LIMIT_S)
        settle()
        if rank == 1:
            time.sleep(late_s)
        begin = time.monotonic()
        message = ""
        try:
            if how == "graph":
                step.replay(filled(window, rank, 2))
            else:
                send(comm, window, filled(window, rank, 2))
            comm.synchronize()
        except PeerTimeoutError as error:
            message = str(error)
        took_s = time.monotonic() - begin
        spoiled = bool(torch.isnan(window.tensor).all())
        if message:
            again = time.monotonic()
            with pytest.raises(PeerTimeoutError):
                send(comm, window, filled(window, rank, 3))
            with pytest.raises(PeerTimeoutError):
                step.replay()
            assert time.monotonic() - again < 0.1
        dist.barrier()
        return took_s, message, spoiled


@pytest.mark.parametrize("how", ["eager", "graph"])
def test_a_late_peer_is_named(pair: RankPool, how: str) -> None:
    (took_s, waiting, spoiled), (_, late, _) = pair.run(late_peer, how, 3.0)
    assert LIMIT_S < took_s < LIMIT_S + 1
    assert "waits for ranks [1]" in waiting
    assert "channel 'test'" in waiting
    assert "rank 1: 0 of 0x" in waiting
    assert spoiled
    assert "rank 0 gave up on an exchange and told so" in late


@pytest.mark.parametrize("how", ["eager", "graph"])
def test_a_peer_that_is_less_late_is_waited_for(pair: RankPool, how: str) -> None:
    for _, message, spoiled in pair.run(late_peer, how, 0.4):
        assert message == ""
        assert not spoiled


def late_completion(rank: int, world_size: int) -> str:
    """Rank 1 has sent into two channels, and completes both late, with one call."""
    with communicator(timeout_s=20.0) as comm:
        windows = [one_window(comm, SHAPE, name=name) for name in "ab"]

        def both(number: int, late_s: float = 0.0) -> None:
            exchange = Exchange(comm)
            for window in windows:
                exchange.send(filled(window, rank, number), window)
            time.sleep(late_s)
            exchange.complete()

        both(1)
        settle()
        comm.set_timeout(LIMIT_S)
        settle()
        message = ""
        try:
            both(2, 3.0 * LIMIT_S if rank == 1 else 0.0)
            comm.synchronize()
        except PeerTimeoutError as error:
            message = str(error)
        dist.barrier()
        return message


def test_one_wait_for_two_channels_is_found(pair: RankPool) -> None:
    waiting, late = pair.run(late_completion)
    assert "waits for ranks [1]" in waiting
    assert waiting.count("rank 1: 0 of 0x") == 2
    assert "rank 0 gave up on an exchange and told so" in late


def control_without_limit(rank: int, world_size: int) -> bool:
    """With the limit out of reach nothing ends the wait; the peer's call does."""
    with communicator(timeout_s=1000.0) as comm:
        window = warm(comm, rank)
        if rank == 1:
            dist.barrier()  # the other one has looked
        send(comm, window, filled(window, rank, 2))
        done = torch.cuda.current_stream().record_event()
        waits = False
        if rank == 0:
            time.sleep(2.0 * LIMIT_S)
            waits = not done.query()
            dist.barrier()
        comm.synchronize()
        assert torch.equal(window.tensor, expected(window, 2))
        settle()
        return waits


def test_control_a_wait_without_limit_is_not_ended(pair: RankPool) -> None:
    assert pair.run(control_without_limit)[0]


def own_work(rank: int, world_size: int) -> None:
    """Work of one's own that takes longer than the limit is not a peer that is late."""
    with communicator(timeout_s=20.0) as comm:
        window = warm(comm, rank)
        step = layers(comm, window, rank)
        comm.set_timeout(LIMIT_S)
        for number in range(2):
            settle()
            delay(2500.0)
            if number:
                step.replay(filled(window, rank, 2))
            else:
                send(comm, window, filled(window, rank, 2))
            comm.synchronize()
        settle()


def test_own_work_has_no_limit(pair: RankPool) -> None:
    pair.run(own_work)


def many_slow_replays(rank: int, world_size: int) -> None:
    """Replays that all wait at the same place, each for less than the limit."""
    with communicator(timeout_s=20.0) as comm:
        window = warm(comm, rank)
        step = capture_step(comm, lambda x: send(comm, window, x), [filled(window, rank, 0)])
        comm.set_timeout(LIMIT_S)
        settle()
        for number in range(12):
            if rank == 1:
                delay(250.0)
            step.replay(filled(window, rank, number))
        comm.synchronize()
        assert torch.equal(window.tensor, expected(window, 11))
        settle()


def test_the_limit_is_for_one_wait(pair: RankPool) -> None:
    pair.run(many_slow_replays)


def closed_peer(rank: int, world_size: int) -> tuple[float, str]:
    comm = communicator(timeout_s=20.0)
    window = warm(comm, rank)
    begin = time.monotonic()
    message = ""
    if rank == 1:
        comm.close()
    else:
        send(comm, window, filled(window, rank, 2))
        with pytest.raises(PeerTimeoutError) as told:
            comm.synchronize()
        message = str(told.value)
        comm.close()
    took_s = time.monotonic() - begin
    dist.barrier()
    return took_s, message


def test_a_closed_peer_is_told_of_at_once(pair: RankPool) -> None:
    (took_s, message), _ = pair.run(closed_peer)
    assert took_s < 2.0
    assert "rank 1 closed its communicator, and #3, open of" in message


def full_queue(rank: int, world_size: int) -> tuple[float, str]:
    """Rank 0 issues until its calls block inside CUDA; the watchdog frees them all the same."""
    with communicator(timeout_s=20.0) as comm:
        window = warm(comm, rank)
        comm.set_timeout(LIMIT_S)
        settle()
        begin = time.monotonic()
        message = ""
        if rank == 0:
            try:
                for number in range(20_000):
                    send(comm, window, filled(window, rank, number % 100))
            except PeerTimeoutError as error:
                message = str(error)
            with pytest.raises(PeerTimeoutError):
                comm.synchronize()
        took_s = time.monotonic() - begin
        dist.barrier()
        return took_s, message


def test_a_call_that_is_blocked_inside_cuda_is_freed(pair: RankPool) -> None:
    (took_s, message), _ = pair.run(full_queue)
    assert took_s < LIMIT_S + 4
    assert "waits for ranks [1]" in message


def test_with_one_hardware_connection() -> None:
    env = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    with on_gpus(2, env) as pool:
        for how in ("eager", "graph"):
            (took_s, waiting, spoiled), (_, late, _) = pool.run(late_peer, how, 3.0)
            assert took_s < LIMIT_S + 1
            assert "waits for ranks [1]" in waiting
            assert spoiled
            assert late


def one_of_four(rank: int, world_size: int) -> str:
    """Rank 2 stays away; the others agree on whom they miss."""
    with communicator(timeout_s=20.0) as comm:
        window = warm(comm, rank)
        comm.set_timeout(LIMIT_S)
        settle()
        message = ""
        if rank != 2:
            send(comm, window, filled(window, rank, 2))
            with pytest.raises(PeerTimeoutError) as told:
                comm.synchronize()
            message = str(told.value)
        dist.barrier()
        return message


def test_the_one_missing_rank_of_four_is_named(crowd: Callable[[int], RankPool]) -> None:
    messages = crowd(4).run(one_of_four)
    del messages[2]
    assert any("waits for ranks [2];" in message for message in messages)
    for message in messages:
        assert "waits for ranks [2];" in message or "gave up on an exchange" in message


def dumped(rank: int, world_size: int, folder: str) -> str:
    with communicator(timeout_s=20.0, dump_dir=Path(folder)) as comm:
        window = warm(comm, rank)
        comm.set_timeout(0.3)
        settle()
        if rank == 0:
            send(comm, window, filled(window, rank, 2))
            with pytest.raises(PeerTimeoutError, match="its latest exchanges are in"):
                comm.synchronize()
        dist.barrier()
        time.sleep(0.5)
        with pytest.raises(PeerTimeoutError):
            comm.check()
        dist.barrier()
        return comm.name


def test_what_each_rank_issued_is_written_down(pair: RankPool, tmp_path: Path) -> None:
    name = pair.run(dumped, str(tmp_path))[0].replace("/", "_")
    files = [tmp_path / f"{name}-rank{rank}.json" for rank in (0, 1)]
    ahead, behind = (json.loads(file.read_text(encoding="utf-8")) for file in files)
    assert all(file.stat().st_mode & 0o077 == 0 for file in files)
    what = [[entry["what"] for entry in dump["exchanges"]] for dump in (ahead, behind)]
    assert what[0][: len(what[1])] == what[1]
    more = [text.partition(", ")[2].partition(" of ")[0] for text in what[0][len(what[1]) :]]
    assert more == ["open", "close"]


def raw_replay(rank: int, world_size: int) -> str:
    """A replay that goes past the wrapper, on one rank alone: at worst a named time-out."""
    with communicator(timeout_s=20.0) as comm:
        window = warm(comm, rank)
        x = filled(window, rank, 2)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            send(comm, window, x)
        comm.set_timeout(LIMIT_S)
        settle()
        message = ""
        if rank == 0:
            graph.replay()
            with pytest.raises(PeerTimeoutError) as told:
                comm.synchronize()
            message = str(told.value)
        dist.barrier()
        torch.cuda.synchronize()
        return message


def test_a_raw_replay_on_one_rank(pair: RankPool) -> None:
    assert "in captured step" in pair.run(raw_replay)[0]


def doomed(rank: int, world_size: int, how: str, folder: str) -> None:
    """Rank 1 dies in the middle of a loop; rank 0 writes down what it was told, and when."""
    comm = communicator(timeout_s=LIMIT_S * 2)
    window = warm(comm, rank)
    step = layers(comm, window, rank)
    settle()
    begin = time.monotonic()
    try:
        for number in range(1000):
            if rank == 1 and number == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "graph":
                step.replay(filled(window, rank, number))
            else:
                send(comm, window, filled(window, rank, number))
            comm.synchronize()
    except PeerTimeoutError as error:
        text = json.dumps(
            [time.monotonic() - begin, str(error), bool(torch.isnan(window.tensor).all())]
        )
        Path(folder, how).write_text(text, encoding="utf-8")
        comm.close()
        raise


@pytest.mark.parametrize("how", ["eager", "graph"])
def test_a_killed_peer(tmp_path: Path, how: str) -> None:
    with on_gpus(2) as pool:
        with contextlib.suppress(AssertionError):  # rank 1 is dead, which the pool reports
            pool.run(doomed, how, str(tmp_path), timeout_s=40)
        took_s, message, spoiled = json.loads((tmp_path / how).read_text(encoding="utf-8"))
    assert took_s < 2 * LIMIT_S + 1
    assert "waits for ranks [1]" in message
    assert spoiled


def stopped(rank: int, world_size: int) -> None:
    """Rank 1 is stopped for two seconds, below the limit, and goes on."""
    with communicator(timeout_s=10.0) as comm:
        window = warm(comm, rank)
        settle()
        pids: list[int] = [0] * world_size
        dist.all_gather_object(pids, os.getpid())
        for number in range(40):
            if rank == 0 and number == 10:
                os.kill(pids[1], signal.SIGSTOP)
            if rank == 0 and number == 11:
                time.sleep(2.0)
                os.kill(pids[1], signal.SIGCONT)
            exchange = Exchange(comm)
            exchange.send(filled(window, rank, number), window)
            exchange.complete()
            if number != 10:
                comm.synchronize()
                assert torch.equal(window.tensor, expected(window, number))
        settle()


def test_a_stopped_peer_goes_on(pair: RankPool) -> None:
    pair.run(stopped)
