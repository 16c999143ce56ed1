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

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from .kinds import check_kind, check_tensors, is_whole, shown

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

    def __post_init__(self) -> None:
        """Refuse what are no heads.

        Raises:
            ValueError: ``up`` has not three dimensions, ``nope_dim`` leaves no values, or ``scale``
                is no number.
        """
        check_kind("LatentHeads", "up", self.up, Tensor, "a tensor")
        if self.up.dim() != 3:
            message = (
                f"LatentHeads: up must have shape (H_local, nope_dim + value_dim, rank_dim), got "
                f"{list(self.up.shape)}"
            )
            raise ValueError(message)
        if not is_whole(self.nope_dim) or not 0 <= self.nope_dim < self.up.shape[1]:
            message = (
                f"LatentHeads: nope_dim={shown(self.nope_dim)} must be a whole number from 0 and "
                f"below the {self.up.shape[1]} rows of a head in up"
            )
            raise ValueError(message)
        is_number = isinstance(self.scale, int | float) and not isinstance(self.scale, bool)
        if not is_number or not math.isfinite(self.scale):
            message = f"LatentHeads: scale={shown(self.scale)} must be a finite number"
            raise ValueError(message)

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


def check_latent(op: str, q: Tensor, rows: Tensor, heads: LatentHeads) -> None:
    """Refuse queries, cache rows and heads that do not belong together.

    Sizes of 1 would be stretched, and several heads of a cache be taken for something else.

    Raises:
        ValueError: one is of a wrong kind, or their shapes or dtypes differ.
    """
    check_tensors(op, q=q, rows=rows)
    check_kind(op, "heads", heads, LatentHeads, "LatentHeads")
    if rows.dim() != 4 or rows.shape[2] != 1 or rows.shape[3] < heads.rank_dim:
        message = (
            f"{op}: rows of the cache are {list(rows.shape)}, and must be (B, S, 1, rank_dim + "
            f"rope_dim) with rank_dim={heads.rank_dim}; latents have one head"
        )
        raise ValueError(message)
    width = heads.nope_dim + rows.shape[3] - heads.rank_dim
    expected = [rows.shape[0], "S", heads.up.shape[0], width]
    if q.dim() != 4 or [q.shape[0], "S", *q.shape[2:]] != expected:
        message = (
            f"{op}: q is {list(q.shape)}, and must be {expected} for rows {list(rows.shape)}, "
            f"up {list(heads.up.shape)} and nope_dim={heads.nope_dim}"
        )
        raise ValueError(message)
    if not q.dtype == rows.dtype == heads.up.dtype:
        message = (
            f"{op}: q is {q.dtype}, rows {rows.dtype} and up {heads.up.dtype}; give all one dtype"
        )
        raise ValueError(message)


def check_selected(op: str, selected: Tensor, q: Tensor) -> None:
    """Refuse row numbers that are none, or not for these queries.

    Raises:
        ValueError: they are not ``(B, S, k)`` whole numbers.
    """
    check_tensors(op, selected=selected)
    is_whole_type = not (selected.is_floating_point() or selected.is_complex())
    if selected.dtype == torch.bool or not is_whole_type:
        message = (
            f"{op}: selected is {selected.dtype}, and must be row numbers; for a mask, pass "
            f"mask.nonzero() filled up with -1"
        )
        raise ValueError(message)
    if selected.dim() != 3 or selected.shape[:2] != q.shape[:2]:
        message = (
            f"{op}: selected is {list(selected.shape)}, and must be "
            f"{[*q.shape[:2], 'k']} for q {list(q.shape)}"
        )
        raise ValueError(message)


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

    Raises:
        ValueError: shapes or dtypes do not belong together, or ``form`` is unknown.
    """
    check_latent("attend_latent", q, rows, heads)
    if form not in ("expanded", "absorbed"):
        message = f"attend_latent: form={shown(form)} must be 'expanded' or 'absorbed'"
        raise ValueError(message)
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

    Raises:
        ValueError: shapes or dtypes do not belong together.
    """
    check_latent("attend_selected", q, rows, heads)
    check_selected("attend_selected", selected, q)
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
