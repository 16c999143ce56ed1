"""The functional pair: one exchange with a fresh result, its fake, and its gradient.

The gradient of each is the other. What was sent to several ranks, in ranges that overlap, has the
sum of their gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NoReturn

import torch
from torch import Tensor

from .collective import exchange
from .communicator import UlyssesCommunicator, find_communicator
from .exchange import Exchange, announce
from .plan import Direction, as_tuple, layout_of_source
from .window_spec import WindowSpec
from .windows import agree, refuse, reserve

# seq_splits, head_splits, and the starts of the dimension that is cut
Splits = tuple[tuple[int, ...] | None, tuple[int, ...] | None, tuple[int, ...] | None]

FUNCTIONAL_NAMES: dict[Direction, str] = {
    "scatter": "ulysses::scatter",
    "gather": "ulysses::gather",
}


@lru_cache(maxsize=1024)
def _functional_spec(
    op: Direction,
    shape: torch.Size,
    dtype: torch.dtype,
    rank: int,
    world_size: int,
    splits: Splits,
) -> WindowSpec:
    layout = layout_of_source(op, op, shape, rank, world_size, *splits)
    return WindowSpec.of_layout(FUNCTIONAL_NAMES[op], layout, dtype)


def _refuse(
    op: Direction, x: Tensor, comm: UlyssesCommunicator, splits: Splits, message: str
) -> NoReturn:
    """Raise for ``x``, together with the other ranks if these splits are what they declare too."""
    held = splits[0 if op == "scatter" else 1]
    if held is None or len(held) != comm.world_size or x.dim() != 4:
        raise ValueError(message)
    shape = list(x.shape)
    shape[1 if op == "scatter" else 2] = held[comm.rank]
    try:
        spec = _functional_spec(op, torch.Size(shape), x.dtype, comm.rank, comm.world_size, splits)
    except ValueError:
        raise ValueError(message) from None
    refuse(comm, [spec], message)


def exchange_once(
    op: Direction,
    x: Tensor,
    world_size: int,
    group_name: str,
    seq_splits: Sequence[int] | None,
    head_splits: Sequence[int] | None,
    starts: Sequence[int] | None,
) -> Tensor:
    """What ``ulysses::scatter`` and ``ulysses::gather`` do."""
    comm = find_communicator(group_name, world_size, op)
    splits = (as_tuple(seq_splits), as_tuple(head_splits), as_tuple(starts))
    try:
        spec = _functional_spec(op, x.shape, x.dtype, comm.rank, world_size, splits)
    except ValueError as error:
        _refuse(op, x, comm, splits, str(error))
    if x.device != comm.device:
        message = f"{op}: x is on {x.device}, the communicator on {comm.device}; move it there"
        raise ValueError(message)
    if comm.copy_engine is None:
        agree(comm, spec)
        announce(comm, spec.key(world_size))
        return exchange(comm, spec.layout(world_size), x, spec.key(world_size))
    (window,) = reserve(comm, [spec])
    with Exchange(comm) as in_flight:
        in_flight.send(x, window)
    return window.tensor.clone()  # a persistent buffer must not pass as fresh: compilers reuse it


def fake(
    op: Direction,
    x: Tensor,
    world_size: int,
    group_name: str,
    seq_splits: Sequence[int] | None,
    head_splits: Sequence[int] | None,
    starts: Sequence[int] | None,
) -> Tensor:
    """A tensor as :func:`exchange_once` returns it, with nothing in it; asks no other rank."""
    # Even splits give every rank the same shape; uneven ones need to know the rank.
    even = seq_splits is None and head_splits is None
    rank = 0 if even else find_communicator(group_name, world_size, op).rank
    layout = layout_of_source(op, op, x.shape, rank, world_size, seq_splits, head_splits, starts)
    return x.new_empty(layout.window_shape(rank))


def save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Keep the exchange; not the data."""
    x, *ctx.exchange, ctx.starts = inputs
    ctx.cut = x.shape


def _summed(
    parts: Tensor, dim: int, sizes: Sequence[int], starts: Sequence[int], to: int
) -> Tensor:
    """Add up what was sent to several ranks: ranges of ``parts``, side by side in ``dim``."""
    shape = list(parts.shape)
    shape[dim] = to
    total = parts.new_zeros(shape)
    first = 0
    for size, start in zip(sizes, starts, strict=True):
        total.narrow(dim, start, size).add_(parts.narrow(dim, first, size))
        first += size
    return total


def scatter_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Gather, and sum what went to several ranks."""
    x_grad = torch.ops.ulysses.gather(grad, *ctx.exchange)
    if ctx.starts is not None:
        x_grad = _summed(x_grad, 2, ctx.exchange[3], ctx.starts, ctx.cut[2])
    return (x_grad, None, None, None, None, None)


def gather_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Scatter, and sum what went to several ranks."""
    x_grad = torch.ops.ulysses.scatter(grad, *ctx.exchange)
    if ctx.starts is not None:
        x_grad = _summed(x_grad, 1, ctx.exchange[2], ctx.starts, ctx.cut[1])
    return (x_grad, None, None, None, None, None)
