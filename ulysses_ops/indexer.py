"""Which rows a query attends to: the scores of a lightning indexer, and the choice.

    I[t, s] = sum_h w[t, h] * relu(scale * q[t, h] . k[s])

Two ways to choose the ``k`` best of all rows, which give the same: with all keys on every rank
(:func:`select_rows`, for many queries), or with keys where they are (:func:`select_sharded_rows`,
for few queries over a long cache: 8 bytes a candidate travel, and no key).

Source: DeepSeek-V3.2-Exp.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .communicator import UlyssesCommunicator
from .kinds import check_tensors, shown
from .names import check_communicator
from .ops import all_gather
from .topk import distributed_topk, top_rows

QUERY_CHUNK = 256  # query rows whose scores by head are in memory at a time


def index_scores(q: Tensor, weights: Tensor, keys: Tensor, scale: float) -> Tensor:
    """Scores of every query with every key, in fp32.

    Args:
        q: ``(B, Q, H_i, D_i)``.
        weights: ``(B, Q, H_i)``.
        keys: ``(B, S, 1, D_i)``.
        scale: Of the products.

    Returns:
        ``(B, Q, S)``.

    Raises:
        ValueError: shapes do not belong together, a size of 1 is not stretched; or ``scale`` is no
            finite number.
    """
    check_tensors("index_scores", q=q, weights=weights, keys=keys)
    is_number = isinstance(scale, int | float) and not isinstance(scale, bool)
    if not is_number or not math.isfinite(scale):
        message = f"index_scores: scale={shown(scale)} must be a finite number"
        raise ValueError(message)
    fits = q.dim() == keys.dim() == 4 and weights.shape == q.shape[:3]
    if not fits or (keys.shape[0], *keys.shape[2:]) != (q.shape[0], 1, q.shape[3]):
        message = (
            f"index_scores: q {list(q.shape)}, weights {list(weights.shape)} and keys "
            f"{list(keys.shape)} must be (B, Q, H_i, D_i), (B, Q, H_i) and (B, S, 1, D_i)"
        )
        raise ValueError(message)
    columns = keys.squeeze(2).float()
    parts = []
    for some, weight in zip(
        q.split(QUERY_CHUNK, 1), weights.float().split(QUERY_CHUNK, 1), strict=True
    ):
        products = torch.einsum("bqhd,bsd->bqhs", some.float(), columns) * scale
        parts.append(torch.einsum("bqh,bqhs->bqs", weight, products.relu()))
    return torch.cat(parts, dim=1)


def _chosen(values: Tensor, columns: Tensor) -> Tensor:
    """Columns as 32-bit numbers; -1 for those that no query may see."""
    return torch.where(values.isneginf(), -1, columns).int()


def select_rows(
    scores: Tensor,
    k: int,
    comm: UlyssesCommunicator,
    *,
    seq_splits: tuple[int, ...] | None = None,
) -> Tensor:
    """The choice of every query, on every rank, where each rank has the scores of its queries.

    Args:
        scores: ``(B, S_local, S_kv)``: own queries with all rows; ``-inf`` where a query may not
            look.
        k: Rows to choose, at most ``S_kv``.
        comm: An open communicator.
        seq_splits: Queries of each rank; alike on all when left out.

    Returns:
        ``(B, S_global, k)`` int32, best first, -1 where there was nothing more to choose. Of equal
        scores the lower row.

    Raises:
        ValueError, UlyssesError: as :func:`ulysses_ops.topk.top_rows` and
            :func:`ulysses_ops.all_gather`.

    Collective.
    """
    check_communicator("select_rows", comm)
    check_tensors("select_rows", scores=scores)
    if scores.dim() != 3:
        message = (
            f"select_rows: scores must have shape (B, S_local, S_kv), got {list(scores.shape)}"
        )
        raise ValueError(message)
    chosen = _chosen(*top_rows(scores, k))
    return all_gather(chosen.unsqueeze(2), comm, seq_splits=seq_splits).squeeze(2)


def select_sharded_rows(
    scores: Tensor,
    k: int,
    comm: UlyssesCommunicator,
    *,
    seq_splits: tuple[int, ...] | None = None,
) -> Tensor:
    """The same where each rank has the scores of all queries with its own rows.

    Args:
        scores: ``(B, Q, S_local)``, ``-inf`` where a query may not look.
        k: Rows to choose, at most ``S_global``.
        comm: An open communicator.
        seq_splits: Rows of each rank; alike on all when left out.

    Returns:
        ``(B, Q, k)`` int32 on every rank, as :func:`select_rows`.

    Raises:
        ValueError, UlyssesError: as :func:`ulysses_ops.topk.distributed_topk`.

    Collective.
    """
    return _chosen(*distributed_topk(scores, k, comm, seq_splits=seq_splits))
