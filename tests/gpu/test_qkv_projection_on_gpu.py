"""The kernel of ``project_qkv_into`` against float64: sizes, layouts, options, what it leaves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from norm_rope_reference import Distance
from projection_problem import Heads, Projection, make_projection
from torch import Tensor

from ulysses_ops import NATIVE, project_qkv_into, qkv_projection
from ulysses_ops.progress import Progress

DIM = qkv_projection.KERNEL_HEAD_DIM
FLUX: tuple[Heads, ...] = ((12, 12, 12),)
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != qkv_projection.HOPPER,
    reason="the kernel is for compute capability 9.0",
)


def on_gpu(rows: tuple[int, int], width: int, heads: tuple[Heads, ...], **options: Any) -> Any:
    options = {"dtype": torch.bfloat16, **options}
    return make_projection(rows, width, heads, DIM, device="cuda", **options)


def by_kernel(problem: Projection, outputs: list[list[Tensor]] | None = None) -> list[list[Tensor]]:
    """Fill the outputs; other operators in the kernel's place would pass every test of values."""
    assert NATIVE.projection, NATIVE.projection_reason
    with mock.patch.object(
        qkv_projection, "_by_operators", side_effect=AssertionError("not taken")
    ):
        return problem.run(outputs)


def assert_close(got: list[list[Tensor]], expected: list[list[Tensor]]) -> None:
    for outs, right in zip(got, expected, strict=True):
        for out, one in zip(outs, right, strict=True):
            if out.numel() > 0:
                distance = Distance.of(out, one)
                assert distance.percent_within_1 >= 99.9 and distance.max_error < 1e-4, distance


def assert_right(problem: Projection) -> None:
    assert_close(by_kernel(problem), problem.expected())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("norm", ["none", "per_head"])
@pytest.mark.parametrize("rope", ["none", "interleaved", "half_split"])
def test_values(dtype: torch.dtype, norm: str, rope: str) -> None:
    for full_table in (False, True):
        options = {"dtype": dtype, "norm": norm, "rope": rope, "full_table": full_table}
        assert_right(on_gpu((2, 37), 200, ((3, 1, 1), (2, 1, 2)), bias=full_table, **options))


@pytest.mark.parametrize(
    "rows", [(1, 1), (1, 63), (1, 64), (1, 129), (3, 43), (1, 2304), (2, 1500)]
)
@pytest.mark.parametrize("width", [8, 64, 72, 3072])
@pytest.mark.parametrize("heads", [((1, 0, 0),), ((1, 1, 1),), FLUX, ((3, 1, 1),) * 7])
def test_sizes(rows: tuple[int, int], width: int, heads: tuple[Heads, ...]) -> None:
    assert_right(on_gpu(rows, width, heads))


def test_more_tiles_than_clusters_by_far() -> None:
    assert_right(on_gpu((1, 9472), 512, ((28, 28, 28),)))


def test_norm_weights_in_fp32_and_none() -> None:
    problem = on_gpu((1, 200), 256, ((2, 2, 2),), parameter_dtype=torch.float32)
    assert problem.options["q_weight"].dtype == torch.float32
    assert_right(problem)
    assert_right(replace(problem, options={**problem.options, "k_weight": None}))


def test_control_the_other_style_and_other_parts_are_seen() -> None:
    problem = on_gpu((1, 200), 256, ((2, 2, 2),))
    got = by_kernel(problem)
    other = replace(problem, options={**problem.options, "rope": "half_split"})
    with pytest.raises(AssertionError, match="percent_within_1"):
        assert_close(got, other.expected())
    with pytest.raises(AssertionError, match="percent_within_1"):
        assert_close([got[1], got[0], got[2]], problem.expected())


def test_strided_rows_and_views_of_windows() -> None:
    problem = on_gpu((2, 70), 256, ((2, 1, 1), (2, 1, 1)))
    right = by_kernel(problem)
    wide = torch.zeros(2, 70, 320, device="cuda", dtype=torch.bfloat16)
    wide[..., 64:] = problem.x
    apart = torch.zeros(3, 90, 256, device="cuda", dtype=torch.bfloat16)[1:, 10:80]
    apart.copy_(problem.x)
    displaced = torch.zeros(4 + problem.x.numel(), device="cuda", dtype=torch.bfloat16)[4:]
    displaced = displaced.view_as(problem.x).copy_(problem.x)
    for x in (wide[..., 64:], apart, displaced):  # the last two are read through a copy
        assert (not x.is_contiguous()) is (x is not displaced)
        for outs, expected in zip(by_kernel(replace(problem, x=x)), right, strict=True):
            assert all(map(torch.equal, outs, expected))
    rooms = [
        [part.new_full((2, 75, part.shape[2] + 3, DIM), torch.nan) for part in parts]
        for parts in problem.outputs()
    ]
    by_kernel(problem, [[room[:, 3:73, 1:-2] for room in parts] for parts in rooms])
    for parts, expected in zip(rooms, right, strict=True):
        for room, one in zip(parts, expected, strict=True):
            assert torch.equal(room[:, 3:73, 1:-2], one)
            assert int((~room.isnan()).sum()) == one.numel()  # and nothing beside


def test_what_does_not_fit_is_done_by_other_operators() -> None:
    apart = torch.empty(1, 9, 2 * DIM + 4, device="cuda", dtype=torch.bfloat16)[..., 4:]
    problems = [
        make_projection((1, 9), 64, ((2, 1, 1),), 64, device="cuda", dtype=torch.bfloat16),
        make_projection((1, 9), 64, ((2, 1, 1),), DIM, device="cuda"),
        on_gpu((1, 9), 60, ((2, 1, 1),)),
        on_gpu((1, 9), 64, ((1, 1, 1),) * 11),
    ]
    with mock.patch.object(
        torch.ops.ulysses, "_project_qkv_sm90", side_effect=AssertionError("taken")
    ):
        for problem in problems:
            for outs, right in zip(problem.run(), problem.expected(), strict=True):
                for out, expected in zip(outs, right, strict=True):
                    tight = out.dtype == torch.float32
                    torch.testing.assert_close(
                        out.double(), expected, rtol=1e-2, atol=1e-3 if tight else 3e-2
                    )
        problem = on_gpu((1, 9), 64, ((2, 1, 1),))
        with pytest.raises(ValueError, match="give a fresh copy"):
            problem.run([[apart.unflatten(-1, (2, DIM))], *problem.outputs()[1:]])


def test_an_output_over_an_input_is_refused() -> None:
    room = torch.zeros(4, 64, DIM, device="cuda", dtype=torch.bfloat16)
    problem = replace(on_gpu((1, 64), DIM, ((1, 1, 1),)), x=room[1:2])
    q, k, v = problem.outputs()
    with pytest.raises(RuntimeError, match="give memory of its own"):
        by_kernel(problem, [q, k, [room[1:2].unflatten(-1, (1, DIM))]])
    assert not bool(room.any())
    by_kernel(problem, [q, k, v])


def test_replays_follow_their_input() -> None:
    problem = on_gpu((1, 300), 256, FLUX)
    outs = by_kernel(problem)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        by_kernel(problem, outs)
    for seed in range(5):
        generator = torch.Generator("cuda").manual_seed(seed)
        problem.x.copy_(torch.randn(problem.x.shape, generator=generator, device="cuda"))
        for parts in outs:
            for part in parts:
                part.fill_(torch.nan)
        graph.replay()
        assert_close(outs, problem.expected())


# ---- parts that leave while the rest is computed -------------------------------------------------


def parts_beside(problem: Projection, order: list[int], *, waits: bool) -> tuple[int, int]:
    """Read each destination's heads behind its wait, in eager calls and replays; wrong reads."""
    progress = Progress(problem.x.device, len(problem.heads))
    outs = problem.outputs()
    early = [[torch.empty_like(part) for part in parts] for parts in outs]

    def run() -> None:
        for parts in (*outs, *early):
            for part in parts:
                part.fill_(torch.nan)
        project_qkv_into(
            problem.x,
            problem.weight,
            problem.bias,
            *outs,
            **problem.options,
            order=order,
            progress=progress,
        )
        with progress.following():
            for destination in order[:-1]:
                if waits:
                    progress.wait(destination)
                for kind in range(3):
                    early[kind][destination].copy_(outs[kind][destination])
            beside = torch.cuda.current_stream()
        torch.cuda.current_stream().wait_stream(beside)

    def wrong() -> int:
        torch.cuda.synchronize()
        assert_close(outs, problem.expected())
        if waits:
            assert not bool(progress.counters.any())
        progress.counters.zero_()
        return sum(
            not torch.equal(mine[destination], right[destination])
            for mine, right in zip(early, outs, strict=True)
            for destination in order[:-1]
        )

    found = [0, 0]
    for _ in range(3):
        run()
        found[0] += wrong()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(3):
        graph.replay()
        found[1] += wrong()
    return found[0], found[1]


@pytest.mark.parametrize(
    ("heads", "order"),
    [(((8, 8, 8),) * 2, [1, 0]), (((8, 8, 8),) * 2, [0, 1]), (((3, 1, 1),) * 4, [2, 3, 0, 1])],
)
def test_a_destination_is_whole_when_its_wait_ends(
    heads: tuple[Heads, ...], order: list[int]
) -> None:
    problem = on_gpu((1, 2300), 3072, heads)
    assert parts_beside(problem, order, waits=True) == (0, 0)
    # Control: without a wait the copy beside the kernel comes too early; in a graph, where the
    # host is not in its way.
    assert parts_beside(problem, order, waits=False)[1] > 0


def test_an_order_that_leaves_one_out_is_refused() -> None:
    problem = on_gpu((1, 64), 64, ((1, 1, 1),) * 2)
    with pytest.raises(
        ValueError, match=r"order=\[1, 1\] must name each of the 2 destinations once"
    ):
        project_qkv_into(problem.x, problem.weight, None, *problem.outputs(), order=[1, 1])
