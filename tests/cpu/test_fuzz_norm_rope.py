"""Random problems of QK norm and RoPE, in one piece and in parts, against the float64 reference."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from norm_rope_reference import Distance, Problem, make_problem, strided, strided_like
from torch import Tensor

from ulysses_ops import qk_norm_rope, qk_norm_rope_into

KINDS = ("contiguous", "fused", "pitched")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    dtype = draw(st.sampled_from(DTYPES))
    norm = draw(st.sampled_from(("per_head", "across_heads", "none")))
    return make_problem(
        (
            draw(st.integers(0, 2)),
            draw(st.integers(0, 6)),
            draw(st.integers(1, 5)),
            8 * draw(st.integers(1, 6)),
        ),
        norm=norm,
        rope=draw(st.sampled_from(("interleaved", "half_split", "none"))),
        k_heads=draw(st.integers(1, 5)),
        dtype=dtype,
        parameter_dtype=draw(st.sampled_from((dtype, torch.float32))),
        full_table=draw(st.booleans()),
        bias=draw(st.booleans()),
        seed=draw(st.integers(0, 1000)),
    )


def cuts(draw: st.DrawFn, heads: int) -> list[int]:
    """Sizes that add up to ``heads``."""
    sizes = []
    while heads:
        sizes.append(draw(st.integers(1, heads)))
        heads -= sizes[-1]
    return sizes


def parts(x: Tensor, sizes: list[int], kind: str, *, empty: bool = False) -> list[Tensor]:
    make = strided_like if empty else strided
    return [make(part, kind) for part in x.split(sizes, dim=2)]


def assert_close(got: Tensor, expected: Tensor) -> None:
    assert got.shape == expected.shape
    if not got.numel():
        return
    distance = Distance.of(got, expected)
    if got.dtype == torch.float32:
        assert distance.max_error < 4e-6 * max(float(expected.abs().max()), 1.0), distance
    else:
        assert distance.max_error < 2e-5 * max(float(expected.abs().max()), 1.0), distance


@settings(derandomize=True, database=None, deadline=None, max_examples=150)
@given(problems(), st.sampled_from(KINDS))
def test_whole(problem: Problem, kind: str) -> None:
    q, k = strided(problem.q, kind), strided(problem.k, kind)
    for got, expected in zip(
        qk_norm_rope(q, k, **problem.options), problem.expected(), strict=True
    ):
        assert_close(got, expected)


@settings(derandomize=True, database=None, deadline=None, max_examples=150)
@given(st.data(), problems(), st.sampled_from(KINDS), st.sampled_from(KINDS))
def test_parts(data: st.DataObject, problem: Problem, kind: str, out_kind: str) -> None:
    def cut(x: Tensor) -> list[int]:
        return data.draw(st.composite(cuts)(x.shape[2]))

    sources = [parts(x, cut(x), kind) for x in (problem.q, problem.k)]
    outs = [parts(x, cut(x), out_kind, empty=True) for x in (problem.q, problem.k)]
    qk_norm_rope_into(*sources, *outs, **problem.options)
    for pieces, expected in zip(outs, problem.expected(), strict=True):
        assert_close(torch.cat(pieces, dim=2), expected)
