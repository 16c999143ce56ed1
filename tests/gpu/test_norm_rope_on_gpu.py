"""The kernels of ``qk_norm_rope``: every layout, dtype and width, against float64.

``pytest tests/gpu/test_norm_rope_on_gpu.py -rP -k histogram`` prints the distances in last places.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from norm_rope_reference import Distance, Problem, make_problem, strided, strided_like
from torch import Tensor

from ulysses_ops import NATIVE, UlyssesCommunicator, qk_norm_rope, qk_norm_rope_into
from ulysses_ops._native import load_kernels
from ulysses_ops.tools.norm_rope_rows import last_places

NUM_KERNELS = 10
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture(autouse=True)
def kernels() -> None:
    """PyTorch in their place would pass every test of values."""
    assert NATIVE.kernels, NATIVE.kernels_reason
    assert int(torch.ops.ulysses._load_kernels(torch.cuda.current_device())) == NUM_KERNELS


def on_gpu(shape: tuple[int, int, int, int], **options: Any) -> Problem:
    return make_problem(shape, device="cuda", **options)


def assert_close(got: Tensor, expected: Tensor) -> None:
    distance = Distance.of(got, expected)
    if got.dtype == torch.float32:
        assert distance.max_error < 4e-6 * float(expected.abs().max()), distance
    else:
        assert distance.percent_within_1 >= 99.9 and distance.max_error < 2e-5, distance


def functional(problem: Problem) -> tuple[Tensor, Tensor]:
    return qk_norm_rope(problem.q, problem.k, **problem.options)


def assert_right(problem: Problem) -> None:
    for got, expected in zip(functional(problem), problem.expected(), strict=True):
        assert_close(got, expected)


# ---- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm", ["none", "per_head", "across_heads"])
@pytest.mark.parametrize("rope", ["none", "interleaved", "half_split"])
def test_values(dtype: torch.dtype, norm: str, rope: str) -> None:
    for dim in (8, 24, 64, 72, 96, 128, 248, 256):
        for full_table in (False, True):
            assert_right(
                on_gpu(
                    (2, 37, 5, dim),
                    norm=norm,
                    rope=rope,
                    k_heads=3,
                    dtype=dtype,
                    full_table=full_table,
                    bias=full_table,
                )
            )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm", ["per_head", "across_heads"])
@pytest.mark.parametrize("rows", [1, 3, 4097])
@pytest.mark.parametrize("heads", [1, 24, 40])
def test_row_counts_and_heads_of_models(
    dtype: torch.dtype, norm: str, rows: int, heads: int
) -> None:
    assert_right(on_gpu((1, rows, heads, 128), norm=norm, dtype=dtype))


@pytest.mark.parametrize("norm", ["per_head", "across_heads"])
def test_parameters_in_fp32(norm: str) -> None:
    options: dict[str, Any] = {"dtype": torch.bfloat16, "parameter_dtype": torch.float32}
    assert_right(on_gpu((2, 19, 6, 128), norm=norm, bias=True, **options))


@pytest.mark.parametrize("rope", ["interleaved", "half_split"])
def test_the_check_sees_the_other_style(rope: str) -> None:
    problem = on_gpu((1, 65, 4, 128), rope=rope, dtype=torch.bfloat16)
    other = "half_split" if rope == "interleaved" else "interleaved"
    for got, expected in zip(functional(problem), problem.expected(rope=other), strict=True):
        assert Distance.of(got, expected).percent_within_1 < 50


@pytest.mark.parametrize("norm", ["per_head", "across_heads"])
@pytest.mark.parametrize(("rows", "heads"), [(2000, 24), (9360, 40)])
def test_histogram_of_distances(
    norm: str, rows: int, heads: int, record_property: Callable[[str, object], None]
) -> None:
    problem = on_gpu((1, rows, heads, 128), norm=norm, dtype=torch.bfloat16)
    for name, got, expected in zip("qk", functional(problem), problem.expected(), strict=True):
        places = last_places(got, expected.float())
        counts = torch.bincount(places.flatten().clamp_max(4), minlength=5)
        shares = [f"{100 * float(count) / places.numel():.4f} %" for count in counts]
        told = dict(zip(("0", "1", "2", "3", "4 and more"), shares, strict=True))
        told["largest"] = str(int(places.max()))
        print(f"{norm}, S={rows}, H={heads}, {name}: {told}")
        record_property(f"last_places_{name}", told)
        assert float((places <= 1).double().mean()) >= 0.999
        assert_close(got, expected)


# ---- parts and layouts ---------------------------------------------------------------------------


def written(part: Tensor) -> int:
    """Elements that are no NaN any more in all of the memory that the part lies in."""
    base = part if part._base is None else part._base
    return int((~base.isnan()).sum())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm", ["none", "per_head", "across_heads"])
@pytest.mark.parametrize("kind", ["contiguous", "fused", "pitched"])
@pytest.mark.parametrize(
    ("q_in", "q_out", "k_in", "k_out"),
    [
        ([24], [24], [24], [24]),
        ([24], [12, 12], [24], [12, 12]),
        ([6, 18], [10, 13, 1], [5, 0, 2], [7]),
        ([], [], [9], [4, 5]),
        ([3] * 8, [3] * 8, [3] * 8, [3] * 8),
    ],
)
def test_parts(
    dtype: torch.dtype,
    norm: str,
    kind: str,
    q_in: list[int],
    q_out: list[int],
    k_in: list[int],
    k_out: list[int],
) -> None:
    for dim in (72, 128):
        problem = on_gpu(
            (2, 33, sum(q_in), dim), norm=norm, k_heads=sum(k_in), dtype=dtype, bias=True
        )
        outs, ins = [], []
        for x, cut_in, cut_out in ((problem.q, q_in, q_out), (problem.k, k_in, k_out)):
            ins.append([strided(part, kind) for part in x.split(cut_in, dim=2)] if cut_in else [])
            outs.append(
                [strided_like(part, kind) for part in x.split(cut_out, dim=2)] if cut_out else []
            )
        options = {
            key: value for key, value in problem.options.items() if q_in or not key.startswith("q_")
        }
        qk_norm_rope_into(*ins, *outs, **options)
        for parts, expected in zip(outs, problem.expected(), strict=True):
            if parts:
                assert_close(torch.cat(parts, dim=2), expected)
            for part in parts:
                assert written(part) == part.numel(), "something else was written"


def test_a_row_too_long_for_one_launch_takes_two() -> None:
    assert_right(on_gpu((1, 9, 96, 256), norm="across_heads", dtype=torch.bfloat16))
    assert_right(on_gpu((1, 9, 48, 256), norm="across_heads", dtype=torch.float32))


def test_captured_and_replayed() -> None:
    problem = on_gpu((1, 257, 24, 128), norm="across_heads", dtype=torch.bfloat16)
    functional(problem)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = functional(problem)
    for factor in (1.0, -3.0):
        problem.q.mul_(factor)
        graph.replay()
        for got, expected in zip(found, problem.expected(), strict=True):
            assert_close(got, expected)


def test_compiled() -> None:
    problem = on_gpu((1, 65, 24, 128), dtype=torch.bfloat16)
    window = torch.zeros(1, 130, 24, 128, device="cuda", dtype=torch.bfloat16)
    k_out = torch.empty_like(problem.k)

    def step(q: Tensor, k: Tensor, window: Tensor, k_out: Tensor) -> Tensor:
        outs = ([window[:, 65:]], [k_out])
        options = dict(problem.options)
        norm_rope = torch.ops.ulysses.qk_norm_rope_into
        norm_rope([q * 2], [k + 1], *outs, **options)
        return k_out + 1

    torch._dynamo.reset()
    with torch.no_grad():
        more = torch.compile(step, fullgraph=True)(problem.q, problem.k, window, k_out)
    expected = Problem(problem.q * 2, problem.k + 1, problem.options).expected()
    assert_close(window[:, 65:], expected[0])
    assert_close(k_out, expected[1])
    assert torch.equal(more, k_out + 1) and not window[:, :65].any()


# ---- refusals of the compiled library ------------------------------------------------------------


Q = (1, 4, 2, 64)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"norm": "rms"}, "norm='rms' must be"),
        ({"rope": "half"}, "rope='half' must be"),
        ({"q": [], "k": []}, "no parts of q and none of k"),
        ({"cos": None}, "needs cos and sin"),
        ({"cos": (4, 16)}, "cos must be"),
        ({"sin": (3, 32)}, "sin must hold 128 elements"),
        ({"q_weight": (63,)}, "q_weight must hold 64 elements"),
        ({"k_bias": (64,)}, "k_bias must hold 128 elements"),
        ({"k": [(1, 5, 2, 64)]}, "must agree"),
        ({"k": [(4, 2, 64)]}, "3 dimensions"),
        ({"q_out": [(1, 4, 3, 64)]}, "q has 2 heads, its outputs have 3"),
        ({"q_out": "q"}, "an output lies between"),
        ({"q": "transposed"}, "pass a contiguous copy"),
        ({"q": "shifted"}, "multiple of 16 bytes"),
        ({"q": [(1, 4, 1, 64)] * 33, "q_out": [(1, 4, 1, 64)] * 33}, "more than 32 pieces"),
    ],
)
def test_refusals(changes: dict[str, Any], text: str) -> None:
    def zeros(sizes: tuple[int, ...]) -> Tensor:
        return torch.zeros(sizes, device="cuda")

    good: dict[str, Any] = {
        **{name: [zeros(Q)] for name in ("q", "k", "q_out", "k_out")},
        "cos": zeros((4, 32)),
        "sin": zeros((4, 32)),
        "norm": "per_head",
        "rope": "interleaved",
    }
    into: Any = torch.ops.ulysses.qk_norm_rope_into
    into(**good)
    odd = {
        "q": good["q"],
        "transposed": [zeros((1, 2, 4, 64)).transpose(1, 2)],
        "shifted": [zeros((513,))[1:].view(Q)],
    }
    for name, value in changes.items():
        if isinstance(value, tuple):
            changes = {**changes, name: zeros(value)}
        elif isinstance(value, list):
            changes = {**changes, name: [zeros(sizes) for sizes in value]}
        elif value in odd:
            changes = {**changes, name: odd[value]}
    with pytest.raises(RuntimeError, match=text):
        into(**{**good, **changes})
    torch.cuda.synchronize()


def test_a_row_that_no_launch_can_hold_is_refused() -> None:
    problem = on_gpu((1, 2, 136, 256), norm="across_heads", dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="too long for norm='across_heads'"):
        functional(problem)


# ---- loading -------------------------------------------------------------------------------------


# Holds one stream by a wait on host memory, and launches on another stream meanwhile.
LAUNCH_BEHIND_A_WAIT = """
import ctypes, sys, threading, time
import torch
import ulysses_ops
if sys.argv[1] == "loaded":
    comm = ulysses_ops.UlyssesCommunicator(device="cuda")
q = torch.zeros(1, 4, 2, 128, device="cuda")
out, table = torch.zeros_like(q), torch.zeros(4, 64, device="cuda")
held, other = torch.cuda.Stream(), torch.cuda.Stream()
word = torch.zeros(4, dtype=torch.int32).pin_memory()
torch.cuda.synchronize()
wait = ctypes.CDLL("libcuda.so.1").cuStreamWaitValue32_v2
arguments = (ctypes.c_void_p(held.cuda_stream), ctypes.c_uint64(word.data_ptr()))
assert wait(*arguments, ctypes.c_uint32(1), ctypes.c_uint(0)) == 0
def release():
    time.sleep(3)
    word[0] = 1
threading.Thread(target=release, daemon=True).start()
start = time.monotonic()
with torch.cuda.stream(other):
    torch.ops.ulysses.qk_norm_rope_into([q], [], [out], [], cos=table, sin=table)
print(time.monotonic() - start)
torch.cuda.synchronize()
"""


def seconds_behind_a_wait(state: str) -> float:
    """How long a launch takes on the host; 30 s when it does not come back."""
    command = [sys.executable, "-c", LAUNCH_BEHIND_A_WAIT, state]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        return 30.0
    assert done.returncode == 0, done.stderr
    return float(done.stdout)


def test_a_communicator_loads_the_kernels_before_anything_waits() -> None:
    assert seconds_behind_a_wait("loaded") < 1.0
    # Control: a kernel that is first loaded behind the wait holds the host up.
    assert seconds_behind_a_wait("not loaded") > 2.0


def test_one_rank_counts_the_kernels() -> None:
    with UlyssesCommunicator(device="cuda") as comm:
        more = 3 if NATIVE.projection and torch.cuda.get_device_capability() == (9, 0) else 0
        assert load_kernels(comm.device) == NUM_KERNELS + more
    assert load_kernels(torch.device("cpu")) == 0
