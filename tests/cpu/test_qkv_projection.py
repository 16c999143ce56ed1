"""``project_qkv_into`` by other operators: values, refusals, opcheck; when a kernel is taken."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from projection_problem import Projection, make_projection
from torch.library import opcheck

from ulysses_ops import NATIVE, project_qkv_into, qkv_projection
from ulysses_ops.qkv_projection import has_kernel

TWO = ((2, 1, 1), (3, 2, 2))


def assert_right(problem: Projection) -> None:
    for outs, right in zip(problem.run(), problem.expected(), strict=True):
        for out, expected in zip(outs, right, strict=True):
            torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("norm", ["none", "per_head"])
@pytest.mark.parametrize("rope", ["none", "interleaved", "half_split"])
@pytest.mark.parametrize("full_table", [False, True])
def test_values(norm: str, rope: str, full_table: bool) -> None:
    for bias in (False, True):
        options: dict[str, Any] = {"norm": norm, "rope": rope, "full_table": full_table}
        assert_right(make_projection((2, 7), 24, TWO, 16, bias=bias, **options))
    assert_right(make_projection((1, 3), 8, ((1, 0, 2),), 16, norm=norm, rope=rope))


def test_control_parts_in_another_order_are_seen() -> None:
    problem = make_projection((1, 5), 24, ((2, 2, 2),), 16)
    other = replace(problem, weight=problem.weight.roll(32, 0))
    with (
        mock.patch.object(Projection, "expected", return_value=other.expected()),
        pytest.raises(AssertionError, match="not close"),
    ):
        assert_right(problem)


def test_outputs_may_be_views() -> None:
    problem = make_projection((2, 7), 24, TWO, 16)
    right = problem.run()
    room = [
        [torch.zeros(2, 9, part.shape[2] + 2, 16) for part in parts] for parts in problem.outputs()
    ]
    views = [[one[:, 1:8, 1:-1] for one in parts] for parts in room]
    problem.run(views)
    for outs, parts in zip(right, views, strict=True):
        for out, part in zip(outs, parts, strict=True):
            assert torch.equal(out, part)
    for parts in room:
        for one in parts:
            around = (one[:, 0], one[:, 8:], one[:, :, 0], one[:, :, -1])
            assert not any(bool(edge.any()) for edge in around)


@pytest.mark.parametrize("rope", ["none", "interleaved"])
def test_opcheck(rope: str) -> None:
    problem = make_projection((2, 5), 24, TWO, 16, rope=rope, bias=True)
    names = ("q_weight", "k_weight", "cos", "sin", "norm", "rope", "eps")
    options = [problem.options.get(name) for name in names]
    outputs = [[part.zero_() for part in parts] for parts in problem.outputs()]
    opcheck(
        torch.ops.ulysses.project_qkv_into.default,
        (problem.x, problem.weight, problem.bias, *outputs, *options),
    )


# ---- refused -------------------------------------------------------------------------------------


def refused(match: str, outputs: list[list[torch.Tensor]] | None = None, **changes: Any) -> None:
    problem = make_projection((2, 5), 24, ((2, 1, 1),), 16, bias=True)
    options = {**problem.options, **{k: v for k, v in changes.items() if k in problem.options}}
    rest = {k: v for k, v in changes.items() if k not in options}
    given = {"x": problem.x, "qkv_weight": problem.weight, "qkv_bias": problem.bias, **rest}
    outs = problem.outputs() if outputs is None else outputs
    with pytest.raises(ValueError, match=f"^project_qkv_into: .*{match}"):
        project_qkv_into(**given, q_out=outs[0], k_out=outs[1], v_out=outs[2], **options)
    assert all(part.isnan().all() for parts in outs for part in parts)


def nan(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, torch.nan, dtype=dtype)


def test_what_is_refused() -> None:
    refused("needs whole rows", norm="across_heads")
    refused("norm='l2' must be one of", norm="l2")
    refused("rope='2d' must be one of", rope="2d")
    refused(r"give \(B, S, width\)", x=torch.zeros(5, 24))
    refused(r"x is \(2, 5, 16\) and qkv_weight \(64, 24\)", x=torch.zeros(2, 5, 16))
    refused("qkv_bias is torch.float16", qkv_bias=torch.zeros(64).half())
    refused(r"qkv_bias is \(63,\); give 64", qkv_bias=torch.zeros(63))
    refused("qkv_weight has 80 rows, the outputs 64", qkv_weight=torch.zeros(80, 24))
    refused(r"q_weight is \(8,\); give 16", q_weight=torch.zeros(8))
    refused("q_weight is torch.float16", q_weight=torch.zeros(16).half())
    refused("needs cos and sin", cos=None)
    refused(r"cos is \(4, 8\)", cos=torch.zeros(4, 8), sin=torch.zeros(4, 8))
    q, k, v = nan(2, 5, 2, 16), nan(2, 5, 1, 16), nan(2, 5, 1, 16)
    refused(r"have \[1, 2, 1\] parts", [[q], [k, k], [v]])
    refused(r"a part of v_out is \(2, 4, 1, 16\)", [[q], [k], [nan(2, 4, 1, 16)]])
    refused("a part of q_out is torch.float16", [[q.half()], [k], [v]])
    refused(r"heads of \[32, 16, 16\] elements", [[nan(2, 5, 1, 32)], [k], [v]])
    refused("requires grad", x=torch.zeros(2, 5, 24, requires_grad=True))


# ---- which rows the kernel takes -----------------------------------------------------------------


def test_when_the_kernel_is_taken() -> None:
    class Rows:
        """As much of a CUDA tensor as the choice looks at."""

        def __init__(self, dtype: torch.dtype = torch.bfloat16, width: int = 64) -> None:
            self.device, self.dtype = torch.device("cuda", 0), dtype
            self.shape = torch.Size((1, 8, width))

    def taken(x: Any, head_dim: int = 128, norm: Any = "per_head", count: int = 2) -> bool:
        return has_kernel(x, head_dim, norm, count)

    native = replace(NATIVE, projection=True)
    with (
        mock.patch.object(qkv_projection, "NATIVE", native),
        mock.patch.object(qkv_projection, "_is_hopper", return_value=True),
    ):
        assert taken(Rows()) and taken(Rows(torch.float16)) and taken(Rows(), norm="none")
        assert not taken(Rows(torch.float32)) and not taken(Rows(width=60))
        assert not taken(Rows(), head_dim=64) and not taken(Rows(), norm="across_heads")
        assert not taken(Rows(), count=11) and not taken(torch.zeros(1, 8, 64))
        with mock.patch.object(qkv_projection, "_is_hopper", return_value=False):
            assert not taken(Rows())
    with mock.patch.object(qkv_projection, "NATIVE", replace(native, projection=False)):
        assert not taken(Rows())
