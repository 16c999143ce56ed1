"""Rows of the attention step: project V, K, Q; scatter; attend; gather; project.

On the CPU the baseline is gloo, and nothing is captured.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ulysses_ops.attention import reserve_attention, sdpa
from ulysses_ops.communicator import UlyssesCommunicator
from ulysses_ops.exchange import Exchange
from ulysses_ops.graphs import capture_step
from ulysses_ops.tools.baselines import NcclGather, NcclScatter, PlainGraph
from ulysses_ops.tools.exchange_rows import (
    compared,
    split_key,
    transport_of,
)
from ulysses_ops.tools.launch import RankContext
from ulysses_ops.tools.noise import random_values
from ulysses_ops.tools.results import Row
from ulysses_ops.tools.shapes import Shape
from ulysses_ops.tools.timing import Effort, Summary, Variant, measure, paired_ratio
from ulysses_ops.values_first import AttentionKernel, AttentionWindows

OP = "attention_step"
DTYPE = torch.bfloat16
VARIANTS = (
    "ours graph",
    "ours eager",
    "baseline graph",
    "baseline eager",
    "overlapped graph",
    "overlapped eager",
    "compute graph",
    "compute eager",
)
# With the same kernels, so that the bits must be the same.
COMPARED = (
    ("ours eager", "baseline eager"),
    ("ours graph", "baseline graph"),
    ("overlapped graph", "baseline graph"),
    ("overlapped eager", "baseline eager"),
)


def cudnn_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention by cuDNN, heads in dimension 2."""
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return sdpa(q, k, v)


@dataclass(frozen=True)
class Weights:
    """Projections of one layer, each ``(H * D, H * D)``, the same on every rank."""

    v: Tensor
    k: Tensor
    q: Tensor
    out: Tensor

    @classmethod
    def random(cls, shape: Shape, context: RankContext) -> Weights:
        """Noise that keeps the scale of what it is multiplied with."""
        width = shape.heads * shape.head_dim
        return cls(
            *(
                random_values((width, width), context, 0, 300 + salt) * width**-0.5
                for salt in range(4)
            )
        )


@dataclass(frozen=True)
class Step:
    """One attention step of one rank, by several ways of exchanging.

    Every method takes ``x`` of shape ``(B, S_local, H * D)`` and returns that shape; all compute
    with the same kernels.
    """

    shape: Shape
    world_size: int
    weights: Weights
    attention: AttentionKernel
    comm: UlyssesCommunicator
    windows: AttentionWindows
    scatters: tuple[NcclScatter, NcclScatter, NcclScatter]
    gather: NcclGather

    def _project(self, x: Tensor, weight: Tensor) -> Tensor:
        heads: Tensor = F.linear(x, weight).unflatten(-1, (self.shape.heads, self.shape.head_dim))
        return heads

    def ours(self, x: Tensor) -> Tensor:
        """V leaves while K is computed, and K while Q is."""
        weights, windows = self.weights, self.windows
        with Exchange(self.comm) as exchange:
            exchange.send(self._project(x, weights.v), windows.v)
            exchange.send(self._project(x, weights.k), windows.k)
            exchange.send(self._project(x, weights.q), windows.q)
        attended = self.attention(windows.q.tensor, windows.k.tensor, windows.v.tensor)
        with Exchange(self.comm) as exchange:
            exchange.send(attended, windows.out)
        return F.linear(windows.out.tensor.flatten(2), weights.out)

    def baseline(self, x: Tensor) -> Tensor:
        """The usual form: everything on one stream."""
        v, k, q = (
            scatter(self._project(x, weight))
            for scatter, weight in zip(self.scatters, self._order(), strict=True)
        )
        return self._rest(q, k, v)

    def overlapped(self, x: Tensor) -> Tensor:
        """V first here too: each tensor travels on NCCL's stream while the next is computed."""
        works: list[Any] = [
            scatter.start(self._project(x, weight), later=True)
            for scatter, weight in zip(self.scatters, self._order(), strict=True)
        ]
        for work in works:
            work.wait()
        v, k, q = (scatter.result() for scatter in self.scatters)
        return self._rest(q, k, v)

    def compute_only(self, x: Tensor) -> Tensor:
        """The same work with nothing exchanged: what is sent is taken for what is received."""
        window = self.shape.local_window(self.world_size)
        v, k, q = (self._project(x, weight).view(window) for weight in self._order())
        attended = self.attention(q, k, v)
        return F.linear(attended.reshape(x.shape), self.weights.out)

    def _order(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.weights.v, self.weights.k, self.weights.q

    def _rest(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        gathered = self.gather(self.attention(q, k, v))
        return F.linear(gathered.flatten(2), self.weights.out)


def choose_attention(context: RankContext, head_dim: int) -> tuple[str, AttentionKernel]:
    """Take cuDNN's kernel where it works on every rank, else torch's choice. Collective."""
    probe = torch.randn((1, 128, 2, head_dim), dtype=DTYPE, device=context.device)
    try:
        cudnn_attention(probe, probe, probe)
        works = True
    except RuntimeError:
        works = False
    return ("cudnn", cudnn_attention) if context.agree(works) else ("default", sdpa)


def attention_rows(
    context: RankContext, comm: UlyssesCommunicator, shape: Shape, effort: Effort
) -> list[Row]:
    """Check and time the attention step at one shape. Collective."""
    what = f"{shape.title}, attention step"
    context.progress(f"{what}: capture and check")
    kernel_name, kernel = choose_attention(context, shape.head_dim)
    local = shape.local_source(context.world_size)
    step = Step(
        shape,
        context.world_size,
        Weights.random(shape, context),
        kernel,
        comm,
        reserve_attention(comm, local, local, DTYPE),
        (
            NcclScatter(shape, context, DTYPE),
            NcclScatter(shape, context, DTYPE),
            NcclScatter(shape, context, DTYPE),
        ),
        NcclGather(shape, context, DTYPE),
    )
    x = random_values((*local[:2], local[2] * local[3]), context, context.rank, 400)
    step.compute_only(x)  # loads the kernels before the first signal is waited for
    variants: dict[str, Variant] = {}
    with ExitStack() as graphs:
        if context.device.type == "cuda":
            captured = capture_step(comm, step.ours, (x,))
            graphs.callback(captured.close)
            x = captured.inputs[0]  # what every variant reads
            variants["ours graph"] = Variant(captured.replay)
            variants |= _captured(context, step, x, graphs)
            # New values: a graph that does not read its input would go unnoticed.
            x.copy_(random_values(tuple(x.shape), context, context.rank, 401))
        else:
            variants["compute eager"] = Variant(lambda: step.compute_only(x))
        variants["ours eager"] = Variant(lambda: step.ours(x))
        variants["baseline eager"] = Variant(lambda: step.baseline(x))
        variants["overlapped eager"] = Variant(lambda: step.overlapped(x))
        exact: dict[str, bool | None] = dict.fromkeys(variants)
        for one, other in COMPARED:
            if one in variants and other in variants:
                same = _agree_equal(context, variants[one].run, variants[other].run)
                exact[one] = same
                exact[other] = same if exact[other] is None else exact[other] and same
        times = measure(context, variants, effort, what)
    return _as_rows(shape, comm, times, exact, kernel_name)


def _captured(context: RankContext, step: Step, x: Tensor, graphs: ExitStack) -> dict[str, Variant]:
    """The other variants in graphs that read ``x`` and are closed with ``graphs``. Collective."""
    runs = {
        "compute graph": step.compute_only,
        "baseline graph": step.baseline,
        "overlapped graph": step.overlapped,
    }
    variants = {}
    for key, run in runs.items():
        plain = PlainGraph(context, partial(run, x), f"attention step, {key}")
        graphs.callback(plain.close)
        variants[key] = Variant(plain.run)
    return variants


def _agree_equal(context: RankContext, one: Callable[[], Any], other: Callable[[], Any]) -> bool:
    """Whether both return the same bits on every rank. Collective."""
    context.line_up("check")
    first: Tensor = one().clone()
    context.line_up("check")
    second: Tensor = other().clone()
    context.line_up("check")
    return context.agree(torch.equal(first, second))


def _as_rows(
    shape: Shape,
    comm: UlyssesCommunicator,
    times: dict[str, Summary],
    exact: dict[str, bool | None],
    kernel_name: str,
) -> list[Row]:
    sent = 4 * shape.bytes_per_peer(comm.world_size, DTYPE.itemsize)  # V, K, Q and the output
    compute = times.get("compute graph") or times["compute eager"]
    rows = []
    for key in VARIANTS:
        if key not in times:
            continue
        variant, mode = split_key(key)
        rows.append(
            Row.of_times(
                OP,
                shape,
                world_size=comm.world_size,
                transport=transport_of(variant, comm),
                mode=mode,
                times=times[key],
                exact=exact[key],
                bytes_per_peer=0 if variant == "compute" else sent,
                is_exchange=False,
                tax_percent=100 * (paired_ratio(times[key], compute) - 1),
                details={"variant": variant, "attention": kernel_name},
                **compared(times, key),
            )
        )
    return rows
