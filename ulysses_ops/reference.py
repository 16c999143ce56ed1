"""Single-process references: the layout equations, for all ranks at once. They move nothing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .plan import Layout


def scatter_reference(
    shards: Sequence[Tensor], head_splits: Sequence[int] | None = None
) -> list[Tensor]:
    """What :func:`ulysses_ops.scatter` returns on every rank.

    Args:
        shards: ``(B, S_p, H, D)`` of every rank ``p``.
        head_splits: Heads for each rank; even when left out.

    Returns:
        ``(B, S_global, H_r, D)`` for every rank ``r``.
    """
    whole = torch.cat(list(shards), dim=1)
    sizes = [whole.shape[2] // len(shards)] * len(shards) if head_splits is None else head_splits
    return [part.contiguous() for part in whole.split(list(sizes), dim=2)]


def gather_reference(
    shards: Sequence[Tensor], seq_splits: Sequence[int] | None = None
) -> list[Tensor]:
    """What :func:`ulysses_ops.gather` returns on every rank.

    Args:
        shards: ``(B, S_global, H_p, D)`` of every rank ``p``.
        seq_splits: Rows for each rank; even when left out.

    Returns:
        ``(B, S_r, H, D)`` for every rank ``r``.
    """
    whole = torch.cat(list(shards), dim=2)
    sizes = [whole.shape[1] // len(shards)] * len(shards) if seq_splits is None else seq_splits
    return [part.contiguous() for part in whole.split(list(sizes), dim=1)]


def all_gather_reference(shards: Sequence[Tensor]) -> Tensor:
    """What :func:`ulysses_ops.all_gather` returns on every rank: ``(B, S_global, H, D)``.

    Args:
        shards: ``(B, S_p, H, D)`` of every rank ``p``.
    """
    return torch.cat(list(shards), dim=1)


def shard_of(whole: Tensor, layout: Layout, rank: int) -> Tensor:
    """The source that ``rank`` holds of the global tensor ``(B, S_global, H, D)``."""
    if layout.direction == "scatter":
        return whole.narrow(1, layout.seq_offset(rank), layout.seq_splits[rank])
    return whole.narrow(2, layout.head_offset(rank), layout.head_splits[rank])


def window_of(whole: Tensor, layout: Layout, rank: int) -> Tensor:
    """What ``rank`` receives of the global tensor ``(B, S_global, H, D)``."""
    if layout.direction == "scatter":
        return whole.narrow(2, layout.head_offset(rank), layout.head_splits[rank])
    return whole.narrow(1, layout.seq_offset(rank), layout.seq_splits[rank])
