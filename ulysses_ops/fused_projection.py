"""The first stage of an attention layer with norm and RoPE by :func:`qk_norm_rope_into`.

It computes what ``peers_first.project`` computes, in fewer launches: Q and K of a destination share
one, and a norm across heads reads a row once and writes the part of every rank from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ._native import NATIVE
from .exchange import Exchange
from .norm_rope import qk_norm_rope_into
from .norm_rope_checks import DTYPES, MAX_HEAD_DIM
from .part_norm_rope import NormRope
from .peers_first import Projected, send_parts
from .schedule import ProjectionSplit, peer_groups


@dataclass(frozen=True, eq=False)
class FusedKernel:
    """One launch for parts of Q and K.

    Attributes:
        kind: What it does.
        cos: Table of angles, ``(S_local, D / 2)``, or none.
        sin: As ``cos``.
    """

    kind: NormRope
    cos: Tensor | None
    sin: Tensor | None

    def fits(self, x: Tensor, head_dim: int, norm_weights: Sequence[Tensor | None]) -> bool:
        """Whether the compiled kernel takes this layer, for rows of this dtype and device."""
        tables = [table for table in (self.cos, self.sin) if table is not None]
        dtypes = {weight.dtype for weight in norm_weights if weight is not None}
        return (
            x.device.type == "cuda"
            and NATIVE.kernels
            and not self.kind.is_identity
            and x.dtype in DTYPES
            and head_dim % 8 == 0
            and head_dim <= MAX_HEAD_DIM
            and len(dtypes) <= 1
            and dtypes <= {x.dtype, torch.float32}
            and all(t.dim() == 2 and t.dtype == torch.float32 and t.is_contiguous() for t in tables)
        )

    def run(self, q: Parts, k: Parts) -> None:
        """Normalise, rotate and write."""
        qk_norm_rope_into(
            q.inputs,
            k.inputs,
            q.outputs,
            k.outputs,
            q_weight=q.weight,
            k_weight=k.weight,
            cos=self.cos,
            sin=self.sin,
            norm=self.kind.norm,
            rope=self.kind.rope,
            eps=self.kind.eps,
        )


@dataclass(frozen=True, eq=False)
class Parts:
    """One of Q and K in a launch; empty where it takes no part.

    Attributes:
        inputs: ``(B, S, heads, D)`` each.
        outputs: The same heads, perhaps cut elsewhere.
        weight: Of the norm.
    """

    inputs: Sequence[Tensor] = ()
    outputs: Sequence[Tensor] = ()
    weight: Tensor | None = None

    @classmethod
    def of(cls, to: Projected, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Parts:
        """All of ``inputs``, with the norm weight of their heads."""
        weight = to.norm_weight
        return cls(inputs, outputs, None if weight is None else weight.flatten())


def project_fused(
    x: Tensor,
    projected: tuple[Projected, Projected, Projected],
    kernel: FusedKernel,
    rank: int,
    split: ProjectionSplit,
    exchange: Exchange,
) -> None:
    """As :func:`ulysses_ops.peers_first.project`.

    Own views are written behind the first send, which orders the caller behind their readers; V
    has the first one, since it needs no kernel.
    """
    v, k, q = projected
    everyone, own = range(v.window.layout.world_size), range(rank, rank + 1)
    if split == "whole":
        exchange.send(v.multiply(x, everyone), v.window)
        for one in (k, q):
            whole = one.multiply(x, everyone)
            out = torch.empty_like(whole)
            _run_alone(kernel, one is q, Parts.of(one, [whole], [out]))
            exchange.send(out, one.window)
        return
    groups = peer_groups(len(everyone), rank, split)
    if kernel.kind.norm == "across_heads":
        for ranks in groups:
            send_parts(exchange, v.multiply(x, ranks), v.window, ranks)
        for one in (k, q):
            _normalise_rows(x, one, kernel, one is q, rank, groups, exchange)
        v.store(x, rank)
        return
    for ranks in groups:
        send_parts(exchange, v.multiply(x, ranks), v.window, ranks)
        parts = {one: one.multiply(x, ranks) for one in (k, q)}
        outs = {one: torch.empty_like(part) for one, part in parts.items()}
        kernel.run(*(Parts.of(one, [parts[one]], [outs[one]]) for one in (q, k)))
        for one, out in outs.items():
            send_parts(exchange, out, one.window, ranks)
    v.store(x, rank)
    kernel.run(*(Parts.of(one, [one.multiply(x, own)], [one.window.own_view]) for one in (q, k)))


def _normalise_rows(
    x: Tensor,
    one: Projected,
    kernel: FusedKernel,
    is_q: bool,
    rank: int,
    groups: Sequence[range],
    exchange: Exchange,
) -> None:
    """A norm across heads: rows are multiplied whole, and leave by destination in one launch."""
    whole = one.multiply(x, range(one.window.layout.world_size))
    staged = {ranks: whole.new_empty((*whole.shape[:2], *_heads(one, ranks))) for ranks in groups}
    by_first_rank = {ranks.start: part for ranks, part in staged.items()}
    by_first_rank[rank] = one.window.own_view
    outputs = [by_first_rank[first] for first in sorted(by_first_rank)]
    _run_alone(kernel, is_q, Parts.of(one, [whole], outputs))
    for ranks, part in staged.items():
        send_parts(exchange, part, one.window, ranks)


def _heads(one: Projected, ranks: range) -> tuple[int, int]:
    heads = one.heads(ranks)
    return heads.stop - heads.start, one.window.layout.head_dim


def _run_alone(kernel: FusedKernel, is_q: bool, parts: Parts) -> None:
    kernel.run(*((parts, Parts()) if is_q else (Parts(), parts)))
