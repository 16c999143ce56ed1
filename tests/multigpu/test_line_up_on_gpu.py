"""Steps whose exchanges differ between ranks: refused by all before a wait is issued."""

from __future__ import annotations

import time

import pytest
import torch
from on_gpu import communicator, filled, one_window, send, settle
from rank_pool import RankPool
from torch import Tensor

from ulysses_ops import PeerTimeoutError, UlyssesCommunicator, UlyssesError
from ulysses_ops.graphs import capture_step
from ulysses_ops.windows import Window

SHAPE = (1, 64, 8, 64)
LIMIT_S = 5.0


def different_steps(rank: int, world_size: int) -> list[str]:
    """Both windows are there, so that nothing but the line-up would keep the ranks from waiting."""
    messages = []
    with communicator(timeout_s=LIMIT_S) as comm:
        window, other = one_window(comm, SHAPE), one_window(comm, SHAPE, name="other")
        x = filled(window, rank, 0)

        def swapped(x: Tensor) -> None:
            for one in (other, window) if rank else (window, other):
                send(comm, one, x)

        def shorter(x: Tensor) -> None:
            send(comm, window, x)
            if rank == 0:
                send(comm, other, x)

        begin = time.monotonic()
        for bad in (swapped, shorter):
            with pytest.raises(UlyssesError) as refused:
                capture_step(comm, bad, [x])
            messages.append(str(refused.value))
        with pytest.raises(UlyssesError) as refused:
            capture_step(comm, lambda x: x + 1, [x if rank else x.double()])
        messages.append(str(refused.value))
        assert time.monotonic() - begin < LIMIT_S
        comm.check()
        capture_step(comm, lambda x: send(comm, window, x).clone(), [x]).verify(x + 1)
        settle()
    return messages


def test_what_differs_is_refused_by_all(pair: RankPool) -> None:
    one, two = pair.run(different_steps)
    assert one == two
    swapped, shorter, inputs = one
    assert "window 'test'" in swapped and "window 'other'" in swapped
    assert "none, its step is over" in shorter
    assert "[0]=4-d float64" in inputs and "[0]=4-d float32" in inputs


def send_and_wait(comm: UlyssesCommunicator, window: Window, x: Tensor) -> None:
    send(comm, window, x)
    comm.synchronize()


def swapped_eagerly(rank: int, world_size: int) -> str:
    """Control: the same calls with no line-up wait for each other until they are given up."""
    with communicator(timeout_s=20.0) as comm:
        window, other = one_window(comm, SHAPE), one_window(comm, SHAPE, name="other")
        send(comm, window, filled(window, rank, 0))
        settle()
        comm.set_timeout(1.0)
        x = filled(window, rank, 1)
        with pytest.raises(PeerTimeoutError) as told:
            send_and_wait(comm, other if rank else window, x)
        torch.cuda.synchronize()
        return str(told.value)


def test_control_eager_calls_that_differ_are_given_up(pair: RankPool) -> None:
    assert any("waits for ranks" in message for message in pair.run(swapped_eagerly))
