"""Rows of output projections: weights whole on every rank, or sharded and brought together.

A step is a few layers of attention of own rows, each followed by its output projection. All ways
compute the same from the same inputs; what differs is where the projection's weight comes from:
it is there; prefetched one layer ahead; gathered when it is needed, by ours and by NCCL.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ulysses_ops.attention import sdpa
from ulysses_ops.communicator import UlyssesCommunicator
from ulysses_ops.graphs import capture_step
from ulysses_ops.tools.baselines import PlainGraph, all_gather_flat
from ulysses_ops.tools.budget import Budget
from ulysses_ops.tools.exchange_rows import transport_of
from ulysses_ops.tools.held import read_held
from ulysses_ops.tools.launch import RankContext
from ulysses_ops.tools.paired import excess_us
from ulysses_ops.tools.replays import PARTING_S
from ulysses_ops.tools.results import Machine, Row, read_machine
from ulysses_ops.tools.shapes import Shape
from ulysses_ops.tools.timing import Effort, Variant, measure
from ulysses_ops.weight_shards import WeightShards

OP = "output projection, weights"
WHOLE = "whole"
PREFETCHED = "prefetched"
WHEN_NEEDED = "gathered when needed"
BASELINE = "gathered by the baseline"
Fetch = Callable[[int], Tensor]


@dataclass(frozen=True)
class WeightJob:
    """What to measure.

    Attributes:
        shapes: Global shapes of the attention; the projection is H * D by H * D.
        layers: Layers of a step.
        effort: How long to measure.
    """

    shapes: tuple[Shape, ...]
    layers: int
    effort: Effort


def draw(context: RankContext, seed: int, *sizes: tuple[int, ...]) -> list[Tensor]:
    """Noise of these sizes, the same on every rank: bf16 on a GPU, fp32 on the CPU."""
    dtype = torch.bfloat16 if context.device.type == "cuda" else torch.float32
    generator = torch.Generator(device=context.device).manual_seed(seed)
    options = {"dtype": dtype, "device": context.device, "generator": generator}
    return [torch.randn(size, **options) for size in sizes]  # type: ignore[call-overload]


def draw_weights(context: RankContext, shape: Shape, layers: int) -> list[Tensor]:
    """The whole weight of each layer, the same on every rank."""
    width = shape.heads * shape.head_dim
    return [x.div_(width**0.5) for x in draw(context, 7, *[(width, width)] * layers)]


class _Step:
    """The layers: their inputs, and their whole weights."""

    def __init__(self, context: RankContext, shape: Shape, weights: list[Tensor]) -> None:
        self.weights = weights
        self.width = shape.heads * shape.head_dim
        window = shape.local_window(context.world_size)
        self.q, self.k, self.v = draw(context, 8, *[window] * 3)
        rows = shape.seq // context.world_size
        self.shape = (shape.batch, rows, self.width)

    def run(self, weight: Fetch, begin: Callable[[int], None]) -> Tensor:
        """Attention and projection, layer after layer; ``begin(i)`` before the attention of i."""
        total = self.q.new_zeros(self.shape)
        for layer in range(len(self.weights)):
            begin(layer)
            # Nothing but the weight is exchanged: what is reshaped stands for the gathered rows.
            attended = sdpa(self.q + layer, self.k, self.v)
            total = total + attended.reshape(self.shape) @ weight(layer).T
        return total


def weight_rows(context: RankContext, job: WeightJob) -> tuple[Machine, list[Row]]:
    """Check and time every shape; they share the time that there is. Collective."""
    on_gpu = context.device.type == "cuda"
    machine = read_machine(context.device, context.world_size if on_gpu else 0)
    rows: list[Row] = []
    budget = Budget(context.deadline - PARTING_S, {shape.key: 1.0 for shape in job.shapes})
    for shape in job.shapes:
        options = {"device": context.device, "allow_shared_devices": context.shares_devices}
        with (
            torch.no_grad(),
            UlyssesCommunicator(name=f"weights.{shape.key}", **options) as comm,  # type: ignore[arg-type]
        ):
            effort = budget.effort(shape.key, job.effort)
            rows += _rows_of(context, comm, shape, job.layers, effort)
        context.deliver((machine, list(rows)))
    return machine, rows


@dataclass(frozen=True)
class _Both:
    """The same weights whole and sharded, and what each form has taken of the device.

    Attributes:
        whole: Of each layer.
        shards: This rank's rows of each.
        sharded: Brings them together.
        taken: Bytes of both, of the rank where they are most; empty where ranks share a GPU or
            have none.
    """

    whole: list[Tensor]
    shards: list[Tensor]
    sharded: WeightShards
    taken: dict[str, int]


def _make_both(context: RankContext, comm: UlyssesCommunicator, shape: Shape, layers: int) -> _Both:
    context.progress(f"{shape.title}: weights")
    for weight in draw_weights(context, shape, 1):  # loads kernels, which take memory too
        WeightShards.cut(weight, comm)
    del weight
    read_held(context.device)
    context.line_up("weights")  # memory of the shape before is free once its peers have let go
    before = read_held(context.device).gpu_bytes
    whole = draw_weights(context, shape, layers)
    between = read_held(context.device).gpu_bytes
    shards = [WeightShards.cut(weight, comm) for weight in whole]
    sharded = WeightShards(comm, shards)
    after = read_held(context.device).gpu_bytes
    taken = {"whole_bytes": between - before, "sharded_bytes": after - between}
    taken = {name: max(context.gather(size)) for name, size in taken.items()}
    can_tell = context.device.type == "cuda" and not context.shares_devices
    return _Both(whole, shards, sharded, taken if can_tell else {})


def _nothing(layer: int) -> None:
    return None


def _ways(
    context: RankContext, comm: UlyssesCommunicator, step: _Step, both: _Both
) -> dict[str, Callable[[], Tensor]]:
    weights, last = both.sharded, len(both.whole) - 1

    def ahead(layer: int) -> None:
        if layer == 0:
            weights.prefetch(0)
        if layer < last:
            weights.prefetch(layer + 1)

    def when_needed(layer: int) -> Tensor:
        weights.prefetch(layer)
        return weights.whole(layer)

    def by_baseline(layer: int) -> Tensor:
        out = torch.empty_like(both.whole[layer])
        all_gather_flat(out, both.shards[layer], group=comm.group)
        return out

    ways: dict[str, Callable[[], Tensor]] = {
        WHOLE: lambda: step.run(both.whole.__getitem__, _nothing),
        PREFETCHED: lambda: step.run(weights.whole, ahead),
        WHEN_NEEDED: lambda: step.run(when_needed, _nothing),
    }
    even = step.width % comm.world_size == 0
    if even and comm.world_size > 1 and not context.shares_devices:
        ways[BASELINE] = lambda: step.run(by_baseline, _nothing)
    return ways


def _rows_of(
    context: RankContext, comm: UlyssesCommunicator, shape: Shape, layers: int, effort: Effort
) -> list[Row]:
    both = _make_both(context, comm, shape, layers)
    step = _Step(context, shape, both.whole)
    ways = _ways(context, comm, step, both)
    expected = ways[WHOLE]()
    exact = {name: context.agree(torch.equal(run(), expected)) for name, run in ways.items()}
    with ExitStack() as graphs:
        runs = {name: _captured(context, comm, graphs, name, run) for name, run in ways.items()}
        # Other weights than those that the graphs were captured with: stale ones would show.
        context.line_up("other weights")
        for weight in (*both.whole, *both.shards):
            weight.neg_()
        expected = ways[WHOLE]()
        for name, run in runs.items():
            found = run()
            context.finish(f"check of {name}")
            exact[name] &= context.agree(torch.equal(found, expected))
        variants = {name: Variant(run, layers) for name, run in runs.items()}
        times = measure(context, variants, effort, f"{shape.title}, {OP}")
    saved = min(context.gather(both.sharded.saved_bytes))
    rows = []
    for name in ways:
        exposed = excess_us(times[name], times[WHOLE])
        details = {
            "variant": name,
            "layers": layers,
            "exposed_us": round(exposed.median, 1),
            "exposed_quartiles_us": [round(value, 1) for value in exposed.quartiles],
            **({"saved_bytes": saved, **both.taken} if name in (PREFETCHED, WHEN_NEEDED) else {}),
        }
        rows.append(
            Row.of_times(
                f"{OP} {name}",
                shape,
                world_size=comm.world_size,
                transport=_transport(name, comm),
                mode="graph" if context.device.type == "cuda" else "eager",
                times=times[name],
                exact=exact[name],
                bytes_per_peer=0 if name == WHOLE else both.shards[0].nbytes,
                dtype=str(step.q.dtype).removeprefix("torch."),
                is_exchange=False,
                details=details,
            )
        )
    return rows


def _transport(name: str, comm: UlyssesCommunicator) -> str:
    if name == WHOLE:
        return "none"
    return transport_of("baseline" if name == BASELINE else "ours", comm)


def _captured(
    context: RankContext,
    comm: UlyssesCommunicator,
    graphs: ExitStack,
    name: str,
    run: Callable[[], Tensor],
) -> Callable[[], Any]:
    if context.device.type != "cuda":
        return run
    if name == BASELINE:
        plain = PlainGraph(context, run, name)
        graphs.callback(plain.close)
        return plain.run
    captured = capture_step(comm, run)
    graphs.callback(captured.close)
    return captured.replay
