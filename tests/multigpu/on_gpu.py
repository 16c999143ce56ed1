"""What the tasks of this folder share: communicators, delays, faults, expected values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from rank_pool import RankError, RankPool
from torch import Tensor

from ulysses_ops import Exchange, UlyssesCommunicator, WindowSpec, reserve
from ulysses_ops.plan import Layout
from ulysses_ops.reference import shard_of, window_of
from ulysses_ops.windows import Window

CYCLES_PER_MS = 1_900_000  # of an H200 at its usual clock; tests need the order of magnitude
NO_OPEN, NO_WAIT = 1, 2  # csrc/cuda/handshake.h


def communicator(**options: Any) -> UlyssesCommunicator:
    """A communicator of the current device that insists on the copy engines."""
    device = torch.device("cuda", torch.cuda.current_device())
    shared = torch.cuda.device_count() < dist.get_world_size()
    usual = {"transport": "ce", "timeout_s": 20.0, "allow_shared_devices": shared}
    return UlyssesCommunicator(device=device, **{**usual, **options})


def delay(milliseconds: float) -> None:
    """Hold the current stream."""
    torch.cuda._sleep(int(milliseconds * CYCLES_PER_MS))


@contextmanager
def fault(comm: UlyssesCommunicator, kind: int) -> Iterator[None]:
    """Take one half of the handshake away."""
    assert comm.copy_engine is not None
    torch.ops.ulysses._ce_set_fault(comm.copy_engine.number, kind)
    yield
    torch.ops.ulysses._ce_set_fault(comm.copy_engine.number, 0)


def is_seen(pool: RankPool, task: Callable[..., int], *args: Any, **options: Any) -> bool:
    """Whether ranks that do not wait read what is stale, in some replay of a task that counts it.

    With no wait between them, two openings on one word may also lose a signal, and the watchdog
    gives up: seen as well.
    """
    try:
        return max(pool.run(task, *args, **options)) > 0
    except RankError as error:
        return "gave up" in str(error)


def one_window(
    comm: UlyssesCommunicator,
    shape: tuple[int, int, int, int],
    direction: str = "scatter",
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Window:
    """A window of this global shape."""
    name = options.pop("name", "test")
    spec = WindowSpec(name, direction, shape, dtype, **options)  # type: ignore[arg-type]
    return reserve(comm, [spec])[0]


def filled(window: Window, rank: int, round_number: int) -> Tensor:
    """This rank's source: every element says who sent it in which round."""
    value = sent_value(rank, round_number)
    return torch.full(window.source_shape, value, dtype=window.spec.dtype, device="cuda")


def sent_value(rank: int, round_number: int) -> float:
    """What :func:`filled` puts into every element."""
    return float(rank * 1000 + round_number)


def expected(window: Window, round_number: int) -> Tensor:
    """What the window holds when every rank has sent :func:`filled` of this round."""
    layout = window.layout
    dim = 1 if layout.direction == "scatter" else 2
    sizes = layout.seq_splits if layout.direction == "scatter" else layout.head_splits
    out = torch.empty(tuple(window.tensor.shape), dtype=window.spec.dtype, device="cuda")
    for rank, part in enumerate(out.split(list(sizes), dim=dim)):
        part.fill_(sent_value(rank, round_number))
    return out


def source_and_result(whole: Tensor, layout: Layout, rank: int) -> tuple[Tensor, Tensor]:
    """What this rank sends and receives of a global tensor, on the current GPU."""
    return shard_of(whole, layout, rank).cuda(), window_of(whole, layout, rank)


def send(comm: UlyssesCommunicator, window: Window, x: Tensor) -> Tensor:
    """One whole round; returns the window's tensor."""
    with Exchange(comm) as exchange:
        exchange.send(x, window)
    return window.tensor


def settle() -> None:
    """Everything issued so far is done on every rank."""
    torch.cuda.synchronize()
    dist.barrier()
