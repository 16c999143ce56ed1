"""The functional operators: one exchange with a fresh result, its fake, and its gradient.

The gradient of scatter is gather, and the other way round. What was sent to several ranks, in
ranges that overlap or by all-gather, has the sum of their gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor

from .collective import exchange
from .communicator import UlyssesCommunicator
from .exchange import Exchange, announce
from .names import find_communicator
from .plan import Direction, as_tuple, layout_of_source
from .window_spec import WindowSpec
from .windows import agree, refuse, reserve

# seq_splits, head_splits, and the starts of the dimension that is cut
Splits = tuple[tuple[int, ...] | None, tuple[int, ...] | None, tuple[int, ...] | None]

Functional = Literal["scatter", "gather", "all_gather"]

FUNCTIONAL_NAMES: dict[Functional, str] = {
    "scatter": "ulysses::scatter",
    "gather": "ulysses::gather",
    "all_gather": "ulysses::all_gather",
}


def _direction(op: Functional) -> Direction:
    """Way of the data: an all-gather is a scatter in which every rank needs all heads."""
    return "gather" if op == "gather" else "scatter"


def all_heads(shape: Sequence[int], world_size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Head splits and starts of an all-gather; a shape that is none is refused later."""
    heads = shape[2] if len(shape) == 4 else 0
    return (heads,) * world_size, (0,) * world_size


@lru_cache(maxsize=1024)
def functional_spec(
    op: Functional,
    shape: torch.Size,
    dtype: torch.dtype,
    rank: int,
    world_size: int,
    splits: Splits,
) -> WindowSpec:
    """What a functional exchange of this source meets about; splits are seq, heads, starts."""
    layout = layout_of_source(op, _direction(op), shape, rank, world_size, *splits)
    return WindowSpec.of_layout(FUNCTIONAL_NAMES[op], layout, dtype)


def _refuse(
    op: Functional, x: Tensor, comm: UlyssesCommunicator, splits: Splits, message: str
) -> NoReturn:
    """Raise for ``x``, together with the other ranks if these splits are what they declare too."""
    held = splits[1 if op == "gather" else 0]
    if held is None or len(held) != comm.world_size or x.dim() != 4:
        raise ValueError(message)
    shape = list(x.shape)
    shape[2 if op == "gather" else 1] = held[comm.rank]
    try:
        spec = functional_spec(op, torch.Size(shape), x.dtype, comm.rank, comm.world_size, splits)
    except ValueError:
        raise ValueError(message) from None
    refuse(comm, [spec], message)


def exchange_once(
    op: Functional,
    x: Tensor,
    world_size: int,
    group_name: str,
    seq_splits: Sequence[int] | None,
    head_splits: Sequence[int] | None,
    starts: Sequence[int] | None,
) -> Tensor:
    """What ``ulysses::scatter``, ``ulysses::gather`` and ``ulysses::all_gather`` do."""
    comm = find_communicator(group_name, world_size, op)
    splits = (as_tuple(seq_splits), as_tuple(head_splits), as_tuple(starts))
    try:
        spec = functional_spec(op, x.shape, x.dtype, comm.rank, world_size, splits)
    except ValueError as error:
        _refuse(op, x, comm, splits, str(error))
    if x.device != comm.device:
        message = f"{op}: x is on {x.device}, the communicator on {comm.device}; move it there"
        raise ValueError(message)
    with comm.turn.of(op):
        if comm.copy_engine is None:
            agree(comm, spec)
            announce(comm, spec.key(world_size))
            return exchange(comm, spec.layout(world_size), x, spec.key(world_size))
        (window,) = reserve(comm, [spec])
        with Exchange(comm) as in_flight:
            in_flight.send(x, window)
        # A persistent buffer must not pass as fresh: compilers reuse it.
        return window.tensor.clone()


def fake(
    op: Functional,
    x: Tensor,
    world_size: int,
    group_name: str,
    seq_splits: Sequence[int] | None,
    head_splits: Sequence[int] | None,
    starts: Sequence[int] | None,
) -> Tensor:
    """A tensor as :func:`exchange_once` returns it, with nothing in it; asks no other rank."""
    # Even splits give every rank the same shape; uneven ones need to know the rank.
    even = seq_splits is None and (head_splits is None or op == "all_gather")
    rank = 0 if even else find_communicator(group_name, world_size, op).rank
    splits = (seq_splits, head_splits, starts)
    layout = layout_of_source(op, _direction(op), x.shape, rank, world_size, *splits)
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


def save_all_gather(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Keep the exchange; not the data."""
    _, *ctx.exchange = inputs


def all_gather_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Fetch every rank's gradient of the own rows, and add them up in the order of the ranks."""
    batch, _, heads, head_dim = grad.shape
    parts = torch.ops.ulysses.gather(grad, *ctx.exchange)
    world_size = ctx.exchange[0]
    summed = parts.view(batch, parts.shape[1], world_size, heads, head_dim).sum(dim=2)
    return (summed, None, None, None)
