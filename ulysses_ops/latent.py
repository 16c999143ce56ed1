"""Attention over compressed keys and values (MLA): whole, selected rows, and parts to be merged.

A row of the cache is ``(c, r)``: a latent ``c`` of ``rank_dim`` and a rotated key part ``r`` that
all heads share. Head ``h`` has the key ``(U_h c, r)`` and the value ``V_h c``, with ``up[h]`` the
``U_h`` and ``V_h`` of the model one above the other. Two forms give the same:

    expanded:  softmax(scale * (q_n . U c + q_r . r)) V c        keys and values are made first
    absorbed:  V (softmax(scale * ((U^T q_n) . c + q_r . r)) c)   attention happens on the latents

Everything here is local, and plain PyTorch: it says what a kernel in its place has to compute.

Source: DeepSeek-V2, arXiv:2405.04434; the selection of rows DeepSeek-V3.2-Exp.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

QUERY_CHUNK = 64  # query rows whose selected latents are in memory at a time


@dataclass(frozen=True)
class LatentHeads:
    """The heads that a rank attends with.

    Attributes:
        up: ``(H_local, nope_dim + value_dim, rank_dim)``: rows of the up-projection, by head.
        nope_dim: Part of a query that is not rotated; it comes first.
        scale: Of the scores.
    """

    up: Tensor
    nope_dim: int
    scale: float

    @property
    def rank_dim(self) -> int:
        """Size of a latent."""
        return self.up.shape[2]

    @property
    def value_dim(self) -> int:
        """Size of a value of one head."""
        return self.up.shape[1] - self.nope_dim

    def absorb(self, q: Tensor) -> Tensor:
        """Queries that meet cache rows directly: ``(B, S, H_local, rank_dim + rope_dim)``."""
        nope, rope = q.split([self.nope_dim, q.shape[-1] - self.nope_dim], dim=-1)
        moved = torch.einsum("bshn,hnc->bshc", nope, self.up[:, : self.nope_dim])
        return torch.cat([moved, rope], dim=-1)

    def values(self, latents: Tensor) -> Tensor:
        """Attended latents ``(B, S, H_local, rank_dim)`` as values of the heads."""
        return torch.einsum("bshc,hvc->bshv", latents, self.up[:, self.nope_dim :])


def attend_latent(
    q: Tensor,
    rows: Tensor,
    heads: LatentHeads,
    *,
    mask: Tensor | None = None,
    form: Literal["expanded", "absorbed"] = "expanded",
) -> Tensor:
    """Attention with all cache rows.

    Args:
        q: ``(B, S, H_local, nope_dim + rope_dim)``, rotated.
        rows: ``(B, S_kv, 1, rank_dim + rope_dim)``, rotated.
        heads: The heads of ``q``.
        mask: As ``scaled_dot_product_attention`` takes it, over ``(B, H, S, S_kv)``.
        form: ``"absorbed"`` where queries are few, since it makes no keys and values.

    Returns:
        ``(B, S, H_local, value_dim)``.
    """
    if form == "absorbed":
        keys = rows.transpose(1, 2)
        attended = F.scaled_dot_product_attention(
            heads.absorb(q).transpose(1, 2),
            keys,
            keys[..., : heads.rank_dim],
            attn_mask=mask,
            scale=heads.scale,
            enable_gqa=True,
        )
        return heads.values(attended.transpose(1, 2))
    latents, rope = rows.split([heads.rank_dim, rows.shape[-1] - heads.rank_dim], dim=-1)
    made = torch.einsum("bsc,hdc->bhsd", latents.squeeze(2), heads.up)
    nope, values = made.split([heads.nope_dim, heads.value_dim], dim=-1)
    shared = rope.transpose(1, 2).expand(-1, nope.shape[1], -1, -1)
    attended = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        torch.cat([nope, shared], dim=-1),
        values,
        attn_mask=mask,
        scale=heads.scale,
    )
    return attended.transpose(1, 2)


def attend_selected(q: Tensor, rows: Tensor, heads: LatentHeads, selected: Tensor) -> Tensor:
    """Attention of each query with the cache rows that were selected for it, and no others.

    Args:
        q: ``(B, S, H_local, nope_dim + rope_dim)``, rotated.
        rows: ``(B, S_kv, 1, rank_dim + rope_dim)``, rotated.
        heads: The heads of ``q``.
        selected: ``(B, S, k)`` row numbers, whole numbers; a negative one selects nothing.

    Returns:
        ``(B, S, H_local, value_dim)``; zeros where nothing is selected.
    """
    parts = [
        partial_attention(heads.absorb(some), *_picked(rows, chosen), heads)[0]
        for some, chosen in zip(
            q.split(QUERY_CHUNK, dim=1), selected.split(QUERY_CHUNK, dim=1), strict=True
        )
    ]
    return heads.values(torch.cat(parts, dim=1).to(q.dtype))


def _picked(rows: Tensor, selected: Tensor) -> tuple[Tensor, Tensor]:
    """The selected rows ``(B, S, k, width)``, and which of them count."""
    batch, num_queries, k = selected.shape
    is_there = selected >= 0
    flat = selected.clamp(min=0).long().view(batch, num_queries * k, 1)
    flat = flat.expand(-1, -1, rows.shape[-1])
    picked = rows.squeeze(2).gather(1, flat)
    return picked.view(batch, num_queries, k, rows.shape[-1]), is_there


def partial_attention(
    absorbed: Tensor, rows: Tensor, counts: Tensor, heads: LatentHeads
) -> tuple[Tensor, Tensor]:
    """Attention with some of the rows, and what is needed to merge it with that of the others.

    Args:
        absorbed: Queries ``(B, S, H, rank_dim + rope_dim)`` from :meth:`LatentHeads.absorb`.
        rows: Rows of each query, ``(B, S, n, rank_dim + rope_dim)``; one set for all queries may
            come expanded.
        counts: ``(B, S, n)``, which of them count.
        heads: For its scale and sizes.

    Returns:
        In fp32: attended latents ``(B, S, H, rank_dim)``, and the logarithm of the sum of
        exponentials ``(B, S, H)``; zeros and ``-inf`` where nothing counts. What is in a row that
        does not count, be it NaN, changes nothing.
    """
    # A weight of zero is not enough: zero times NaN is NaN.
    rows = rows.masked_fill(~counts.unsqueeze(-1), 0.0)
    scores = torch.einsum("bshd,bsnd->bshn", absorbed.float(), rows.float()) * heads.scale
    scores = scores.masked_fill(~counts.unsqueeze(2), -torch.inf)
    total = scores.logsumexp(dim=-1)
    safe = torch.where(total.isneginf(), 0.0, total)
    weights = (scores - safe.unsqueeze(-1)).exp()
    return torch.einsum("bshn,bsnc->bshc", weights, rows[..., : heads.rank_dim].float()), total


def merge_partials(attended: Tensor, totals: Tensor) -> Tensor:
    """Attention with all rows, from that with disjoint parts of them.

    ``sum_p e^{t_p} a_p / sum_p e^{t_p}``; zeros where no part has a row.

    Args:
        attended: ``(P, ..., C)`` of :func:`partial_attention`, by part.
        totals: ``(P, ...)``.
    """
    whole = totals.logsumexp(dim=0, keepdim=True)
    safe = torch.where(whole.isneginf(), 0.0, whole)
    weights = (totals - safe).exp()
    return (weights.unsqueeze(-1) * attended).sum(dim=0)
