"""Rows of output projections: weights whole on every rank, or sharded and brought together.

A step is a few layers of attention of own rows, each followed by its output projection. All ways
compute the same from the same inputs; what differs is where the projection's weight comes from:
it is there; prefetched one layer ahead; gathered when it is needed, by ours and by NCCL.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ulysses_ops.attention import sdpa
from ulysses_ops.communicator import UlyssesCommunicator
from ulysses_ops.graphs import capture_step
from ulysses_ops.tools.baselines import PlainGraph
from ulysses_ops.tools.launch import RankContext
from ulysses_ops.tools.results import Machine, Row, read_machine
from ulysses_ops.tools.shapes import Shape
from ulysses_ops.tools.timing import Effort, Variant, measure
from ulysses_ops.weight_shards import WeightShards

OP = "output projection, weights"
WHOLE = "whole"
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


class _Step:
    """The layers, their inputs and their weights, the same weights on every rank."""

    def __init__(self, context: RankContext, shape: Shape, layers: int) -> None:
        on_gpu = context.device.type == "cuda"
        dtype = torch.bfloat16 if on_gpu else torch.float32
        generator = torch.Generator(device=context.device).manual_seed(7)
        self.width = shape.heads * shape.head_dim

        def draw(*size: int) -> Tensor:
            kind = {"dtype": dtype, "device": context.device, "generator": generator}
            return torch.randn(*size, **kind)  # type: ignore[call-overload,no-any-return]

        self.weights = [draw(self.width, self.width) / self.width**0.5 for _ in range(layers)]
        self.q, self.k, self.v = (draw(*shape.local_window(context.world_size)) for _ in range(3))
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
    """Check and time every shape. Collective."""
    on_gpu = context.device.type == "cuda"
    machine = read_machine(context.device, context.world_size if on_gpu else 0)
    rows: list[Row] = []
    for shape in job.shapes:
        options = {"device": context.device, "allow_shared_devices": context.shares_devices}
        with (
            torch.no_grad(),
            UlyssesCommunicator(name=f"weights.{shape.key}", **options) as comm,  # type: ignore[arg-type]
        ):
            rows += _rows_of(context, comm, shape, job)
        context.deliver((machine, list(rows)))
    return machine, rows


def _nothing(layer: int) -> None:
    return None


def _rows_of(
    context: RankContext, comm: UlyssesCommunicator, shape: Shape, job: WeightJob
) -> list[Row]:
    step = _Step(context, shape, job.layers)
    shards = [WeightShards.cut(weight, comm) for weight in step.weights]
    weights = WeightShards(comm, shards)
    last = job.layers - 1

    def ahead(layer: int) -> None:
        if layer == 0:
            weights.prefetch(0)
        if layer < last:
            weights.prefetch(layer + 1)

    def when_needed(layer: int) -> Tensor:
        weights.prefetch(layer)
        return weights.whole(layer)

    def by_baseline(layer: int) -> Tensor:
        out = torch.empty_like(step.weights[layer])
        gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # its newer name
        gather(out, shards[layer], group=comm.group)
        return out

    ways: dict[str, Callable[[], Tensor]] = {
        WHOLE: lambda: step.run(step.weights.__getitem__, _nothing),
        "prefetched": lambda: step.run(weights.whole, ahead),
        "gathered when needed": lambda: step.run(when_needed, _nothing),
    }
    even = step.width % comm.world_size == 0
    if even and comm.world_size > 1 and not context.shares_devices:
        ways[BASELINE] = lambda: step.run(by_baseline, _nothing)
    expected = ways[WHOLE]()
    exact = {name: context.agree(torch.equal(run(), expected)) for name, run in ways.items()}
    with ExitStack() as graphs:
        variants = {}
        for name, run in ways.items():
            variants[name] = Variant(_captured(context, comm, graphs, name, run), job.layers)
        times = measure(context, variants, job.effort, f"{shape.title}, {OP}")
    sent = shards[0].nbytes
    saved = min(context.gather(weights.saved_bytes))
    return [
        Row.of_times(
            f"{OP} {name}",
            shape,
            world_size=comm.world_size,
            transport="none" if name == WHOLE else comm.transport,
            mode="graph" if context.device.type == "cuda" else "eager",
            times=times[name],
            exact=exact[name],
            bytes_per_peer=0 if name == WHOLE else sent,
            dtype=str(step.q.dtype).removeprefix("torch."),
            is_exchange=False,
            details={
                "variant": name,
                "layers": job.layers,
                "exposed_us": round(times[name].median_us - times[WHOLE].median_us, 1),
                **({} if name in (WHOLE, BASELINE) else {"saved_bytes": saved}),
            },
        )
        for name in ways
    ]


def _captured(
    context: RankContext,
    comm: UlyssesCommunicator,
    graphs: ExitStack,
    name: str,
    run: Callable[[], Tensor],
) -> Callable[[], object]:
    if context.device.type != "cuda":
        return run
    if name == BASELINE:
        plain = PlainGraph(context, run, name)
        graphs.callback(plain.close)
        return plain.run
    captured = capture_step(comm, run)
    graphs.callback(captured.close)
    return captured.replay
