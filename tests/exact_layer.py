"""An attention layer whose every sum is exact: small whole numbers in float64.

Then no order of sums and no split can change a bit, and equality means that each element is made of
the right ones.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ulysses_ops import Schedule, UlyssesAttention, UlyssesCommunicator
from ulysses_ops.part_norm_rope import NormRope, apply_norm_rope, row_factor
from ulysses_ops.schedule import AttentionSplit, OutputSplit, ProjectionSplit

ROWS = 3  # of a rank
WIDTH = 6
OUT_WIDTH = 5
HEAD_DIM = 4


def all_schedules() -> list[Schedule]:
    """Every schedule there is, with two chunks of heads."""
    after = [
        (attention, output)
        for attention, output in product(get_args(AttentionSplit), get_args(OutputSplit))
        if attention != "heads" or output == "slabs"
    ]
    return [
        Schedule(projection, attention, output, 2 if attention == "heads" else 1)
        for projection, (attention, output) in product(get_args(ProjectionSplit), after)
    ]


def linear_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """``(q k^T) v``, without a softmax: exact on whole numbers, and no rank's rows are alike."""
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, dim=2) for x in (k, v))
    return torch.einsum("bqhe,bkhe,bkhd->bqhd", q, k, v)


@dataclass(frozen=True)
class Layer:
    """Weights and whole inputs, the same on every rank."""

    heads: int
    kv_heads: int
    tensors: dict[str, Tensor]
    norms: dict[str, Tensor]
    norm_rope: NormRope
    x: Tensor
    cos: Tensor | None
    sin: Tensor | None

    def on(self, device: str) -> Layer:
        """The same layer on a device."""
        return replace(
            self,
            tensors={name: tensor.to(device) for name, tensor in self.tensors.items()},
            norms={name: tensor.to(device) for name, tensor in self.norms.items()},
            x=self.x.to(device),
            cos=None if self.cos is None else self.cos.to(device),
            sin=None if self.sin is None else self.sin.to(device),
        )

    def sharded(self, comm: UlyssesCommunicator, **options: Any) -> UlyssesAttention:
        """The layer under test."""
        return UlyssesAttention.from_weights(
            comm,
            **{
                "num_heads": self.heads,
                "num_kv_heads": self.kv_heads,
                "norm_rope": self.norm_rope,
                "attention": linear_attention,
                **self.tensors,
                **self.norms,
                **options,
            },
        )

    def inputs(self, rank: int, world_size: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """What one rank holds of the whole input and of the angles."""
        cos, sin = (
            None if table is None else table.chunk(world_size)[rank]
            for table in (self.cos, self.sin)
        )
        return self.x.chunk(world_size, dim=1)[rank], cos, sin

    def projected(self) -> tuple[Tensor, Tensor, Tensor]:
        """Q, K and V of the whole sequence and of all heads, by one process."""

        def heads_of(name: str) -> Tensor:
            bias = self.tensors.get(f"{name}_bias")
            product = F.linear(self.x, self.tensors[name], bias)
            heads: Tensor = product.unflatten(-1, (-1, HEAD_DIM))
            return heads

        def transformed(name: str) -> Tensor:
            heads = heads_of(name)
            if self.norm_rope.is_identity:
                return heads
            is_across = self.norm_rope.norm == "across_heads"
            weight = self.norms.get(f"{name}_norm")
            if weight is not None and is_across:
                weight = weight.view(-1, HEAD_DIM)
            factor = row_factor(heads, self.norm_rope.eps) if is_across else None
            return apply_norm_rope(heads, self.norm_rope, weight, factor, self.cos, self.sin)

        return transformed("q"), transformed("k"), heads_of("v")

    def expected(self) -> Tensor:
        """The output for the whole sequence, by one process."""
        attended = linear_attention(*self.projected())
        return F.linear(attended.flatten(2), self.tensors["out"], self.tensors.get("out_bias"))


def layer_of(
    world_size: int,
    *,
    batch: int = 1,
    rows: int = ROWS,
    heads: int = 2,
    kv_heads: int = 2,
    with_bias: bool = False,
    norm_rope: NormRope | None = None,
    seed: int = 0,
) -> Layer:
    """A layer with ``rows``, ``heads`` and ``kv_heads`` on each rank."""
    kind = norm_rope or NormRope()
    generator = torch.Generator().manual_seed(seed)

    def numbers(*shape: int) -> Tensor:
        return torch.randint(-2, 3, shape, generator=generator).double()

    sizes = {"q": heads * world_size * HEAD_DIM, "k": kv_heads * world_size * HEAD_DIM}
    sizes["v"] = sizes["k"]
    tensors = {name: numbers(size, WIDTH) for name, size in sizes.items()}
    tensors["out"] = numbers(OUT_WIDTH, sizes["q"])
    if with_bias:
        tensors |= {f"{name}_bias": numbers(size) for name, size in sizes.items()}
        tensors["out_bias"] = numbers(OUT_WIDTH)
    norms = {}
    if kind.norm != "none":
        for name in ("q", "k"):
            size = HEAD_DIM if kind.norm == "per_head" else sizes[name]
            norms[f"{name}_norm"] = 1 + torch.rand(size, generator=generator, dtype=torch.float64)
    seq = rows * world_size
    angles = torch.rand(seq, HEAD_DIM // 2, generator=generator, dtype=torch.float64) * 6.3
    has_rope = kind.rope != "none"
    return Layer(
        heads * world_size,
        kv_heads * world_size,
        tensors,
        norms,
        kind,
        numbers(batch, seq, WIDTH),
        angles.cos() if has_rope else None,
        angles.sin() if has_rope else None,
    )


class Attention(nn.Module):
    """An attention module as libraries have them, one head dimension per head or across heads."""

    def __init__(self, names: tuple[str, ...], norm: nn.Module | None) -> None:
        super().__init__()
        for name in names[:3]:
            setattr(self, name, nn.Linear(6, 16, bias=False))
        out = nn.Linear(16, 5)
        setattr(self, names[3], nn.ModuleList([out, nn.Dropout(0.0)]) if "to_" in names[3] else out)
        self.norm_q = norm
        self.norm_k = norm
