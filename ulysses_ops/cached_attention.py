"""Attention of a few queries with a long cache of latents that stays where it is.

Instead of bringing the rows to every rank, each rank attends with its own rows and all heads, and
what travels are the parts: ``H * (rank_dim + 1)`` numbers a query and rank, however long the cache.

    a_p, t_p = partial attention with the rows of rank p
    out      = V (sum_p e^{t_p} a_p / sum_p e^{t_p})
"""

from __future__ import annotations

import torch
from torch import Tensor

from .communicator import UlyssesCommunicator
from .kinds import check_kind, check_readable, check_tensors
from .latent import (
    LatentHeads,
    check_latent,
    check_selected,
    merge_partials,
    partial_attention,
)
from .names import check_communicator
from .ops import all_gather
from .sequence_cache import SequenceCache, numbers_beyond


def attend_cached(
    q: Tensor, cache: SequenceCache, comm: UlyssesCommunicator, heads: LatentHeads, counts: Tensor
) -> Tensor:
    """Attention with all rows of the cache.

    Args:
        q: ``(B, Q, H, nope_dim + rope_dim)``, rotated; the same on every rank.
        cache: Of latents, one head a row.
        comm: The communicator of the cache.
        heads: All H heads.
        counts: ``(Q, capacity)`` or ``(B, Q, capacity)``, boolean: which of this rank's slots each
            query may see, ``(0 <= p) & (p <= row)`` with ``p = cache.own_positions()``. An empty
            slot that counts is attended as what is in it: zeros, or an old row.

    Returns:
        ``(B, Q, H, value_dim)`` on every rank, equal to the last bit; zeros for a query that sees
        nothing.

    Raises:
        ValueError: shapes or dtypes do not belong together, ``comm`` is not that of the cache, or
            ``q`` or ``heads.up`` requires grad where gradients are on: a cache has none. Raised
            before any rank waits.
        UlyssesError: as :func:`ulysses_ops.all_gather`.

    Collective, and capturable with ``q`` and ``counts`` as inputs.
    """
    _check("attend_cached", q, cache, comm, heads)
    check_tensors("attend_cached", counts=counts)
    check_readable("attend_cached", counts)
    by_query = (q.shape[1], cache.capacity)
    if counts.dtype != torch.bool or counts.shape not in (by_query, (q.shape[0], *by_query)):
        message = (
            f"attend_cached: counts are {list(counts.shape)}, {counts.dtype}, and must be "
            f"{list(by_query)} or {[q.shape[0], *by_query]}, torch.bool; compare own_positions()"
        )
        raise ValueError(message)
    batch, num_queries = q.shape[:2]
    rows = cache.rows.transpose(1, 2).expand(-1, num_queries, -1, -1)
    return _merged(q, rows, counts.expand(batch, -1, -1), comm, heads)


def attend_cached_rows(
    q: Tensor, cache: SequenceCache, comm: UlyssesCommunicator, heads: LatentHeads, selected: Tensor
) -> Tensor:
    """Attention of each query with the rows selected for it, wherever they are.

    Args:
        q: As for :func:`attend_cached`.
        cache: Of latents, one head a row.
        comm: The communicator of the cache.
        heads: All H heads.
        selected: ``(B, Q, k)`` from :func:`ulysses_ops.indexer.select_sharded_rows` over a cache of
            indexer keys with the same slots: rank times capacity plus slot; -1 selects nothing.
            Whether a slot is empty is not looked at: one that is selected is attended as zeros, or
            as the old row in it, so give empty slots scores of ``-inf``.

    Returns:
        As :func:`attend_cached`.

    Raises:
        ValueError, UlyssesError: as :func:`attend_cached`; on the CPU also where a number is below
            -1 or of no slot. On a GPU that is not looked at, and such a number selects nothing.

    Collective, and capturable.
    """
    _check("attend_cached_rows", q, cache, comm, heads)
    check_tensors("attend_cached_rows", selected=selected)
    check_readable("attend_cached_rows", selected)
    check_selected("attend_cached_rows", selected, q)
    last = cache.capacity * comm.world_size - 1
    beyond = numbers_beyond(selected, -1, last)
    if beyond:
        message = (
            f"attend_cached_rows: selected holds {beyond[0]}, and rows of the cache are from 0 to "
            f"{last}, or -1 for none; pass what select_sharded_rows() returned"
        )
        raise ValueError(message)
    batch, num_queries, k = selected.shape
    local = selected.long() - comm.rank * cache.capacity
    is_mine = (local >= 0) & (local < cache.capacity) & (selected >= 0)
    flat = local.clamp(0, cache.capacity - 1).view(batch, num_queries * k, 1)
    width = cache.rows.shape[-1]
    rows = cache.rows.squeeze(2).gather(1, flat.expand(-1, -1, width))
    return _merged(q, rows.view(batch, num_queries, k, width), is_mine, comm, heads)


def _check(
    op: str, q: Tensor, cache: SequenceCache, comm: UlyssesCommunicator, heads: LatentHeads
) -> None:
    check_communicator(op, comm)
    check_kind(op, "cache", cache, SequenceCache, "a SequenceCache")
    if cache.comm is not comm:
        message = (
            f"{op}: the cache is of communicator {cache.comm.name!r}, and comm is {comm.name!r}; "
            f"pass the one that the cache was made with"
        )
        raise ValueError(message)
    check_tensors(op, q=q)
    check_readable(op, q)
    check_latent(op, q, cache.rows, heads)
    # The all-gather of the parts has a gradient, and every rank would add that of all of them.
    if torch.is_grad_enabled() and (q.requires_grad or heads.up.requires_grad):
        which = "q" if q.requires_grad else "heads.up"
        message = (
            f"{op}: {which} requires grad, and a cache has no gradient; call it under "
            f"torch.no_grad(), or pass {which}.detach()"
        )
        raise ValueError(message)


def _merged(
    q: Tensor, rows: Tensor, counts: Tensor, comm: UlyssesCommunicator, heads: LatentHeads
) -> Tensor:
    attended, totals = partial_attention(heads.absorb(q), rows, counts, heads)
    part = torch.cat([attended, totals.unsqueeze(-1)], dim=-1)
    parts = all_gather(part, comm).unflatten(1, (comm.world_size, q.shape[1])).movedim(1, 0)
    merged = merge_partials(parts[..., :-1], parts[..., -1])
    return heads.values(merged.to(q.dtype))
