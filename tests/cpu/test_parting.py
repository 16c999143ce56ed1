"""A rank that leaves its communicator by an exception: its peers hear so at once, and why.

What one rank alone is refused is told to nobody, since it may call again, and right. Only to leave
the ``with`` block of the communicator says that it will not.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankPool
from torch import Tensor

from ulysses_ops import (
    AgreementError,
    Exchange,
    PeerTimeoutError,
    UlyssesCommunicator,
    UlyssesError,
    Window,
    WindowSpec,
    reserve,
)
from ulysses_ops.agreement import Agreement

LIMIT_S = 6.0
TOLD_S = 2.0
SHAPE = (1, 8, 4, 2)
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}


# ---- meetings ------------------------------------------------------------------------------------


def test_only_what_a_rank_has_not_been_through_waits_for_it() -> None:
    store = dist.HashStore()
    here, gone = (Agreement(store, "session", rank, 2, 5.0) for rank in range(2))
    assert here.parted("exchanges", 0) == ""
    gone.exchanges = 3
    gone.part("ValueError: of the caller")
    assert here.parted("exchanges", 2) == ""
    for number in (3, 4):
        assert here.parted("exchanges", number) == (
            "rank 1, which left the communicator by ValueError: of the caller"
        )
    assert gone.parted("exchanges", 3) == ""
    begin = time.monotonic()
    with pytest.raises(AgreementError, match="reserve: rank 0 waits for rank 1, which left the"):
        here.exchange("reserve", {})
    assert time.monotonic() - begin < 1.0


def test_a_note_that_is_none_is_no_note() -> None:
    store = dist.HashStore()
    here = Agreement(store, "session", 0, 2, 0.5)
    for text in ("[1]", "{}", '{"meetings": "0"}', "not JSON"):
        store.set("session/left/parted/1", text)
        assert here.parted("meetings", 0) == ""
    with pytest.raises(AgreementError, match=r"waited 0.5 s for ranks \[1\]"):
        here.exchange("reserve", {})


# ---- communicators -------------------------------------------------------------------------------


def filled(rank: int, number: int) -> Tensor:
    return torch.full((1, SHAPE[1] // 2, *SHAPE[2:]), 100.0 * rank + number)


def send(comm: UlyssesCommunicator, window: Window, x: Tensor) -> None:
    with Exchange(comm) as exchange:
        exchange.send(x, window)
    for rank, part in enumerate(window.tensor.split(SHAPE[1] // 2, dim=1)):
        assert bool((part == 100.0 * rank + float(x.flatten()[0]) % 100).all())


def new_window(comm: UlyssesCommunicator) -> None:
    reserve(comm, [WindowSpec("new", "scatter", SHAPE, torch.float32)])


def one_leaves(rank: int, world_size: int, where: str, by_exception: bool) -> tuple[str, float]:
    """Rank 1 is refused and leaves; what rank 0, which waits for it, is told, and after how long.

    The process of rank 1 lives on: else its connections, which close, would say it too.
    """
    message, seconds = "", 0.0
    comm = UlyssesCommunicator(device="cpu", transport="gloo", timeout_s=LIMIT_S)
    (window,) = reserve(comm, [WindowSpec("w", "scatter", SHAPE, torch.float32)])
    send(comm, window, filled(rank, 1))
    begin = time.monotonic()
    try:
        with comm:
            if rank == 1 and by_exception:
                send(comm, window, filled(rank, 2)[:, :1])
            elif rank == 0 and where == "exchange":
                send(comm, window, filled(rank, 2))
            elif rank == 0:
                new_window(comm)
    except (ValueError, UlyssesError) as error:
        message, seconds = f"{type(error).__name__}: {error}", time.monotonic() - begin
    time.sleep(0.0 if rank == 0 else LIMIT_S + 2.0 if not by_exception else TOLD_S)
    return message, seconds


@pytest.mark.parametrize("where", ["exchange", "meeting"])
def test_peers_of_a_rank_that_leaves_hear_at_once(where: str) -> None:
    with RankPool(2, env=NO_GPU) as pool:
        (told, seconds), (refused, _) = pool.run(one_leaves, where, True)
    why = "rank 1, which left the communicator by ValueError: scatter_into: x is [1, 1, 4, 2]"
    kind = PeerTimeoutError if where == "exchange" else AgreementError
    assert refused.startswith("ValueError: scatter_into: x is [1, 1, 4, 2]")
    assert told.startswith(kind.__name__)
    assert why in told
    assert seconds < TOLD_S


@pytest.mark.parametrize("where", [pytest.param("exchange", marks=pytest.mark.long), "meeting"])
def test_control_a_rank_that_leaves_in_silence_is_waited_for(where: str) -> None:
    with RankPool(2, env=NO_GPU) as pool:
        (told, seconds), _ = pool.run(one_leaves, where, False)
    assert "which left the communicator" not in told
    assert seconds > LIMIT_S - 0.5


def refused_and_called_again(rank: int, world_size: int) -> None:
    """Rank 1 alone is refused, while rank 0 waits already; then both go on."""
    with UlyssesCommunicator(device="cpu", transport="gloo", timeout_s=LIMIT_S) as comm:
        (window,) = reserve(comm, [WindowSpec("w", "scatter", SHAPE, torch.float32)])
        for number in range(3):
            if rank == 1:
                time.sleep(0.5)
                with pytest.raises(ValueError, match=r"scatter_into: x is \[1, 1, 4, 2\]"):
                    send(comm, window, filled(rank, number)[:, :1])
            send(comm, window, filled(rank, number))


def test_a_refusal_breaks_nothing(ranks: Callable[[int], RankPool]) -> None:
    ranks(2).run(refused_and_called_again, timeout_s=20)
