"""Threads of one rank: a call beside another thread's is refused, one behind it is served."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankPool
from torch import Tensor

from ulysses_ops import (
    Exchange,
    UlyssesCommunicator,
    UlyssesError,
    WindowSpec,
    reserve,
    scatter,
    ulysses_attention,
)
from ulysses_ops.turn import Turn

SHAPE = (1, 8, 4, 2)
CALLS = ("scatter", "exchange", "reserve", "attention")


def shard(rank: int, number: int = 0) -> Tensor:
    return torch.full((1, 4, 4, 2), 100.0 * rank + number)


def call(comm: UlyssesCommunicator, what: str, number: int) -> object:
    x = shard(comm.rank, number)
    if what == "scatter":
        return scatter(x, comm)
    if what == "attention":
        return ulysses_attention(x, x, x, comm)
    if what == "reserve":
        return reserve(comm, [WindowSpec(f"new {number}", "scatter", SHAPE, torch.float32)])
    (window,) = reserve(comm, [WindowSpec("w", "scatter", SHAPE, torch.float32)])
    with Exchange(comm) as exchange:
        exchange.send(x, window)
    return window


def answer(comm: UlyssesCommunicator, what: str) -> str:
    """What a call is told."""
    try:
        call(comm, what, 1)
    except UlyssesError as error:
        return str(error)
    return "served"


def beside(rank: int, world_size: int, is_free: bool) -> list[str]:
    """Rank 0 waits in a scatter, in a thread, while its main thread calls; what that is told."""
    taken: AbstractContextManager[object] = nullcontext()
    if is_free:
        taken = mock.patch.multiple(Turn, take=lambda turn, op: None, give=lambda turn: None)
    told: list[str] = []
    with taken, UlyssesCommunicator(device="cpu", transport="gloo", timeout_s=20.0) as comm:
        for what in CALLS:
            call(comm, what, 0)
        dist.barrier()
        if rank == 1:
            time.sleep(1.0)
            right = scatter(shard(rank), comm)
        else:
            with ThreadPoolExecutor(1, thread_name_prefix="waiting") as other:
                waits = other.submit(scatter, shard(rank), comm)
                time.sleep(0.3)
                told = [answer(comm, what) for what in (CALLS[:1] if is_free else CALLS)]
                right = waits.result()
        for sender, part in enumerate(right.split(4, dim=1)):
            assert bool((part == 100.0 * sender).all())
        for what in CALLS:
            call(comm, what, 2)
    return told


def test_a_call_beside_another_thread_is_refused(ranks: Callable[[int], RankPool]) -> None:
    told, _ = ranks(2).run(beside, False, timeout_s=40)
    assert len(told) == len(CALLS)
    for text in told:
        assert "is in use by thread 'waiting_0' at this moment, and this is 'MainThread'" in text


def test_control_without_turns_the_second_call_is_issued() -> None:
    """It meets the first one's messages, so that the ranks never come to an end together."""
    with (
        RankPool(2, env={"CUDA_VISIBLE_DEVICES": ""}) as pool,
        pytest.raises(AssertionError) as end,
    ):
        pool.run(beside, True, timeout_s=8)
    assert "is in use by thread" not in str(end.value)


def one_after_the_other(rank: int, world_size: int) -> None:
    """Threads that take turns, in the same order on both ranks; and a gradient, from autograd's."""
    with UlyssesCommunicator(device="cpu", transport="gloo", timeout_s=20.0) as comm:
        for number in range(6):
            with ThreadPoolExecutor(1) as thread:
                got = thread.submit(scatter, shard(rank, number), comm).result()
            for sender, part in enumerate(got.split(4, dim=1)):
                assert bool((part == 100.0 * sender + number).all())
        x = shard(rank).requires_grad_()
        with ThreadPoolExecutor(1) as thread:
            thread.submit(scatter(x, comm).sum().backward).result()
        assert x.grad is not None
        assert torch.equal(x.grad, torch.ones_like(x))


def test_threads_may_take_turns(ranks: Callable[[int], RankPool]) -> None:
    ranks(2).run(one_after_the_other, timeout_s=40)


def test_a_thread_may_take_its_turn_again_and_others_then_too() -> None:
    turn = Turn("name")
    with turn.of("outer"), turn.of("inner"):
        pass
    done = threading.Event()

    def other() -> None:
        with turn.of("other"):
            done.set()

    thread = threading.Thread(target=other)
    thread.start()
    thread.join(5.0)
    assert done.is_set()


def test_a_refused_call_gives_its_turn_back() -> None:
    with UlyssesCommunicator(device="cpu", name="turn") as comm:
        (window,) = reserve(comm, [WindowSpec("w", "scatter", (1, 4, 4, 2), torch.float32)])
        with pytest.raises(ValueError, match="scatter_into"), Exchange(comm) as exchange:
            exchange.send(shard(0)[:, :1], window)
        with ThreadPoolExecutor(1) as thread:
            assert thread.submit(scatter, shard(0), comm).result().shape == (1, 4, 4, 2)
