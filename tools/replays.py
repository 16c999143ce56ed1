"""Many replays of a captured exchange, ranks skewed at random, new data each time.

NOTE [what is checked]: element ``(s, h, d)`` of replay ``n`` is ``pattern(s, h, d) + n``. After the
scatter each rank compares its window with that; then it gathers the window back and compares with
what it sent. A stale, torn or misplaced element is counted on the device: no replay waits for the
host. As a control, one replay is judged by the wrong ``n``: a counter that stays at 0 is blind.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ulysses_ops.communicator import UlyssesCommunicator
from ulysses_ops.errors import UlyssesError
from ulysses_ops.exchange import Exchange
from ulysses_ops.graphs import CapturedStep, capture_step
from ulysses_ops.tools.launch import RankContext
from ulysses_ops.tools.results import Row
from ulysses_ops.tools.shapes import Shape
from ulysses_ops.window_spec import WindowSpec
from ulysses_ops.windows import Window, reserve

OP = "replayed exchange"
DTYPE = torch.int16  # as wide as bf16, and sums wrap: the arithmetic of the check is exact
CHUNK = 250  # replays between two meetings of the ranks, which also look at the time
SHARED_CHUNK = 25  # where ranks take turns on a GPU
PARTING_S = 15.0
CYCLES_PER_US = 1800  # of torch.cuda._sleep, about
RARE = 0.002


@dataclass(frozen=True)
class ReplayJob:
    """Which shapes to replay and how often.

    Attributes:
        counts: Shapes and their number of replays.
        transport: Transport to insist on.
        mapping: Mapping to insist on.
        signal: Signal to insist on.
        skew_us: Largest random delay of a rank ahead of a replay; in rare ones 30 times that.
        seed: Of the delays.
    """

    counts: tuple[tuple[Shape, int], ...]
    transport: str | None = None
    mapping: str | None = None
    signal: str | None = None
    skew_us: float = 50.0
    seed: int = 0


def pattern(shape: Shape, seq: range, heads: range, device: torch.device) -> Tensor:
    """``(B, S, H, D)`` of numbers that differ between neighbours in every dimension."""
    b = torch.arange(shape.batch, dtype=torch.int32, device=device).view(-1, 1, 1, 1)
    s = torch.arange(seq.start, seq.stop, dtype=torch.int32, device=device).view(1, -1, 1, 1)
    h = torch.arange(heads.start, heads.stop, dtype=torch.int32, device=device).view(1, 1, -1, 1)
    d = torch.arange(shape.head_dim, dtype=torch.int32, device=device)
    return (b * 21001 + s * 7919 + h * 10473 + d * 13).to(DTYPE)


class CheckedExchange:
    """Scatter, compare, gather back, compare: one step, and what surrounds its replays."""

    def __init__(self, context: RankContext, comm: UlyssesCommunicator, shape: Shape) -> None:
        """Reserve windows, and capture where the device is a GPU. Collective."""
        world_size, rank = context.world_size, context.rank
        rows, heads = shape.seq // world_size, shape.heads // world_size
        all_rows, all_heads = range(shape.seq), range(shape.heads)
        specs = [
            WindowSpec("replays.scatter", "scatter", shape.dims, DTYPE),
            WindowSpec("replays.gather", "gather", shape.dims, DTYPE),
        ]
        self._comm = comm
        self._windows: list[Window] = reserve(comm, specs)
        own_rows = all_rows[rank * rows : (rank + 1) * rows]
        own_heads = all_heads[rank * heads : (rank + 1) * heads]
        self._sent = pattern(shape, own_rows, all_heads, context.device)
        self._expected = pattern(shape, all_rows, own_heads, context.device)
        self.mismatches = torch.zeros((), dtype=torch.int64, device=context.device)
        x, number = self._sent.clone(), torch.zeros((), dtype=DTYPE, device=context.device)
        self.captured: CapturedStep | None = None
        self._run: Callable[[], object] = lambda: self._step(x, number)
        if context.device.type == "cuda":
            self.captured = capture_step(comm, self._step, (x, number))
            self._run = self.captured.replay
            x, number = self.captured.inputs
        self._x, self._number = x, number
        self.mismatches.zero_()

    def _step(self, x: Tensor, number: Tensor) -> None:
        scattered, gathered = self._windows
        with Exchange(self._comm) as exchange:
            exchange.send(x, scattered)
        self.mismatches.add_((scattered.tensor != self._expected + number).sum())
        with Exchange(self._comm) as exchange:
            exchange.send(scattered.tensor, gathered)
        self.mismatches.add_((gathered.tensor != x).sum())

    def replay(self) -> None:
        """Once more, with new data; enqueued, not waited for."""
        self._number.add_(1)
        torch.add(self._sent, self._number, out=self._x)
        self._run()

    def call(self) -> None:
        """Once more, with new data, call by call instead of as a graph."""
        self._number.add_(1)
        torch.add(self._sent, self._number, out=self._x)
        self._step(self._x, self._number)

    def replay_judged_wrongly(self) -> None:
        """Once more with the data of before, judged as if they were new."""
        self._number.add_(1)
        self._run()

    def close(self) -> None:
        """Give the graph back."""
        if self.captured is not None:
            self.captured.close()


def replay_rows(context: RankContext, job: ReplayJob) -> list[Row]:
    """Replay every shape of the job. Collective."""
    rows = []
    until = context.deadline - PARTING_S
    for index, (shape, count) in enumerate(job.counts):
        comm = UlyssesCommunicator(
            device=context.device,
            transport=job.transport,
            mapping=job.mapping,  # type: ignore[arg-type]  # the communicator checks it
            signal=job.signal,  # type: ignore[arg-type]
            name=f"replays.{index}",
            allow_shared_devices=context.shares_devices,
        )
        with comm:
            rows.append(_replay_shape(context, comm, shape, count, until, job))
    return rows


def _replay_shape(
    context: RankContext,
    comm: UlyssesCommunicator,
    shape: Shape,
    count: int,
    until: float,
    job: ReplayJob,
) -> Row:
    context.progress(f"{shape.title}: capture")
    checked = CheckedExchange(context, comm, shape)
    draw = random.Random(f"{job.seed}/{context.rank}/{shape.key}")
    context.line_up(f"{shape.title}: replays")
    start = time.monotonic()
    chunk = SHARED_CHUNK if context.shares_devices else CHUNK
    done = 0
    while done < count:
        for _ in range(min(chunk, count - done)):
            delay(context, draw, job.skew_us)
            checked.replay()
            done += 1
        context.finish(f"{shape.title}: replay {done}")
        context.progress(f"{shape.title}: {done} of {count} replays")
        if not context.agree(time.monotonic() < until):
            break
    seconds = time.monotonic() - start
    mismatches = sum(context.gather(int(checked.mismatches)))
    checked.mismatches.zero_()
    context.line_up("control")
    checked.replay_judged_wrongly()
    context.finish("control")
    control = min(context.gather(int(checked.mismatches)))
    checked.close()
    if control == 0:
        message = (
            f"replays of {shape.title}: BLIND: a replay judged by the wrong number was not noticed"
        )
        raise UlyssesError(message)
    return Row(
        OP,
        shape.dims,
        "int16",
        context.world_size,
        comm.transport,
        "eager" if checked.captured is None else "graph",
        None,
        None,
        mismatches == 0 and done > 0,
        shape.bytes_per_peer(context.world_size, DTYPE.itemsize),
        model=shape.title,
        details={
            "replays_wanted": count,
            "replays_done": done,
            "mismatches": mismatches,
            "control_mismatches": control,
            "skew_us": job.skew_us,
            "seconds": round(seconds, 1),
            "signal": comm.signal,
            "mapping": comm.mapping,
            "shared_gpus": context.shares_devices,
        },
    )


def delay(context: RankContext, draw: random.Random, skew_us: float) -> None:
    """Hold this rank for a random time up to ``skew_us``, and rarely for 30 times that."""
    delay_us = draw.uniform(0.0, skew_us) * (30.0 if draw.random() < RARE else 1.0)
    if context.device.type == "cuda":
        torch.cuda._sleep(int(delay_us * CYCLES_PER_US))
    else:
        time.sleep(delay_us * 1e-6)
