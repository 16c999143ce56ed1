"""Rows of the fused RMSNorm + RoPE: against a copy of the same bytes, and against Inductor.

All three are timed in one interleaved run. Each call works on buffers of its own, more of them than
the cache holds, so that every byte comes from memory and goes there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ulysses_ops.norm_rope import qk_norm_rope_into
from ulysses_ops.norm_rope_checks import Norm
from ulysses_ops.tools.baselines import PlainGraph
from ulysses_ops.tools.launch import RankContext
from ulysses_ops.tools.results import Machine, Row, read_machine
from ulysses_ops.tools.shapes import Shape
from ulysses_ops.tools.timing import Effort, Summary, Variant, measure, paired_ratio

EPS = 1e-6
BEYOND_CACHE_BYTES = 256 << 20
MAX_SETS = 16
PERCENT_WITHIN_1 = 99.9


@dataclass(frozen=True)
class NormRopeJob:
    """What to measure.

    Attributes:
        shapes: ``S`` and ``H`` of Q and of K; B is 1.
        norms: Each shape is measured with each of them.
        effort: How long to measure.
        head_dim: D.
        inductor: Measure what Inductor makes of the same equations, too.
    """

    shapes: tuple[tuple[int, int], ...]
    norms: tuple[Norm, ...]
    effort: Effort
    head_dim: int = 128
    inductor: bool = True


@dataclass(frozen=True)
class _Set:
    """Buffers of one call: views of a fused projection, outputs, and as many bytes to copy."""

    q: Tensor
    k: Tensor
    out: Tensor
    source: Tensor

    @classmethod
    def make(cls, rows: int, heads: int, dim: int, device: torch.device) -> _Set:
        fused = torch.randn(1, rows, 3, heads, dim, dtype=torch.bfloat16, device=device)
        out = torch.empty(2, 1, rows, heads, dim, dtype=torch.bfloat16, device=device)
        return cls(fused[:, :, 0], fused[:, :, 1], out, torch.randn_like(out))


@dataclass(frozen=True)
class _Parameters:
    q_weight: Tensor
    k_weight: Tensor
    cos: Tensor
    sin: Tensor
    norm: Norm

    @classmethod
    def make(cls, rows: int, heads: int, dim: int, norm: Norm, device: torch.device) -> _Parameters:
        elems = dim if norm == "per_head" else heads * dim
        q_weight, k_weight = (
            (torch.rand(elems, device=device) + 0.5).to(torch.bfloat16) for _ in range(2)
        )
        frequencies = 10000.0 ** (-torch.arange(0, dim, 2, device=device) / dim)
        angles = torch.arange(rows, device=device)[:, None] * frequencies
        return cls(q_weight, k_weight, angles.cos(), angles.sin(), norm)


def plain_norm_rope(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, norm: Norm) -> Tensor:
    """The equations in fp32, rounded once, interleaved pairs; for Inductor, and to check with."""
    z = x.float() if norm == "per_head" else x.float().flatten(2)
    z = z * torch.rsqrt(z.square().mean(-1, keepdim=True) + EPS) * weight.float()
    a, b = z.view(*x.shape[:3], -1, 2).unbind(-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2).to(x.dtype)


def last_places(got: Tensor, expected: Tensor) -> Tensor:
    """How many values of ``got``'s dtype lie between it and ``expected`` rounded to that dtype."""
    bits = torch.int32 if got.dtype == torch.float32 else torch.int16
    largest = torch.iinfo(bits).max

    def place(x: Tensor) -> Tensor:
        number = x.contiguous().view(bits).long()
        return torch.where(number >= 0, number, -(number & largest))

    return (place(got) - place(expected.to(got.dtype))).abs()


def run_norm_rope(context: RankContext, job: NormRopeJob) -> tuple[Machine, list[Row]]:
    """Check and time every shape with every norm; one rank."""
    machine = read_machine(context.device, 1 if context.device.type == "cuda" else 0)
    rows: list[Row] = []
    with torch.no_grad():
        for norm in job.norms:
            for seq, heads in job.shapes:
                rows.append(_row(context, job, norm, seq, heads))
                context.deliver((machine, list(rows)))
                if context.device.type == "cuda":
                    torch.cuda.empty_cache()
    return machine, rows


def _row(context: RankContext, job: NormRopeJob, norm: Norm, seq: int, heads: int) -> Row:
    what = f"qk_norm_rope, {norm}, S={seq}, H={heads}"
    context.progress(what)
    moved_bytes = 4 * seq * heads * job.head_dim * 2  # Q and K, read and written, two bytes each
    on_gpu = context.device.type == "cuda"
    num_sets = min(max(math.ceil(BEYOND_CACHE_BYTES / moved_bytes), 1), MAX_SETS) if on_gpu else 1
    sets = [_Set.make(seq, heads, job.head_dim, context.device) for _ in range(num_sets)]
    parameters = _Parameters.make(seq, heads, job.head_dim, norm, context.device)
    correctness = _check(sets[0], parameters)
    runs = _runs(sets, parameters, job.inductor)
    graphs = {name: PlainGraph(context, run, name) for name, run in runs.items()} if on_gpu else {}
    variants = {
        name: Variant(graphs[name].run if on_gpu else run, num_sets) for name, run in runs.items()
    }
    times = measure(context, variants, job.effort, what)
    for graph in graphs.values():
        graph.close()
    right = correctness["percent_within_1"] >= PERCENT_WITHIN_1
    return Row.of_times(
        "qk_norm_rope",
        Shape("norm_rope", norm, seq, heads, job.head_dim),
        world_size=1,
        transport="none",
        mode="graph" if on_gpu else "eager",
        times=times["ours"],
        exact=None if right else False,
        bytes_per_peer=0,
        is_exchange=False,
        details={
            "norm": norm,
            "rope": "interleaved",
            "buffers": num_sets,
            **_rates(times, moved_bytes),
            **correctness,
        },
    )


def _runs(
    sets: list[_Set], parameters: _Parameters, inductor: bool
) -> dict[str, Callable[[], object]]:
    """One call for every set of buffers."""

    def ours() -> None:
        for buffers in sets:
            _launch(buffers, parameters)

    def copy() -> None:
        for buffers in sets:
            buffers.out.copy_(buffers.source)

    runs: dict[str, Callable[[], object]] = {"ours": ours, "copy": copy}
    if inductor:
        torch._dynamo.reset()  # no shape is to be compiled as a dynamic one
        compiled = torch.compile(_plain_pair, fullgraph=True, dynamic=False)

        def by_inductor() -> None:
            for buffers in sets:
                compiled(buffers.q, buffers.k, parameters)

        runs["inductor"] = by_inductor
    return runs


def _launch(buffers: _Set, p: _Parameters) -> None:
    outs = ([buffers.out[0]], [buffers.out[1]])
    qk_norm_rope_into(
        [buffers.q],
        [buffers.k],
        *outs,
        q_weight=p.q_weight,
        k_weight=p.k_weight,
        cos=p.cos,
        sin=p.sin,
        norm=p.norm,
        eps=EPS,
    )


def _plain_pair(q: Tensor, k: Tensor, p: _Parameters) -> tuple[Tensor, Tensor]:
    return (
        plain_norm_rope(q, p.q_weight, p.cos, p.sin, p.norm),
        plain_norm_rope(k, p.k_weight, p.cos, p.sin, p.norm),
    )


def _check(buffers: _Set, parameters: _Parameters) -> dict[str, Any]:
    _launch(buffers, parameters)
    within, largest = [], 0
    for got, expected in zip(
        buffers.out, _plain_pair(buffers.q, buffers.k, parameters), strict=True
    ):
        places = last_places(got, expected)
        within.append(float((places <= 1).float().mean(dtype=torch.float64)) * 100)
        largest = max(largest, int(places.max()))
    return {"percent_within_1": min(within), "max_places": largest}


def _rates(times: dict[str, Summary], moved_bytes: int) -> dict[str, float]:
    """GB/s are 1e9 bytes, read and written, over the median; ratios are paired by round."""

    def gbs(name: str) -> float:
        return round(moved_bytes / times[name].median_us / 1e3, 1)

    rates = {
        "gbs": gbs("ours"),
        "copy_us": round(times["copy"].median_us, 2),
        "copy_gbs": gbs("copy"),
        "percent_of_copy": round(100 * paired_ratio(times["copy"], times["ours"]), 1),
    }
    if "inductor" in times:
        rates |= {
            "inductor_us": round(times["inductor"].median_us, 2),
            "inductor_gbs": gbs("inductor"),
            "x_inductor": round(paired_ratio(times["inductor"], times["ours"]), 2),
        }
    return rates
