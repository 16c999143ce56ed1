"""Copies of projection weights in which the rows for one rank lie side by side.

::

    packed[r] = (W_q[rows of r], W_k[rows of r], ...)          (W, rows of a rank, width)

so that one GEMM gives several projections of a rank's heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from .peers_first import Projected


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

    def multiply(self, x: Tensor, ranks: range) -> list[list[Tensor]]:
        """By projection, a view ``(B, S_local, heads, D)`` for each of these ranks; one GEMM."""
        chosen = slice(ranks.start, ranks.stop)
        bias = None if self.bias is None else self.bias[chosen].flatten()
        rows = F.linear(x, self.weight[chosen].flatten(0, 1), bias)
        by_rank = rows.unflatten(-1, (len(ranks), -1, self.head_dim)).unbind(2)
        parts = [part.split(self.heads, dim=2) for part in by_rank]
        return [list(of_one) for of_one in zip(*parts, strict=True)]


@dataclass(frozen=True, eq=False)
class _Kept:
    """A copy, and what it is of: memory that is held, so that no other tensor can lie there."""

    packed: Packed
    sources: tuple[Tensor, ...]
    versions: tuple[int, ...]

    def is_of(self, tensors: Sequence[Tensor]) -> bool:
        return self.versions == tuple(map(_version, tensors)) and all(
            one.data_ptr() == other.data_ptr() and one.shape == other.shape
            for one, other in zip(self.sources, tensors, strict=True)
        )


class PackedWeights:
    """The copies that one layer keeps, made at first use.

    A weight that was changed in place, or replaced, is copied anew at the next call, into the same
    memory, which captured graphs read. A replay copies nothing: graphs see a change after the next
    call outside of them. A change through ``.data`` is counted by no version and not seen at all.
    """

    def __init__(self) -> None:
        """Start with none."""
        self._kept: dict[int, _Kept] = {}

    def of(self, *projections: Projected) -> Packed:
        """Pack these projections, or what is kept of them if that is still right."""
        tensors = [one.weight for one in projections]
        tensors += [one.bias for one in projections if one.bias is not None]
        kept = self._kept.get(len(projections))
        if kept is not None and len(kept.sources) == len(tensors) and kept.is_of(tensors):
            return kept.packed
        fresh = _pack(projections)
        if fresh.weight.is_cuda and torch.cuda.is_current_stream_capturing():
            return fresh  # part of the graph, which copies in each replay: nothing has run yet
        if kept is not None and _is_alike(kept.packed, fresh):
            kept.packed.weight.copy_(fresh.weight)
            if kept.packed.bias is not None and fresh.bias is not None:
                kept.packed.bias.copy_(fresh.bias)
            fresh = kept.packed
        sources = tuple(tensor.detach() for tensor in tensors)
        self._kept[len(projections)] = _Kept(fresh, sources, tuple(map(_version, tensors)))
        return fresh


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version  # inference tensors count nothing


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
