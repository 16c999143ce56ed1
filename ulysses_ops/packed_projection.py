"""The first stage of an attention layer in fewer GEMMs, from copies of the weights.

The rows of all projections for one rank lie side by side in a copy, so that one GEMM gives them:

::

    packed[r] = (W_q[rows of r], W_k[rows of r], W_v[rows of r])      (W, rows of a rank, width)

It computes what ``fused_projection.project_fused`` computes; ``project_in_epilogue`` does so
without a kernel behind the GEMM.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from .exchange import Exchange
from .fused_projection import FusedKernel, Parts
from .peers_first import Projected, send_parts
from .progress import Progress
from .qkv_projection import project_qkv_into
from .schedule import peer_groups


@dataclass(frozen=True, eq=False)
class Packed:
    """Several projections of every rank.

    Attributes:
        weight: ``(W, rows of a rank, width)``.
        bias: ``(W, rows of a rank)``, or none.
        heads: Heads of a rank of each projection, in the order of their rows.
        head_dim: D.
    """

    weight: Tensor
    bias: Tensor | None
    heads: tuple[int, ...]
    head_dim: int

    def first(self, count: int) -> Packed:
        """The first ``count`` projections alone, as views."""
        heads = self.heads[:count]
        rows = sum(heads) * self.head_dim
        bias = None if self.bias is None else self.bias[:, :rows]
        return replace(self, weight=self.weight[:, :rows], bias=bias, heads=heads)

    def rows_of(self, ranks: range) -> tuple[Tensor, Tensor | None]:
        """Weight ``(rows, width)`` and bias of these ranks."""
        chosen = slice(ranks.start, ranks.stop)
        bias = None if self.bias is None else self.bias[chosen].flatten()
        return self.weight[chosen].flatten(0, 1), bias

    def multiply(self, x: Tensor, ranks: range) -> list[list[Tensor]]:
        """By projection, a view ``(B, S_local, heads, D)`` for each of these ranks; one GEMM."""
        rows = F.linear(x, *self.rows_of(ranks))
        by_rank = rows.unflatten(-1, (len(ranks), -1, self.head_dim)).unbind(2)
        parts = [part.split(self.heads, dim=2) for part in by_rank]
        return [list(of_one) for of_one in zip(*parts, strict=True)]


@dataclass(frozen=True, eq=False)
class _Kept:
    """A copy, and what it is of: memory that is held, so that no other tensor can lie there."""

    packed: Packed
    sources: tuple[Tensor | None, ...]
    versions: tuple[int | None, ...]

    def is_of(self, tensors: Sequence[Tensor | None]) -> bool:
        return self.versions == _versions_of(tensors) and all(
            one is other or (one is not None and other is not None and _is_same(one, other))
            for one, other in zip(self.sources, tensors, strict=True)
        )


class PackedWeights:
    """The copy that one layer keeps, made at first use.

    A weight that was changed in place, or replaced, is copied anew at the next call, into the same
    memory, which captured graphs read. A replay copies nothing: graphs see a change after the next
    call outside of them. A change through ``.data`` is counted by no version and not seen at all.

    The host waits for the GPU where it copies: calls and replays on any stream may have read the
    old copy, and may read the new one.
    """

    def __init__(self) -> None:
        """Start with none."""
        self._kept: _Kept | None = None

    def of(self, *projections: Projected) -> Packed:
        """Pack these projections, the same in each call, or what is kept if it is still right."""
        tensors = _tensors_of(projections)
        kept = self._kept
        if kept is not None and kept.is_of(tensors):
            return kept.packed
        fresh = _pack(projections)
        if fresh.weight.is_cuda and torch.cuda.is_current_stream_capturing():
            return fresh  # part of the graph, which copies in each replay: nothing has run yet
        if kept is not None and _is_alike(kept.packed, fresh):
            _settle(fresh.weight)
            kept.packed.weight.copy_(fresh.weight)
            if kept.packed.bias is not None and fresh.bias is not None:
                kept.packed.bias.copy_(fresh.bias)
            fresh = kept.packed
        _settle(fresh.weight)
        sources = tuple(None if tensor is None else tensor.detach() for tensor in tensors)
        self._kept = _Kept(fresh, sources, _versions_of(tensors))
        return fresh


def can_keep(projections: Sequence[Projected]) -> bool:
    """Whether changes can be told: tensors made in inference mode count no versions."""
    tensors = [tensor for tensor in _tensors_of(projections) if tensor is not None]
    return not any(tensor.is_inference() for tensor in tensors)


def _tensors_of(projections: Sequence[Projected]) -> list[Tensor | None]:
    """Weight and bias of each, in its place: a bias may move from one projection to another."""
    return [tensor for one in projections for tensor in (one.weight, one.bias)]


def _versions_of(tensors: Sequence[Tensor | None]) -> tuple[int | None, ...]:
    return tuple(None if tensor is None else tensor._version for tensor in tensors)


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Whether they are the same elements of the same memory: a transposed view is not."""
    return (
        one.data_ptr() == other.data_ptr()
        and one.shape == other.shape
        and one.stride() == other.stride()
        and one.dtype == other.dtype
    )


def _settle(tensor: Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


def _is_alike(one: Packed, other: Packed) -> bool:
    return (
        one.weight.shape == other.weight.shape
        and one.weight.dtype == other.weight.dtype
        and one.weight.device == other.weight.device
        and (one.bias is None) == (other.bias is None)
    )


def _pack(projections: Sequence[Projected]) -> Packed:
    layout = projections[0].window.layout
    by_rank = (layout.world_size, -1)
    bias = None
    if any(one.bias is not None for one in projections):
        rows = [
            one.weight.new_zeros(one.weight.shape[0]) if one.bias is None else one.bias.detach()
            for one in projections
        ]
        bias = torch.cat([part.unflatten(0, by_rank) for part in rows], dim=1)
    weights = [one.weight.detach().unflatten(0, by_rank) for one in projections]
    heads = tuple(part.shape[1] // layout.head_dim for part in weights)
    return Packed(torch.cat(weights, dim=1), bias, heads, layout.head_dim)


# ---- the stage -----------------------------------------------------------------------------------


def project_packed(
    x: Tensor,
    projected: tuple[Projected, Projected, Projected],
    kernel: FusedKernel,
    rank: int,
    split: Literal["peers", "destinations"],
    weights: PackedWeights,
    exchange: Exchange,
) -> None:
    """As :func:`ulysses_ops.fused_projection.project_fused`, which says what is written when."""
    v, k, q = projected
    everyone, own = range(v.window.layout.world_size), range(rank, rank + 1)
    groups = peer_groups(len(everyone), rank, split)
    if kernel.kind.norm == "across_heads":  # rows of Q and K are multiplied whole
        pair = weights.of(q, k)
        for ranks in groups:
            send_parts(exchange, v.multiply(x, ranks), v.window, ranks)
        _normalise((q, k), pair.multiply(x, everyone), kernel, everyone, rank, exchange)
        v.store(x, rank)
        return
    packed = weights.of(q, k, v)
    for ranks in groups:
        *pair_parts, values = packed.multiply(x, ranks)
        for peer, part in zip(ranks, values, strict=True):
            exchange.send(part, v.window, peer=peer)
        _normalise((q, k), pair_parts, kernel, ranks, rank, exchange)
    v.store(x, rank)
    _normalise((q, k), packed.first(2).multiply(x, own), kernel, own, rank, exchange)


def _normalise(
    pair: tuple[Projected, Projected],
    inputs: Sequence[list[Tensor]],
    kernel: FusedKernel,
    ranks: range,
    rank: int,
    exchange: Exchange,
) -> None:
    """Normalise and rotate Q and K of these ranks in one launch; send what is for peers."""
    outputs = [
        [
            one.window.own_view if peer == rank else part.new_empty(part.shape)
            for peer, part in zip(ranks, parts, strict=True)
        ]
        for one, parts in zip(pair, inputs, strict=True)
    ]
    kernel.run(*map(Parts.of, pair, inputs, outputs))
    world_size = pair[0].window.layout.world_size
    for peer in sorted(ranks, key=lambda other: (other - rank) % world_size):
        if peer != rank:
            for one, parts in zip(reversed(pair), reversed(outputs), strict=True):
                exchange.send(parts[peer - ranks.start], one.window, peer=peer)


def project_in_epilogue(
    x: Tensor,
    projected: tuple[Projected, Projected, Projected],
    kernel: FusedKernel,
    rank: int,
    weights: PackedWeights,
    progress: Progress | None,
    exchange: Exchange,
) -> None:
    """As :func:`project_packed`, by one operator for all ranks, with no norm across heads.

    On a GPU a peer's heads leave while those of the next, and in the end the own ones, are being
    computed.
    """
    v, k, q = projected
    packed = weights.of(q, k, v)
    everyone = range(v.window.layout.world_size)
    order = [(rank + step) % len(everyone) for step in (*everyone[1:], 0)]
    weight, bias = packed.rows_of(everyone)
    outputs = [
        [
            one.window.own_view
            if peer == rank
            else x.new_empty((*x.shape[:2], heads, packed.head_dim))
            for peer in everyone
        ]
        for one, heads in zip((q, k, v), packed.heads, strict=True)
    ]
    exchange.open(v.window)  # with nothing left to do that could fail
    project_qkv_into(
        x,
        weight,
        bias,
        *outputs,
        q_weight=q.norm_weight,
        k_weight=k.norm_weight,
        cos=kernel.cos,
        sin=kernel.sin,
        norm=kernel.kind.norm,
        rope=kernel.kind.rope,
        eps=kernel.kind.eps,
        order=order,
        progress=progress,
    )
    with nullcontext() if progress is None else progress.following():
        for peer in order[:-1]:
            if progress is not None:
                progress.wait(peer)
            for one, parts in zip(projected, reversed(outputs), strict=True):
                exchange.send(parts[peer], one.window, peer=peer)
