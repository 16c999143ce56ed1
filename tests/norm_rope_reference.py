"""RMSNorm and RoPE once more, in float64 and by other means; and distances in last places."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ulysses_ops.tools.norm_rope_rows import last_places


@dataclass(frozen=True)
class Problem:
    """Q and K, ``(B, S, H, D)`` each, and what goes with them; ``options`` as the operator's."""

    q: Tensor
    k: Tensor
    options: dict[str, Any]

    def expected(self, rope: str | None = None) -> tuple[Tensor, Tensor]:
        """Both results in float64; with another style of pairs, if one is given."""
        return _expected(self.q, "q", self.options, rope), _expected(
            self.k, "k", self.options, rope
        )


def make_problem(
    shape: tuple[int, int, int, int],
    *,
    norm: str = "per_head",
    rope: str = "interleaved",
    k_heads: int | None = None,
    dtype: torch.dtype = torch.float32,
    parameter_dtype: torch.dtype | None = None,
    full_table: bool = False,
    bias: bool = False,
    device: str = "cpu",
    seed: int = 0,
) -> Problem:
    """Random tensors; angles grow along the sequence as in a model."""
    batch, rows, heads, dim = shape
    generator = torch.Generator().manual_seed(seed)
    heads_of = {"q": heads, "k": heads if k_heads is None else k_heads}

    def noise(*sizes: int, to: torch.dtype, around: float = 0.0) -> Tensor:
        return (torch.randn(sizes, generator=generator) + around).to(device, to)

    options: dict[str, Any] = {"norm": norm, "rope": rope, "eps": 1e-6}
    for name, count in heads_of.items():
        if norm != "none":
            sizes = (dim,) if norm == "per_head" else (count * dim,)
            options[f"{name}_weight"] = noise(*sizes, to=parameter_dtype or dtype, around=1.0)
        if bias:
            options[f"{name}_bias"] = noise(count * dim, to=parameter_dtype or dtype)
    if rope != "none":
        frequencies = 10000.0 ** (-torch.arange(dim // 2, dtype=torch.float64) / (dim // 2))
        angles = torch.arange(rows, dtype=torch.float64)[:, None] * frequencies + 0.3
        if full_table:
            together = rope == "interleaved"
            angles = angles.repeat_interleave(2, 1) if together else torch.cat((angles, angles), 1)
        options["cos"] = angles.cos().to(device, torch.float32)
        options["sin"] = angles.sin().to(device, torch.float32)
    q, k = (noise(batch, rows, count, dim, to=dtype) for count in heads_of.values())
    return Problem(q, k, options)


def _expected(x: Tensor, name: str, options: dict[str, Any], rope: str | None) -> Tensor:
    def given(key: str) -> Tensor | None:
        found = options.get(key)
        return found.double() if isinstance(found, Tensor) else None

    batch, rows, heads, dim = x.shape
    flat = x.double().reshape(batch, rows, heads * dim)
    bias, weight = given(f"{name}_bias"), given(f"{name}_weight")
    if bias is not None:
        flat = flat + bias
    eps: float = options["eps"]
    if options["norm"] == "across_heads":
        flat = flat / ((flat * flat).sum(-1, keepdim=True) / (heads * dim) + eps).sqrt()
        flat = flat if weight is None else flat * weight
    z = flat.reshape(batch, rows, heads, dim)
    if options["norm"] == "per_head":
        z = z / ((z * z).sum(-1, keepdim=True) / dim + eps).sqrt()
        z = z if weight is None else z * weight
    style = rope or options["rope"]
    cos, sin = given("cos"), given("sin")
    if style == "none" or cos is None or sin is None:
        return z
    if cos.shape[1] == dim:
        at = slice(0, None, 2) if options["rope"] == "interleaved" else slice(0, dim // 2)
        cos, sin = cos[:, at], sin[:, at]
    turn = torch.complex(cos, sin)[:, None]
    if style == "interleaved":
        pairs = torch.view_as_complex(z.reshape(batch, rows, heads, dim // 2, 2).contiguous())
        return torch.view_as_real(pairs * turn).reshape(z.shape)
    turned = torch.complex(z[..., : dim // 2], z[..., dim // 2 :]) * turn
    return torch.cat((turned.real, turned.imag), dim=-1)


@dataclass(frozen=True)
class Distance:
    """Of a result from its reference.

    Attributes:
        percent_within_1: Elements that differ by one last place at most, in percent.
        max_places: Largest difference in last places: large where a value is almost zero.
        max_error: Largest absolute difference beyond half a last place.
    """

    percent_within_1: float
    max_places: int
    max_error: float

    @classmethod
    def of(cls, got: Tensor, expected: Tensor) -> Distance:
        """Compare; a value that is not finite counts as far away."""
        places = last_places(got, expected)
        spacing = torch.finfo(got.dtype).eps * expected.abs().clamp_min(torch.finfo(got.dtype).tiny)
        beyond = (got.double() - expected).abs() - spacing / 2
        error = torch.where(got.isfinite(), beyond.clamp_min(0), torch.inf)
        within = (places <= 1).double().mean() * 100
        return cls(float(within), int(places.max()), float(error.max()))


def strided_like(x: Tensor, kind: str) -> Tensor:
    """Memory for ``x.shape`` of another kind, filled with NaN."""
    batch, rows, heads, dim = x.shape
    options: dict[str, Any] = {"dtype": x.dtype, "device": x.device}
    view: Tensor
    if kind == "fused":  # one of three in a fused projection
        view = torch.full((batch, rows, 3, heads, dim), torch.nan, **options)[:, :, 1]
    elif kind == "pitched":  # rows of a wider buffer, batches apart
        room = torch.full((batch, rows + 3, heads + 2, dim), torch.nan, **options)
        view = room[:, 1 : rows + 1, 1 : heads + 1]
    else:
        assert kind == "contiguous"
        view = torch.full(x.shape, torch.nan, **options)
    return view


def strided(x: Tensor, kind: str) -> Tensor:
    """The values of ``x`` in memory of another kind."""
    return strided_like(x, kind).copy_(x)
