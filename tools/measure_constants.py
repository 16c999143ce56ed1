"""Measures what the planner of schedules computes with, on two GPUs, and writes it to a file.

    python -m ulysses_ops.tools.measure_constants --out ulysses_ops/constants.json

GEMMs and attention are those of one rank of the production shapes, whole and in halves, in a graph
each. Their sizes count the idle SMs of a last wave as work, as the planner does. A rate that falls
with size is a clock that has fallen meanwhile, which in a step all parts share: such rows are
joined to their mean.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from torch import Tensor

from ulysses_ops.communicator import UlyssesCommunicator
from ulysses_ops.constants import Constants, RateTable
from ulysses_ops.exchange import Exchange
from ulysses_ops.forecast import attention_gflop, gemm_gflop
from ulysses_ops.norm_rope import qk_norm_rope_into
from ulysses_ops.tools.attention_rows import choose_attention
from ulysses_ops.tools.baselines import PlainGraph
from ulysses_ops.tools.cuda_runtime import RowCopy
from ulysses_ops.tools.handshake_rows import handshake_rows
from ulysses_ops.tools.launch import Launch, RankContext, RankError, run_ranks
from ulysses_ops.tools.noise import random_values
from ulysses_ops.tools.out_folder import refuse_file
from ulysses_ops.tools.peer_copy import PeerCopy
from ulysses_ops.tools.results import read_machine
from ulysses_ops.tools.revision import read_commit
from ulysses_ops.tools.shapes import FUNCTIONAL, PRODUCTION, Shape
from ulysses_ops.tools.timing import Effort, Variant, measure
from ulysses_ops.window_spec import WindowSpec
from ulysses_ops.windows import reserve

GEMM_TILE = (128, 256)
ATTENTION_TILE_ROWS = 128
COPIES = 8  # in a graph
WORLD_SIZE = 2


@dataclass(frozen=True)
class ConstantsJob:
    """What to measure.

    Attributes:
        shapes: Whose GEMMs and attention.
        copy_bytes: A short and a long copy to a peer; the first is what launches cost, too.
        effort: How long.
        commit: What is run.
    """

    shapes: tuple[Shape, ...]
    copy_bytes: tuple[int, int]
    effort: Effort
    commit: str | None


def measure_rank(context: RankContext, job: ConstantsJob) -> Constants:
    """Measure everything; the slowest rank counts. Collective."""
    device = context.device
    num_sms = 1
    if device.type == "cuda":
        num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    comm = UlyssesCommunicator(device=device, name="constants")
    with torch.no_grad(), comm, ExitStack() as graphs:
        work = _Work(context, graphs)
        gemms, attentions = work.add_products(job.shapes, num_sms)
        elems = work.add_elementwise(job.shapes[0])
        work.add_copies(comm, job.copy_bytes)
        times = measure(context, work.variants, job.effort, "constants")
        us = {name: summary.median_us for name, summary in times.items()}
        handshake_us = 0.0
        if device.type == "cuda":
            details = handshake_rows(context, comm, job.effort)[0].details or {}
            handshake_us = max(float(details["handshake_us"]), 0.0)
    short, long = job.copy_bytes
    bytes_a_us = (long - short) / max(us["long copy"] - us["short copy"], 1e-3)
    machine = read_machine(device, WORLD_SIZE)
    return Constants(
        device=machine.gpu,
        source=(
            f"tools/measure_constants.py on {WORLD_SIZE}x {machine.gpu}, torch {machine.torch}, "
            f"driver {machine.driver}, commit {job.commit}, "
            f"{datetime.now(timezone.utc).date().isoformat()}"
        ),
        num_sms=num_sms,
        gemm_tile=GEMM_TILE,
        attention_tile_rows=ATTENTION_TILE_ROWS,
        gemm_rates=_rates(gemms, us),
        attention_rates=_rates(attentions, us),
        elementwise_gbs=_short(2 * elems * 2 / us["norm and rope"] / 1e3),
        own_copy_gbs=_short(elems // WORLD_SIZE * 2 / us["own copy"] / 1e3),
        peer_copy_gbs=_short(bytes_a_us / 1e3),
        copy_launch_us=round(max(us["short copy"] - short / bytes_a_us, 0.0), 2),
        handshake_us=round(handshake_us, 2),
    )


def _rates(sizes: dict[str, float], us: dict[str, float]) -> RateTable:
    """TFLOP/s by GFLOP."""
    return rising([(gflop, gflop / us[name] * 1e3) for name, gflop in sizes.items()])


class _Work:
    """What is timed, each in a graph where the device is a GPU."""

    def __init__(self, context: RankContext, graphs: ExitStack) -> None:
        self.variants: dict[str, Variant] = {}
        self._context, self._graphs = context, graphs
        self._salt = 0

    def _noise(self, *shape: int) -> Tensor:
        self._salt += 1
        return random_values(shape, self._context, self._context.rank, 700 + self._salt)

    def _add(self, name: str, run: Callable[[], object], calls: int = 1) -> None:
        def repeat() -> None:
            for _ in range(calls):
                run()

        timed: Callable[[], object] = repeat
        if self._context.device.type == "cuda":
            graph = PlainGraph(self._context, repeat, name)
            self._graphs.callback(graph.close)
            timed = graph.run
        self.variants[name] = Variant(timed, calls)

    def add_products(
        self, shapes: Sequence[Shape], num_sms: int
    ) -> tuple[dict[str, float], dict[str, float]]:
        """GEMMs and attention; returns their sizes in GFLOP, by name."""
        gemms, attentions = {}, {}
        _, kernel = choose_attention(self._context, shapes[0].head_dim)
        for shape in shapes:
            width, heads = shape.heads * shape.head_dim, shape.heads // WORLD_SIZE
            rows = shape.batch * shape.seq // WORLD_SIZE
            x, weight = self._noise(rows, width), self._noise(width, width)
            for part in (1, 2):
                name = f"{shape.key}, gemm / {part}"
                columns = width // part
                gemms[name] = gemm_gflop(rows, columns, width, num_sms, GEMM_TILE)
                self._add(name, lambda x=x, w=weight[:columns]: F.linear(x, w))  # type: ignore[misc]
            q, k, v = (self._noise(shape.batch, shape.seq, heads, shape.head_dim) for _ in range(3))
            for part in (1, 2):
                name = f"{shape.key}, attention / {part}"
                sizes = (shape.batch * heads, shape.seq // part, shape.seq, shape.head_dim)
                attentions[name] = attention_gflop(*sizes, num_sms, ATTENTION_TILE_ROWS)
                self._add(name, lambda q=q[:, : sizes[1]], k=k, v=v: kernel(q, k, v))  # type: ignore[misc]
        return gemms, attentions

    def add_elementwise(self, shape: Shape) -> int:
        """Norm, RoPE and a copy of one rank's Q; returns its elements."""
        x = self._noise(shape.batch, shape.seq // WORLD_SIZE, shape.heads, shape.head_dim)
        angles = torch.zeros(x.shape[1], shape.head_dim // 2, device=x.device)
        weight, out = self._noise(shape.head_dim), torch.empty_like(x)
        cos, sin = angles.cos(), angles.sin()
        self._add(
            "norm and rope",
            lambda: qk_norm_rope_into([x], [], [out], [], q_weight=weight, cos=cos, sin=sin),
        )
        # As exchanges copy it: rows of some heads, which lie apart in the source alone.
        wide = x.flatten(0, 1).flatten(1).view(torch.uint8)
        own = wide[:, : wide.shape[1] // WORLD_SIZE]
        window = torch.empty_like(own, memory_format=torch.contiguous_format)
        own_copy = RowCopy() if x.device.type == "cuda" else Tensor.copy_
        self._add("own copy", lambda: own_copy(window, own))
        return x.numel()

    def add_copies(self, comm: UlyssesCommunicator, copy_bytes: tuple[int, int]) -> None:
        """Copies to the peer, both ways at once; whole exchanges where nothing maps its memory."""
        for name, num_bytes in zip(("short copy", "long copy"), copy_bytes, strict=True):
            dims = (1, WORLD_SIZE, WORLD_SIZE, num_bytes // 2)
            (window,) = reserve(
                comm, [WindowSpec(f"constants.{name}", "scatter", dims, torch.bfloat16)]
            )
            source = self._noise(num_bytes // 2)
            if window.memory is not None:
                flat = PeerCopy(window, self._context.rank, num_bytes, source)
                self._add(name, flat.run, COPIES)
                continue
            x = source.expand(window.source_shape)

            def exchange(x: Tensor = x, window: object = window) -> None:
                with Exchange(comm) as in_flight:
                    in_flight.send(x, window)  # type: ignore[arg-type]

            self._add(name, exchange)


def rising(rows: Sequence[tuple[float, float]]) -> RateTable:
    """Rates by size, with falling stretches, and equal sizes, joined to their mean."""
    joined: list[list[tuple[float, float]]] = []
    for size, rate in sorted(rows):
        joined.append([(_short(size), rate)])
        while len(joined) > 1 and (
            _mean(joined[-1]) < _mean(joined[-2]) or joined[-1][0][0] == joined[-2][-1][0]
        ):
            last = joined.pop()
            joined[-1] += last
    table = {size: _short(_mean(group)) for group in joined for size, _ in group}
    return tuple(table.items())


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def _mean(rows: Sequence[tuple[float, float]]) -> float:
    return statistics.fmean(rate for _, rate in rows)


def measure_constants(
    out: Annotated[Path | None, typer.Option(help="File to write.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds.")] = 3,
    batch_ms: Annotated[
        float, typer.Option(min=0.1, help="Time for each piece in a round, in ms.")
    ] = 40.0,
    cpu: Annotated[bool, typer.Option(help="Small shapes on the CPU: a functional run.")] = False,
    time_limit: Annotated[
        float, typer.Option(min=10, help="Wall time for all ranks, in seconds.")
    ] = 120.0,
    commit: Annotated[
        str | None, typer.Option(help="Commit that is run, where git cannot tell.")
    ] = None,
) -> None:
    """Measure the constants of this machine and print them as JSON."""
    refuse_file(out)
    console = Console(stderr=True)
    commit = commit or read_commit()
    if cpu:
        launch = Launch(WORLD_SIZE, "cpu", 0, time_limit)
        job = ConstantsJob(FUNCTIONAL[:1], (256, 65536), Effort(2, 0.5), commit)
    else:
        if torch.cuda.device_count() < WORLD_SIZE:
            message = f"{WORLD_SIZE} GPUs are needed, {torch.cuda.device_count()} are visible"
            raise typer.BadParameter(f"{message}; add --cpu for a functional run")
        launch = Launch(WORLD_SIZE, "cuda", WORLD_SIZE, time_limit)
        job = ConstantsJob(PRODUCTION, (1 << 20, 64 << 20), Effort(rounds, batch_ms), commit)
    try:
        found: Constants = run_ranks(
            measure_rank, job, launch, on_progress=lambda text: console.print(text, style="dim")
        )[0]
    except RankError as error:
        console.print(str(error), style="red", markup=False, highlight=False)
        raise typer.Exit(1) from error
    text = json.dumps(found.to_json(), indent=2) + "\n"
    print(text, end="")
    if out is not None:
        out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    typer.run(measure_constants)
