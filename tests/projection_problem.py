"""A projection of Q, K and V for several destinations, and its result in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from norm_rope_reference import Problem, make_problem
from torch import Tensor

from ulysses_ops import project_qkv_into

Heads = tuple[int, int, int]  # of Q, K and V of one destination


@dataclass(frozen=True)
class Projection:
    """What ``project_qkv_into`` is given but for its outputs."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    heads: tuple[Heads, ...]
    head_dim: int
    options: dict[str, Any]

    def outputs(self) -> list[list[Tensor]]:
        """Fresh outputs of Q, of K and of V, by destination, full of NaN."""
        shape = self.x.shape[:2]
        return [
            [
                self.x.new_full((*shape, heads[part], self.head_dim), torch.nan)
                for heads in self.heads
            ]
            for part in range(3)
        ]

    def run(self, outputs: list[list[Tensor]] | None = None) -> list[list[Tensor]]:
        """Fill the outputs and return them."""
        outputs = self.outputs() if outputs is None else outputs
        project_qkv_into(self.x, self.weight, self.bias, *outputs, **self.options)
        return outputs

    def expected(self) -> list[list[Tensor]]:
        """The same in float64, never rounded."""
        rows = self.x.double() @ self.weight.double().t()
        if self.bias is not None:
            rows = rows + self.bias.double()
        parts = rows.unflatten(-1, (-1, self.head_dim)).split(
            [count for heads in self.heads for count in heads], dim=2
        )
        q, k, v = (list(parts[part::3]) for part in range(3))
        for destination, (one, other) in enumerate(zip(q, k, strict=True)):
            q[destination], k[destination] = Problem(one, other, self.options).expected()
        return [q, k, v]


def make_projection(
    rows: tuple[int, int],
    width: int,
    heads: tuple[Heads, ...],
    head_dim: int,
    *,
    bias: bool = False,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    **options: Any,
) -> Projection:
    """Random tensors; ``options`` as those of ``make_problem``."""
    given = make_problem((*rows, 1, head_dim), dtype=dtype, device=device, **options).options
    generator = torch.Generator().manual_seed(3)

    def noise(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator).to(device, dtype)

    columns = sum(map(sum, heads)) * head_dim
    weight = (torch.randn(columns, width, generator=generator) / width**0.5).to(device, dtype)
    return Projection(
        noise(*rows, width),
        weight,
        noise(columns) if bias else None,
        heads,
        head_dim,
        given,
    )
