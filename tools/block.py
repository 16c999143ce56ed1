"""A DiT block of one rank, without its exchanges: what every variant of it computes.

    v = x Wv;  k = rope(norm(x Wk));  q = rope(norm(x Wq))            (B, S_local, H, D) each
    a = attention(q, k, v)                                      over S_global, H_local heads
    y = gelu((a Wo) Wup) Wdown                                      (B, S_local, H * D)

``norm`` is an RMS norm of each head, ``rope`` rotates neighbouring pairs by the position in the
whole sequence, and the hidden width of the MLP is 4 times that of the block. Modulation, residual
additions and text streams of real models are left out: they exchange nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ulysses_ops._native import NATIVE
from ulysses_ops.norm_rope import qk_norm_rope_into
from ulysses_ops.tools.launch import RankContext
from ulysses_ops.tools.noise import random_values
from ulysses_ops.tools.shapes import Shape
from ulysses_ops.values_first import AttentionKernel

DTYPE = torch.bfloat16
EPS = 1e-6
ROPE_BASE = 10_000.0
EXPANSION = 4  # hidden width of the MLP over that of the block

# (x, weight, cosines, sines, out or none) -> x, normalised and rotated
NormRope = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None], Tensor]


@dataclass(frozen=True)
class BlockWeights:
    """Weights of a block of width C, the same on every rank.

    ``v``, ``k``, ``q`` and ``out`` are ``(C, C)``, ``up`` is ``(4C, C)``, ``down`` ``(C, 4C)``,
    ``k_norm`` and ``q_norm`` are ``(D,)``.
    """

    v: Tensor
    k: Tensor
    q: Tensor
    out: Tensor
    up: Tensor
    down: Tensor
    k_norm: Tensor
    q_norm: Tensor

    @classmethod
    def random(cls, width: int, head_dim: int, context: RankContext) -> BlockWeights:
        """Noise that keeps the scale of what it is multiplied with."""
        hidden = EXPANSION * width
        sizes = [*4 * [(width, width)], (hidden, width), (width, hidden)]
        matrices = [
            random_values(size, context, 0, 500 + salt).mul_(size[1] ** -0.5)
            for salt, size in enumerate(sizes)
        ]
        norms = [
            random_values((head_dim,), context, 0, 510 + salt).mul_(0.1).add_(1)
            for salt in range(2)
        ]
        return cls(*matrices, *norms)


class WeightStore:
    """Weights by width; only the last width is kept."""

    def __init__(self) -> None:
        """Start with none."""
        self._kept: tuple[tuple[int, int], BlockWeights] | None = None

    def of(self, shape: Shape, context: RankContext) -> BlockWeights:
        """Weights for this shape."""
        key = (shape.heads * shape.head_dim, shape.head_dim)
        if self._kept is None or self._kept[0] != key:
            self._kept = None  # given back before the next ones are made
            self._kept = (key, BlockWeights.random(*key, context))
        return self._kept[1]


def norm_rope(
    x: Tensor, weight: Tensor, cosines: Tensor, sines: Tensor, out: Tensor | None = None
) -> Tensor:
    """RMS norm of each head, then rotation of neighbouring pairs.

    ``y[2i] = x[2i] cos - x[2i+1] sin`` and ``y[2i+1] = x[2i+1] cos + x[2i] sin``, computed in
    float32. The pairs are swapped, rather than taken apart and stacked, so that a compiler can make
    one kernel of it that reads and writes whole rows.

    Args:
        x: ``(B, S_local, H, D)``.
        weight: ``(D,)``.
        cosines: ``(S_local, 1, D)``, each twice.
        sines: The same, negative at even places.
        out: Where to write; fresh when left out.
    """
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS) * weight.float()
    swapped = normed.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    turned: Tensor = normed * cosines + swapped * sines
    return turned.to(x.dtype) if out is None else out.copy_(turned)


def fused_norm_rope(cosines: Tensor, sines: Tensor) -> NormRope:
    """:func:`norm_rope` by the compiled kernel of the package, for these tables alone."""
    cos, sin = cosines[:, 0, ::2].contiguous(), sines[:, 0, 1::2].contiguous()

    def run(
        x: Tensor, weight: Tensor, cosines: Tensor, sines: Tensor, out: Tensor | None = None
    ) -> Tensor:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
        qk_norm_rope_into([x], [], [out], [], q_weight=weight, cos=cos, sin=sin, eps=EPS)
        return out

    return run


def has_kernels(device: torch.device) -> bool:
    """Whether norm and RoPE run by the compiled kernel of the package."""
    return device.type == "cuda" and NATIVE.kernels


def rope_tables(shape: Shape, context: RankContext) -> tuple[Tensor, Tensor]:
    """Cosines and sines of this rank's rows, as :func:`norm_rope` takes them."""
    rows = shape.seq // context.world_size
    half = torch.arange(0, shape.head_dim, 2, dtype=torch.float64) / shape.head_dim
    positions = torch.arange(rows, dtype=torch.float64) + context.rank * rows
    angles = positions[:, None] * ROPE_BASE**-half
    cosines = angles.cos().repeat_interleave(2, -1)
    sines = torch.stack((-angles.sin(), angles.sin()), -1).flatten(-2)
    tables = (table.float().to(context.device).unsqueeze(1) for table in (cosines, sines))
    return next(tables), next(tables)


@dataclass(frozen=True)
class Block:
    """The parts of a block, in the order in which a rank computes them."""

    shape: Shape
    world_size: int
    weights: BlockWeights
    attention: AttentionKernel
    norm_rope: NormRope
    cosines: Tensor
    sines: Tensor

    @classmethod
    def prepare(
        cls,
        shape: Shape,
        context: RankContext,
        weights: BlockWeights,
        attention: AttentionKernel,
    ) -> Block:
        """Prepare the block of this rank; on GPUs its norm and rotation are one compiled kernel.

        That of the package where it is loaded, else one that Inductor makes: every variant runs
        the same.
        """
        fused: NormRope = norm_rope
        tables = rope_tables(shape, context)
        if has_kernels(context.device):
            fused = fused_norm_rope(*tables)
        elif context.device.type == "cuda":
            # One thread: helper processes of the compiler would outlive a rank that is ended.
            fused = torch.compile(norm_rope, dynamic=False, options={"compile_threads": 1})
        return cls(shape, context.world_size, weights, attention, fused, *tables)

    def _heads(self, x: Tensor, weight: Tensor) -> Tensor:
        heads: Tensor = F.linear(x, weight).unflatten(-1, (self.shape.heads, self.shape.head_dim))
        return heads

    def values(self, x: Tensor) -> Tensor:
        """V, ``(B, S_local, H, D)``."""
        return self._heads(x, self.weights.v)

    def keys(self, x: Tensor) -> Tensor:
        """K, normalised and rotated."""
        heads = self._heads(x, self.weights.k)
        return self.norm_rope(heads, self.weights.k_norm, self.cosines, self.sines, None)

    def queries(self, x: Tensor) -> Tensor:
        """Q, normalised and rotated."""
        heads = self._heads(x, self.weights.q)
        return self.norm_rope(heads, self.weights.q_norm, self.cosines, self.sines, None)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of ``(B, S_global, H_local, D)`` each."""
        return self.attention(q, k, v)

    def finish(self, attended: Tensor) -> Tensor:
        """Output projection and MLP of ``(B, S_local, H, D)``."""
        return self.expand(F.linear(attended.flatten(2), self.weights.out))

    def expand(self, projected: Tensor) -> Tensor:
        """The MLP, ``(B, S_local, H * D)`` to the same."""
        hidden = F.gelu(F.linear(projected, self.weights.up), approximate="tanh")
        return F.linear(hidden, self.weights.down)

    def compute_only(self, x: Tensor) -> Tensor:
        """The same kernels with nothing exchanged: what is sent is taken for what is received."""
        window = self.shape.local_window(self.world_size)
        v, k, q = (part(x).view(window) for part in (self.values, self.keys, self.queries))
        attended = self.attend(q, k, v)
        return self.finish(attended.reshape(self.shape.local_source(self.world_size)))


def block_flops(shape: Shape, world_size: int) -> float:
    """Floating-point operations of a rank: ``2 (4 + 8) S_local C^2 + 4 S_global^2 H_local D``."""
    width = shape.heads * shape.head_dim
    gemms = 2 * (4 + 2 * EXPANSION) * shape.seq / world_size * width**2
    return shape.batch * (gemms + 4 * shape.seq**2 * width / world_size)
