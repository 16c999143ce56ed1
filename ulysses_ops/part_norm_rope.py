"""RMS norm and rotary embedding of queries and keys, before they are sent; plain PyTorch.

With ``x`` of shape ``(B, S, H, D)``, everything in float32 and rounded once at the end::

    factor = (mean of x^2 over D, or over H and D, + eps) ^ -1/2
    n      = x * factor * weight
    y      = n * (cos, cos) + rotated(n) * (sin, sin)

where ``rotated`` turns pairs ``(a, b)`` into ``(-b, a)``: neighbours with ``"interleaved"``, the
two halves of a head with ``"half_split"``. Source: RMSNorm, arXiv:1910.07467; RoPE,
arXiv:2104.09864.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .norm_rope_checks import NORMS, ROPES, Norm, Rope, check_eps


@dataclass(frozen=True)
class NormRope:
    """What happens to Q and K between projection and exchange.

    Attributes:
        norm: Mean over each head, over all heads of a row, or no norm.
        rope: How pairs are made, or ``"none"``.
        eps: Added to the mean of squares.
    """

    norm: Norm = "none"
    rope: Rope = "none"
    eps: float = 1e-6

    def __post_init__(self) -> None:
        """Refuse unknown kinds.

        Raises:
            ValueError: a kind is unknown, or ``eps`` is no number, not finite, or negative.
        """
        for name, allowed in (("norm", NORMS), ("rope", ROPES)):
            value = getattr(self, name)
            if value not in allowed:
                message = f"NormRope: {name}={value!r} must be one of {allowed}"
                raise ValueError(message)
        check_eps("NormRope", self.eps)

    @property
    def is_identity(self) -> bool:
        """Whether nothing happens."""
        return self.norm == "none" and self.rope == "none"


class NormRopeKernel(Protocol):
    """What :func:`apply_norm_rope` does, in another implementation (a compiled one, say)."""

    def __call__(
        self,
        x: Tensor,
        kind: NormRope,
        weight: Tensor | None,
        factor: Tensor | None,
        cos: Tensor | None,
        sin: Tensor | None,
        out: Tensor | None = None,
    ) -> Tensor:
        """See :func:`apply_norm_rope`."""
        ...


def row_factor(x: Tensor, eps: float) -> Tensor:
    """``(mean of x^2 over all heads of a row + eps) ^ -1/2``: ``(B, S, 1, 1)``, float32 or wider.

    The sum runs over the whole row, so parts of a row that are normalised one by one take the
    factor of all of it.
    """
    squares = _wide(x).square().flatten(2).mean(-1)
    return torch.rsqrt(squares + eps)[..., None, None]


def apply_norm_rope(
    x: Tensor,
    kind: NormRope,
    weight: Tensor | None,
    factor: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    out: Tensor | None = None,
) -> Tensor:
    """Normalise and rotate a part of the heads.

    Args:
        x: ``(B, S, heads, D)``, any strides.
        kind: What to do.
        weight: ``(D,)`` or ``(heads, D)``; ones when left out.
        factor: From :func:`row_factor` of the whole row, needed with ``"across_heads"`` only.
        cos: ``(S, D / 2)`` or ``(B, S, D / 2)``, one angle a pair; needed with RoPE only.
        sin: As ``cos``.
        out: Where to write, of x's shape and dtype; fresh and contiguous when left out.

    Returns:
        ``out``, of x's dtype.
    """
    wide = _wide(x)
    if kind.norm == "per_head":
        factor = torch.rsqrt(wide.square().mean(-1, keepdim=True) + kind.eps)
    if kind.norm != "none":
        assert factor is not None
        wide = wide * factor
        if weight is not None:
            wide = wide * weight.to(wide.dtype)
    if kind.rope != "none":
        assert cos is not None and sin is not None
        wide = rotate(wide, cos, sin, kind.rope)
    if out is None:
        return wide.to(x.dtype).contiguous()
    return out.copy_(wide)


def norm_rope_rows(
    x: Tensor,
    kind: NormRope,
    weight: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    kernel: NormRopeKernel = apply_norm_rope,
) -> Tensor:
    """:func:`apply_norm_rope` for rows with all of their heads, which need no factor given."""
    if kind.is_identity:
        return x
    factor = row_factor(x, kind.eps) if kind.norm == "across_heads" else None
    return kernel(x, kind, weight, factor, cos, sin)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor, rope: str) -> Tensor:
    """Turn the pairs of ``x``, ``(B, S, heads, D)``, by tables with one angle a pair."""
    # Swapped pairs and looked-up angles, instead of parts put together: that fuses into one kernel.
    places = torch.arange(x.shape[-1], device=x.device)
    if rope == "interleaved":
        pairs, is_first = places // 2, places % 2 == 0
        swapped = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    else:
        half = x.shape[-1] // 2
        pairs, is_first = places % half, places < half
        swapped = x.unflatten(-1, (2, -1)).flip(-2).flatten(-2)
    # The same for every head.
    cos, sin = (table.to(x.dtype)[..., pairs].unsqueeze(-2) for table in (cos, sin))
    turned: Tensor = x * cos + swapped * torch.where(is_first, -sin, sin)
    return turned
