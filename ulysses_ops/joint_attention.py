"""Attention of one layer, each tensor sent as soon as it is computed; text rows beside image rows.

NOTE [joint text]: some models attend over image rows and text rows together. Rows that are sharded
travel like image rows, and the order of the sequence becomes that of the ranks: rank 0's rows, then
rank 1's. Without a mask attention does not depend on the order of its keys; a mask has to be put
into the same order (:func:`interleave_keys`). Rows that do not divide by the number of ranks are
replicated: every rank holds all of them, attends with its own heads of them, and gets the other
heads of the result from the other ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .attention import AttentionKernel, AttentionWindows, reserve_attention, sdpa
from .communicator import UlyssesCommunicator
from .exchange import Exchange
from .ops import gather, scatter
from .window_spec import WindowSpec
from .windows import Window, reserve

Producer = Callable[[], Tensor]  # () -> (B, S, H, D)


@dataclass(frozen=True)
class ReplicatedRows:
    """Rows of the sequence that every rank holds alike, while the others are sharded.

    Attributes:
        count: How many; 0 where all rows are sharded.
        at_start: Whether they come before the sharded rows, or after them.
    """

    count: int = 0
    at_start: bool = True

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Views of the replicated and of the sharded rows of ``x``, ``(B, S, ...)``."""
        if self.at_start:
            return x[:, : self.count], x[:, self.count :]
        first = x.shape[1] - self.count
        return x[:, first:], x[:, :first]

    def join(self, replicated: Tensor, sharded: Tensor) -> Tensor:
        """Undo :meth:`split`; a copy, unless no row is replicated."""
        if self.count == 0:
            return sharded
        parts = (replicated, sharded) if self.at_start else (sharded, replicated)
        return torch.cat(parts, dim=1)


NONE_REPLICATED = ReplicatedRows()


def attend_as_computed(
    comm: UlyssesCommunicator,
    v: Producer,
    k: Producer,
    q: Producer,
    *,
    attention: AttentionKernel = sdpa,
    replicated: ReplicatedRows = NONE_REPLICATED,
    copy_out: bool = True,
) -> Tensor:
    """``out = gather(attention(scatter(q()), scatter(k()), scatter(v())))``, V first.

    ``v`` leaves while ``k`` is computed, ``k`` while ``q`` is: the copies hide behind projections,
    norms and rotations.

    Args:
        comm: An open communicator.
        v: Computes the values, ``(B, S_local + count, H, D)``; may return a view of a fused
            projection.
        k: Computes the keys, of the same shape.
        q: Computes the queries, of the same shape.
        attention: The kernel, on ``(B, S_global + count, H_local, D)``; replicated rows are where
            they were, sharded ones in the order of the ranks.
        replicated: Rows that every rank holds alike.
        copy_out: Return a tensor of the caller's own. Without it the result may be a window, valid
            only until the next attention of this shape.

    Returns:
        ``(B, S_local + count, H, D)``, ready on the current stream.

    Raises:
        ValueError: H is not divisible by ``comm.world_size``; raised before any rank waits.
        UlyssesError: closed, or a capture needs windows that are not reserved.

    Collective: every rank calls it with matching shapes, in the same order. Where gradients are
    enabled or code is being compiled, the functional operators are used instead of windows.

    Source: DeepSpeed-Ulysses, arXiv:2309.14509.
    """
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return _attend_functionally(comm, (v, k, q), attention, replicated)
    values = v()
    windows, own_rows = _reserve(comm, values, replicated)
    kept: list[Tensor] = []
    with Exchange(comm) as exchange:
        for produce, window in ((None, windows.v), (k, windows.k), (q, windows.q)):
            whole = values if produce is None else produce()
            rows, sharded = replicated.split(whole)
            exchange.send(sharded, window)
            kept.append(_own_heads(rows, comm))
    values, keys, queries = (
        replicated.join(rows, window.tensor)
        for rows, window in zip(kept, (windows.v, windows.k, windows.q), strict=True)
    )
    rows, sharded = replicated.split(attention(queries, keys, values))
    with Exchange(comm) as exchange:
        exchange.send(sharded, windows.out)
        if own_rows is not None:
            _send_to_all(exchange, rows.flatten(2), own_rows, comm)
    out = windows.out.tensor
    if own_rows is not None:
        return replicated.join(_all_heads(own_rows.tensor.squeeze(2), comm, out), out)
    return out.clone() if copy_out else out


def replicate_rows(comm: UlyssesCommunicator, x: Tensor) -> Tensor:
    """Give every rank the rows of all ranks: ``y[b, p * R + r, e] = x_p[b, r, e]``.

    Args:
        comm: An open communicator.
        x: ``(B, R, E)``, the same shape on every rank.

    Returns:
        ``(B, R * world_size, E)``, owned by the caller, ready on the current stream.

    Raises:
        UlyssesError: closed, or a capture needs a window that is not reserved.

    Collective: as :func:`attend_as_computed`. It is a scatter in which the part for every rank is
    the same.
    """
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return _replicate_functionally(comm, x)
    window = _row_window(comm, "rows", x.shape, x.dtype)
    with Exchange(comm) as exchange:
        _send_to_all(exchange, x, window, comm)
    return window.tensor.squeeze(2).clone()


def interleave_keys(mask: Tensor, count: int, world_size: int) -> Tensor:
    """Put a mask over keys into the order in which sharded keys arrive.

    Args:
        mask: ``(..., S)`` over the whole sequence: ``count`` keys of one kind, then
            those of another.
        count: Number of keys of the first kind; each kind is divisible by ``world_size``.
        world_size: Number of ranks; each sends its shard of the first kind, then of the second.

    Returns:
        ``(..., S)``: rank by rank, its keys of the first kind and then of the second.
    """
    kinds = (mask[..., :count], mask[..., count:])
    return torch.cat([kind.unflatten(-1, (world_size, -1)) for kind in kinds], dim=-1).flatten(-2)


# ---- windows -------------------------------------------------------------------------------------


def _reserve(
    comm: UlyssesCommunicator, values: Tensor, replicated: ReplicatedRows
) -> tuple[AttentionWindows, Window | None]:
    batch, rows, heads, head_dim = values.shape
    shape = (batch, rows - replicated.count, heads, head_dim)
    windows = reserve_attention(comm, shape, shape, values.dtype)
    if replicated.count == 0:
        return windows, None
    part = (batch, replicated.count, heads // comm.world_size * head_dim)
    return windows, _row_window(comm, "attention.replicated", part, values.dtype)


def _row_window(
    comm: UlyssesCommunicator, name: str, shape: tuple[int, ...], dtype: torch.dtype
) -> Window:
    """A window ``(B, R * world_size, 1, E)`` for a part ``(B, R, E)`` of every rank."""
    batch, rows, elems = shape
    whole = (batch, rows * comm.world_size, comm.world_size, elems)
    return reserve(comm, [WindowSpec(name, "scatter", whole, dtype)])[0]


def _send_to_all(exchange: Exchange, x: Tensor, window: Window, comm: UlyssesCommunicator) -> None:
    part = x.unsqueeze(2)
    for step in range(1, comm.world_size):
        exchange.send(part, window, peer=(comm.rank + step) % comm.world_size)
    if comm.world_size == 1:
        exchange.send(part, window)
    else:
        window.own_view.copy_(part)


def _own_heads(x: Tensor, comm: UlyssesCommunicator) -> Tensor:
    """The heads ``(B, count, H_local, D)`` with which this rank attends."""
    heads = x.shape[2] // comm.world_size
    return x.narrow(2, comm.rank * heads, heads)


def _all_heads(x: Tensor, comm: UlyssesCommunicator, like: Tensor) -> Tensor:
    """``(B, world_size * count, H_local * D)``, rank by rank -> ``(B, count, H, D)``."""
    by_rank: Tensor = x.unflatten(1, [comm.world_size, -1]).transpose(1, 2)
    return by_rank.reshape(x.shape[0], -1, *like.shape[2:])


# ---- functional operators ------------------------------------------------------------------------


def _attend_functionally(
    comm: UlyssesCommunicator,
    producers: tuple[Producer, Producer, Producer],
    attention: AttentionKernel,
    replicated: ReplicatedRows,
) -> Tensor:
    wholes = []
    for produce in producers:
        rows, sharded = replicated.split(produce())
        wholes.append(replicated.join(_own_heads(rows, comm), scatter(sharded, comm)))
    values, keys, queries = wholes
    rows, sharded = replicated.split(attention(queries, keys, values))
    out = gather(sharded, comm)
    if replicated.count == 0:
        return out
    everywhere = _replicate_functionally(comm, rows.flatten(2))
    return replicated.join(_all_heads(everywhere, comm, out), out)


def _replicate_functionally(comm: UlyssesCommunicator, x: Tensor) -> Tensor:
    parts = x.unsqueeze(2).expand(-1, -1, comm.world_size, -1)
    return scatter(parts, comm).squeeze(2)
