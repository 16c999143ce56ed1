"""Norm and RoPE against what torch and a complex product give."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ulysses_ops.norm_rope_checks import Rope, check_eps
from ulysses_ops.part_norm_rope import NormRope, apply_norm_rope, row_factor


def values(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(11)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def test_per_head_norm_is_torchs() -> None:
    x, weight = values(2, 3, 4, 8), values(8)
    got = apply_norm_rope(x, NormRope("per_head", eps=1e-3), weight, None, None, None)
    torch.testing.assert_close(got, F.rms_norm(x, (8,), weight, 1e-3))


def test_norm_across_heads_is_torchs_also_in_parts() -> None:
    x, weight = values(2, 3, 4, 8), values(32)
    kind = NormRope("across_heads", eps=1e-3)
    expected = F.rms_norm(x.flatten(2), (32,), weight, 1e-3).unflatten(-1, (4, 8))
    factor = row_factor(x, kind.eps)
    heads = weight.view(4, 8)
    parts = [
        apply_norm_rope(x[:, :, part], kind, heads[part], factor, None, None)
        for part in (slice(0, 1), slice(1, 4))
    ]
    torch.testing.assert_close(torch.cat(parts, dim=2), expected)


@pytest.mark.parametrize("rope", ["interleaved", "half_split"])
@pytest.mark.parametrize("per_batch", [False, True])
def test_rope_turns_pairs_as_complex_numbers(rope: Rope, per_batch: bool) -> None:
    x = values(2, 5, 3, 8)
    angles = values(2, 5, 4) if per_batch else values(5, 4)
    got = apply_norm_rope(x, NormRope("none", rope), None, None, angles.cos(), angles.sin())
    pairs = x.unflatten(-1, (4, 2)) if rope == "interleaved" else x.unflatten(-1, (2, 4)).mT
    turned = torch.view_as_complex(pairs.contiguous()) * torch.exp(1j * angles).unsqueeze(-2)
    real = torch.view_as_real(turned)
    expected = real.flatten(-2) if rope == "interleaved" else real.mT.flatten(-2)
    torch.testing.assert_close(got, expected)
    assert not torch.allclose(got, x)


def test_16_bit_values_are_rounded_once() -> None:
    """Within half a unit in the last place of the same in float64."""
    x, weight, angles = values(1, 64, 4, 16), values(16), values(64, 8)
    kind = NormRope("per_head", "interleaved")
    small = x.bfloat16()
    got = apply_norm_rope(small, kind, weight.bfloat16(), None, angles.cos(), angles.sin())
    assert got.dtype == torch.bfloat16
    wide = apply_norm_rope(
        small.double(), kind, weight.bfloat16().double(), None, angles.cos(), angles.sin()
    )
    assert ((got.double() - wide).abs() <= wide.abs() * 2.0**-8 + 1e-6).all()


def test_it_writes_into_a_strided_view_and_nowhere_else() -> None:
    x = values(2, 3, 4, 8)
    big = torch.zeros(2, 9, 4, 8, dtype=torch.float64)
    out = big[:, 3:6]
    kind = NormRope("per_head")
    got = apply_norm_rope(x, kind, None, None, None, None, out)
    assert got.data_ptr() == out.data_ptr()
    assert torch.equal(out, apply_norm_rope(x, kind, None, None, None, None))
    assert not big[:, :3].any() and not big[:, 6:].any()


def test_unknown_kinds_are_refused() -> None:
    with pytest.raises(ValueError, match="norm='layer' must be one of"):
        NormRope("layer")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="rope='pairs' must be one of"):
        NormRope("none", "pairs")  # type: ignore[arg-type]


@pytest.mark.parametrize("eps", [-1.0, float("nan"), float("inf"), "1", None, True])
def test_an_epsilon_that_makes_no_norm_is_refused(eps: Any) -> None:
    with pytest.raises(ValueError, match=f"^NormRope: eps={eps!r} must be a number, finite and"):
        NormRope("per_head", eps=eps)
    with pytest.raises(ValueError, match=f"^an_op: eps={eps!r} must be a number, finite and"):
        check_eps("an_op", eps)
    assert NormRope("per_head", eps=0).eps == 0
