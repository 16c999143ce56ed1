"""A rank on copy engines is refused alone: it may call again, or leave, which its peers hear."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from on_gpu import communicator, expected, filled, one_window, send, settle
from rank_pool import RankPool
from torch import Tensor

from ulysses_ops import UlyssesCommunicator, UlyssesError
from ulysses_ops.graphs import CapturedStep, capture_step
from ulysses_ops.windows import Window

SHAPE = (1, 64, 8, 64)
LIMIT_S = 20.0  # that nobody is to wait for
TOLD_S = 2.0


def copied(comm: UlyssesCommunicator, window: Window) -> CapturedStep:
    """One round as a graph; warm for eager rounds too."""
    return capture_step(
        comm, lambda x: send(comm, window, x).clone(), [filled(window, comm.rank, 0)]
    )


def call(
    where: str, comm: UlyssesCommunicator, window: Window, step: CapturedStep, x: Tensor
) -> None:
    if where == "eager":
        send(comm, window, x)
    elif where == "graph":
        step.replay(x)
    else:
        one_window(comm, SHAPE, name="new")
    comm.synchronize()


def one_leaves(rank: int, world_size: int, where: str, is_told: bool) -> tuple[str, float]:
    """Rank 1 leaves its communicator by what it is refused; what rank 0 is told, and when."""
    limit_s = LIMIT_S if is_told else TOLD_S + 1.0
    message, seconds = "", 0.0
    comm = communicator(timeout_s=LIMIT_S)
    window = one_window(comm, SHAPE)
    step = copied(comm, window)
    settle()
    comm.set_timeout(limit_s)
    begin = time.monotonic()
    try:
        with comm:
            if rank == 1 and not is_told:
                time.sleep(limit_s + 2.0)  # alive, and silent
            elif rank == 1:
                bad = filled(window, rank, 2)[:, :1]
                call("graph" if where == "graph" else "eager", comm, window, step, bad)
            else:
                call(where, comm, window, step, filled(window, rank, 2))
    except (ValueError, UlyssesError) as error:
        message, seconds = str(error), time.monotonic() - begin
    dist.barrier()
    return message, seconds


@pytest.mark.parametrize("where", ["eager", "graph", "meeting"])
def test_peers_of_a_rank_that_leaves_hear_at_once(pair: RankPool, where: str) -> None:
    (told, seconds), (refused, _) = pair.run(one_leaves, where, True)
    assert refused
    assert seconds < TOLD_S
    if where == "meeting":
        assert "waits for rank 1, which left the communicator by ValueError: " in told
    else:
        assert "rank 1 closed its communicator, and #" in told


def test_control_a_rank_that_is_silent_is_waited_for(pair: RankPool) -> None:
    (told, seconds), _ = pair.run(one_leaves, "eager", False)
    assert "closed its communicator" not in told
    assert seconds > TOLD_S


def refused_and_called_again(rank: int, world_size: int) -> None:
    """Rank 1 alone is refused, eagerly and at a replay, while rank 0 waits; both then go on."""
    with communicator(timeout_s=LIMIT_S) as comm:
        window = one_window(comm, SHAPE)
        step = copied(comm, window)
        settle()
        for number in range(6):
            if rank == 1:
                time.sleep(0.2)
                bad = filled(window, rank, number)[:, :1]
                with pytest.raises(ValueError, match=r"x is \[|replay: input"):
                    step.replay(bad) if number % 2 else send(comm, window, bad)
            x = filled(window, rank, number)
            got = step.replay(x) if number % 2 else send(comm, window, x)
            comm.synchronize()
            assert torch.equal(got, expected(window, number))
        settle()
        step.close()


def test_a_refusal_breaks_nothing(pair: RankPool) -> None:
    pair.run(refused_and_called_again)
