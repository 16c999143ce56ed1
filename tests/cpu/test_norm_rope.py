"""``qk_norm_rope`` in PyTorch: values, parts, refusals, schema, opcheck, compilation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from norm_rope_reference import Distance, Problem, make_problem, strided, strided_like
from torch import Tensor
from torch._inductor.utils import run_and_get_code
from torch.library import opcheck

from ulysses_ops import UlyssesCommunicator, communicator, qk_norm_rope, qk_norm_rope_into
from ulysses_ops._native import load_kernels
from ulysses_ops.norm_rope_checks import NORMS, ROPES, Options
from ulysses_ops.topology import Topology, probe

NO_GRAD = torch.no_grad()
OP: Any = torch.ops.ulysses


def arguments(problem: Problem, **changes: Any) -> tuple[Any, ...]:
    """Options in the order of the schemas."""
    options = Options(**{**problem.options, **changes})
    return tuple(vars(options).values())


def assert_close(got: Tensor, expected: Tensor, dtype: torch.dtype = torch.float32) -> None:
    distance = Distance.of(got, expected)
    if dtype == torch.float32:
        assert distance.max_error < 2e-6 * float(expected.abs().max()), distance
    else:
        assert distance.percent_within_1 >= 99.9 and distance.max_error < 1e-5, distance


# ---- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("full_table", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values(norm: str, rope: str, full_table: bool, dtype: torch.dtype) -> None:
    problem = make_problem(
        (2, 7, 3, 24),
        norm=norm,
        rope=rope,
        k_heads=5,
        dtype=dtype,
        full_table=full_table,
        bias=True,
    )
    for got, expected in zip(
        qk_norm_rope(problem.q, problem.k, **problem.options),
        problem.expected(),
        strict=True,
    ):
        assert got.is_contiguous() and got.dtype == dtype
        assert_close(got, expected, dtype)


@pytest.mark.parametrize("rope", ["interleaved", "half_split"])
def test_the_check_sees_the_other_style(rope: str) -> None:
    problem = make_problem((1, 6, 2, 16), rope=rope)
    other = "half_split" if rope == "interleaved" else "interleaved"
    got, _ = qk_norm_rope(problem.q, problem.k, **problem.options)
    assert Distance.of(got, problem.expected(rope=other)[0]).percent_within_1 < 50


def test_the_check_sees_another_norm() -> None:
    problem = make_problem((1, 6, 2, 16), norm="across_heads", rope="none")
    got, _ = qk_norm_rope(problem.q, problem.k, **problem.options)
    per_head = replace(
        problem,
        options={"norm": "per_head", "rope": "none", "eps": 1e-6},
    )
    assert Distance.of(got, per_head.expected()[0]).percent_within_1 < 50


# ---- as the models write it ----------------------------------------------------------------------


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


def flux_like(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Norm per head, tables (S, D), the neighbour with a minus sign."""
    x = rms(x, weight)
    real, imaginary = x.unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((-imaginary, real), -1).flatten(-2)
    return x * cos[None, :, None] + turned * sin[None, :, None]


def qwen_like(x: Tensor, weight: Tensor, turn: Tensor) -> Tensor:
    """Norm per head, one complex number for each pair."""
    pairs = torch.view_as_complex(rms(x, weight).unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * turn[None, :, None]).flatten(-2)


def wan_like(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Norm of the whole row before it is cut into heads; every other entry of the tables."""
    heads = x.shape[2:]
    x = rms(x.flatten(2), weight).unflatten(2, heads)
    first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[None, :, None, 0::2], sin[None, :, None, 1::2]
    out = torch.empty_like(x)
    out[..., 0::2] = first * cos - second * sin
    out[..., 1::2] = first * sin + second * cos
    return out


@pytest.mark.parametrize("model", ["flux", "qwen", "wan"])
def test_what_models_do(model: str) -> None:
    norm = "across_heads" if model == "wan" else "per_head"
    full = model != "qwen"
    problem = make_problem((2, 9, 4, 32), norm=norm, full_table=full)
    o = problem.options
    cos, sin = o["cos"], o["sin"]
    found = qk_norm_rope(problem.q, problem.k, **o)
    for got, x, weight in zip(
        found, (problem.q, problem.k), (o["q_weight"], o["k_weight"]), strict=True
    ):
        if model == "flux":
            expected = flux_like(x, weight, cos, sin)
        elif model == "qwen":
            expected = qwen_like(x, weight, torch.complex(cos, sin))
        else:
            expected = wan_like(x, weight, cos, sin)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("model", ["flux", "qwen"])
def test_what_diffusers_does(model: str) -> None:
    embeddings = pytest.importorskip("diffusers.models.embeddings")
    problem = make_problem((2, 9, 4, 32), full_table=model == "flux")
    o = problem.options
    if model == "flux":
        angles: Any = (o["cos"], o["sin"])
        rotate = embeddings.apply_rotary_emb
    else:
        transformer = pytest.importorskip("diffusers.models.transformers.transformer_qwenimage")
        angles = torch.complex(o["cos"], o["sin"])
        rotate = transformer.apply_rotary_emb_qwen
    found = qk_norm_rope(problem.q, problem.k, **o)
    for got, x, name in zip(found, (problem.q, problem.k), "qk", strict=True):
        normalised = torch.nn.functional.rms_norm(x, (32,), o[f"{name}_weight"], 1e-6)
        if model == "flux":
            expected = rotate(normalised, angles, sequence_dim=1)
        else:
            expected = rotate(normalised, angles, use_real=False)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


# ---- parts ---------------------------------------------------------------------------------------


def cut(x: Tensor, heads: list[int], kind: str, *, empty: bool = False) -> list[Tensor]:
    make = strided_like if empty else strided
    return [make(part, kind) for part in x.split(heads, dim=2)]


@pytest.mark.parametrize("norm", ["per_head", "across_heads"])
@pytest.mark.parametrize("kind", ["contiguous", "fused", "pitched"])
@pytest.mark.parametrize(
    ("q_in", "q_out", "k_in", "k_out"),
    [
        ([6], [6], [4], [4]),
        ([6], [2, 4], [4], [3, 1]),
        ([1, 5], [4, 2], [2, 2], [4]),
        ([6, 0], [0, 6], [4], [4]),
    ],
)
def test_parts(
    norm: str, kind: str, q_in: list[int], q_out: list[int], k_in: list[int], k_out: list[int]
) -> None:
    problem = make_problem((2, 5, 6, 16), norm=norm, k_heads=4, bias=True)
    outs = cut(problem.q, q_out, kind, empty=True), cut(problem.k, k_out, kind, empty=True)
    qk_norm_rope_into(
        cut(problem.q, q_in, kind),
        cut(problem.k, k_in, kind),
        *outs,
        **problem.options,
    )
    for parts, expected in zip(outs, problem.expected(), strict=True):
        assert_close(torch.cat(parts, dim=2), expected)


def test_own_heads_go_straight_into_a_window() -> None:
    problem = make_problem((1, 4, 6, 16))
    window = torch.full((1, 12, 3, 16), torch.nan)
    staging = torch.full((1, 4, 3, 16), torch.nan)
    k_out = torch.empty_like(problem.k)
    qk_norm_rope_into(
        [problem.q],
        [problem.k],
        [staging, window[:, 4:8]],
        [k_out],
        **problem.options,
    )
    expected = problem.expected()[0]
    assert_close(staging, expected[:, :, :3])
    assert_close(window[:, 4:8], expected[:, :, 3:])
    assert window[:, :4].isnan().all() and window[:, 8:].isnan().all()


def test_one_of_q_and_k_alone() -> None:
    problem = make_problem((1, 4, 2, 16))
    o = problem.options
    out = torch.empty_like(problem.k)
    qk_norm_rope_into([], [problem.k], [], [out], **{k: v for k, v in o.items() if k[:2] != "q_"})
    assert_close(out, problem.expected()[1])


def test_strides_of_size_1_dimensions_mean_nothing() -> None:
    problem = make_problem((1, 1, 1, 16))
    q = problem.q.as_strided((1, 1, 1, 16), (0, 0, 0, 1))
    out = torch.empty_like(problem.q)
    o = problem.options
    qk_norm_rope_into([q], [], [out], [], **{k: v for k, v in o.items() if k[:2] != "k_"})
    assert_close(out, problem.expected()[0])


@pytest.mark.parametrize("shape", [(0, 4, 2, 16), (2, 0, 2, 16), (2, 4, 0, 16)])
def test_nothing_at_all(shape: tuple[int, int, int, int]) -> None:
    problem = make_problem(shape)
    for got in qk_norm_rope(problem.q, problem.k, **problem.options):
        assert got.shape == shape


def test_the_functional_form_copies_what_it_cannot_read_in_place() -> None:
    problem = make_problem((2, 5, 4, 16))
    q = problem.q.transpose(1, 2).contiguous().transpose(1, 2)
    k = torch.empty(problem.k.numel() + 1)[1:].view(problem.k.shape).copy_(problem.k)
    found = qk_norm_rope(q, k, **problem.options)
    for got, expected in zip(found, problem.expected(), strict=True):
        assert_close(got, expected)


# ---- refusals ------------------------------------------------------------------------------------


Q = torch.zeros(2, 3, 4, 16)
TABLE = torch.zeros(3, 8)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"norm": "rms"}, r"norm='rms' must be one of"),
        ({"rope": "half"}, r"rope='half' must be one of"),
        ({"q": [], "k": []}, "neither q nor k has a part"),
        ({"q": [Q[0]]}, r"give \(B, S, heads, D\)"),
        ({"k": [torch.zeros(2, 3, 4, 8)]}, "B, S, D must agree"),
        ({"k": [Q.half()]}, "torch.float16 on cpu, another torch.float32"),
        ({"q": [Q[..., :4]], "k": [Q[..., :4]]}, "B, S, D must agree"),
        ({"q_out": [Q[:, :, :2]]}, "q has 4 heads and q_out 2; give as many"),
        ({"q_weight": torch.ones(64)}, "q_weight is .64,.; give 16 contiguous elements"),
        ({"q_weight": torch.ones(16), "norm": "across_heads"}, "give 64 contiguous elements"),
        ({"q_weight": torch.ones(16), "norm": "none"}, "q_weight goes with a norm"),
        ({"k_bias": torch.ones(64).half()}, "k_bias is torch.float16"),
        ({"cos": None}, "rope='interleaved' needs cos and sin"),
        ({"rope": "none"}, "cos and sin go with a rope"),
        ({"cos": torch.zeros(3, 4)}, r"cos is \(3, 4\); give both as \(3, 8\) or \(3, 16\)"),
        ({"sin": torch.zeros(3, 16)}, r"sin is \(3, 16\)"),
        ({"cos": TABLE.half()}, "cos is torch.float16"),
        ({"cos": torch.zeros(8, 3).t()}, "cos is not contiguous"),
        ({"q": [Q.transpose(1, 2).contiguous().transpose(1, 2)]}, "give a fresh copy"),
        ({"q": [torch.zeros(385)[1:].view(Q.shape)]}, "give a fresh copy"),
        ({"q_out": [torch.zeros(1, 1, 4, 16).expand(2, 3, 4, 16)]}, "give a fresh copy"),
        ({"q": [Q.clone().requires_grad_()]}, "requires grad; call it under torch.no_grad"),
    ],
)
def test_refusals(changes: dict[str, Any], text: str) -> None:
    good: dict[str, Any] = {
        "q": [Q],
        "k": [Q],
        "q_out": [Q.clone()],
        "k_out": [Q.clone()],
        "cos": TABLE,
        "sin": TABLE,
    }
    qk_norm_rope_into(**good)
    with pytest.raises(ValueError, match=f"^qk_norm_rope_into: .*{text}"):
        qk_norm_rope_into(**{**good, **changes})


@pytest.mark.parametrize("dim", [4, 12, 264])
def test_head_dims_that_do_not_fit(dim: int) -> None:
    x = torch.zeros(1, 2, 1, dim)
    with pytest.raises(ValueError, match=f"D={dim} must be a multiple of 8 up to 256"):
        qk_norm_rope(x, x, rope="none")


def test_weights_of_two_dtypes_are_refused() -> None:
    x = torch.zeros(1, 2, 1, 16, dtype=torch.bfloat16)
    weights: dict[str, Any] = {
        "q_weight": torch.ones(16),
        "k_weight": torch.ones(16, dtype=torch.bfloat16),
    }
    with pytest.raises(ValueError, match="q_weight and k_weight differ in dtype"):
        qk_norm_rope(x, x, rope="none", **weights)


def test_backward_is_refused() -> None:
    problem = make_problem((1, 4, 2, 16))
    q = problem.q.requires_grad_()
    got, _ = qk_norm_rope(q, problem.k, **problem.options)
    with pytest.raises(NotImplementedError, match="it has no backward"):
        got.sum().backward()


# ---- opcheck and compilation ---------------------------------------------------------------------


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("rows", [1, 7])
def test_opcheck(norm: str, rope: str, batch: int, rows: int) -> None:
    problem = make_problem((batch, rows, 4, 16), norm=norm, rope=rope, bias=batch == 2)
    options = arguments(problem)
    q, k = strided(problem.q, "fused"), problem.k
    opcheck(OP.qk_norm_rope.default, (q, k, *options))
    outs = [torch.zeros(batch, rows, count, 16) for count in (1, 3)]
    into = OP.qk_norm_rope_into.default
    opcheck(into, ([q], [k], outs, [torch.zeros_like(k)], *options))
    alone = arguments(problem, k_weight=None, k_bias=None)
    opcheck(into, ([q], [], outs, [], *alone))


def test_compiled_code_writes_the_windows_themselves() -> None:
    problem = make_problem((1, 6, 4, 16))
    options = arguments(problem)
    staging, window, k_window = (torch.zeros(1, s, h, 16) for s, h in ((6, 1), (12, 3), (12, 4)))

    def step(q: Tensor, k: Tensor, staging: Tensor, window: Tensor, k_window: Tensor) -> Tensor:
        outs = ([staging, window[:, 6:]], [k_window[:, :6]])
        OP.qk_norm_rope_into([q * 2], [k + 1], *outs, *options)
        return window.sum()

    torch._dynamo.reset()
    fast = torch.compile(step, fullgraph=True)
    with NO_GRAD:
        total, codes = run_and_get_code(fast, problem.q, problem.k, staging, window, k_window)
    expected = Problem(problem.q * 2, problem.k + 1, problem.options).expected()
    assert_close(staging, expected[0][:, :, :1])
    assert_close(window[:, 6:], expected[0][:, :, 1:])
    assert_close(k_window[:, :6], expected[1])
    torch.testing.assert_close(total, window.sum())
    (code,) = [text for text in codes if "qk_norm_rope_into" in text]
    assert "copy_" not in code and "clone" not in code


def test_compiled_functional_form_equals_the_eager_one() -> None:
    problem = make_problem((2, 6, 4, 16), norm="across_heads")

    def step(q: Tensor, k: Tensor) -> Tensor:
        first, second = qk_norm_rope(q, k, **problem.options)
        return first * 2 + second

    torch._dynamo.reset()
    with NO_GRAD:
        got = torch.compile(step, fullgraph=True)(problem.q, problem.k)
        torch.testing.assert_close(got, step(problem.q, problem.k))


# ---- loading -------------------------------------------------------------------------------------


def test_a_communicator_loads_kernels_first_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []

    def load(device: torch.device) -> int:
        steps.append(f"kernels on {device}")
        return load_kernels(device)

    def look(device: torch.device) -> Topology:
        steps.append("topology")
        return probe(device)

    monkeypatch.setattr(communicator, "load_kernels", load)
    monkeypatch.setattr(communicator, "probe", look)
    with UlyssesCommunicator(device="cpu"):
        assert steps == ["kernels on cpu", "topology"]
    assert load_kernels(torch.device("cpu")) == 0
