"""Rows of one scatter or gather beside other work: a chain of GEMMs, or a rank that is late.

    hidden % = 100 (serial - concurrent) / exchange alone

*Serial* is the exchange, then the chain; *concurrent* begins the exchange, runs the chain, and then
completes. For the late rank a delay of known length precedes every exchange of the last rank: what
the step takes beyond that delay is the price of the exchange when the others had to wait for it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from ulysses_ops.communicator import UlyssesCommunicator
from ulysses_ops.exchange import Exchange
from ulysses_ops.graphs import capture_step
from ulysses_ops.tools.baselines import PlainGraph
from ulysses_ops.tools.exchanged import Exchanged, gather_of, matches_baseline, scatter_of
from ulysses_ops.tools.launch import RankContext
from ulysses_ops.tools.noise import random_values
from ulysses_ops.tools.paired import excess_us, hidden_percent
from ulysses_ops.tools.replays import CYCLES_PER_US
from ulysses_ops.tools.results import Mode, Row
from ulysses_ops.tools.shapes import Shape
from ulysses_ops.tools.timing import Effort, Summary, Variant, measure, time_runs

CALLS = 4  # in a graph
LATE_US = 200.0
CHAIN_LENGTH = 1.5  # of the slower exchange alone
MAX_GEMMS = 64
WAYS = ("ours", "baseline")


class GemmChain:
    """``y = x W`` again and again: the work that an exchange is to hide behind."""

    def __init__(self, shape: Shape, context: RankContext) -> None:
        """Take GEMMs of the projections of this shape."""
        batch, rows, heads, dim = shape.local_source(context.world_size)
        width = heads * dim
        self._x = random_values((batch * rows, width), context, context.rank, 700)
        self._weight = random_values((width, width), context, 0, 701)
        self._y = torch.empty_like(self._x)
        self.count = 1

    def run(self) -> None:
        """Enqueue the chain."""
        for _ in range(self.count):
            torch.mm(self._x, self._weight, out=self._y)

    def fit(self, context: RankContext, exchanges: list[Callable[[], object]]) -> None:
        """Make the chain longer than any of the exchanges alone. Collective."""
        self.count = 1
        gemm_us = _quick_us(context, self.run)
        longest_us = max(_quick_us(context, run) for run in exchanges)
        wanted = max(context.gather(CHAIN_LENGTH * longest_us / gemm_us))
        self.count = max(1, min(MAX_GEMMS, round(wanted)))


def _quick_us(context: RankContext, run: Callable[[], object]) -> float:
    context.line_up("length of the chain")
    return statistics.median(time_runs(context, run, 5, "length of the chain"))


@dataclass(frozen=True)
class _Loaded:
    """One operator beside other work."""

    context: RankContext
    comm: UlyssesCommunicator
    prepared: Exchanged
    chain: GemmChain

    def ours(self, between: Callable[[], None] | None = None) -> None:
        """Send, do what is to run beside it, complete."""
        with Exchange(self.comm) as exchange:
            exchange.send(self.prepared.source(0), self.prepared.window)
            if between is not None:
                between()

    def baseline(self, between: Callable[[], None] | None = None) -> None:
        """The same by NCCL, on its own stream where something runs beside it."""
        work = self.prepared.baseline.start(self.prepared.source(0), later=between is not None)
        if between is not None:
            between()
            work.wait()
        self.prepared.baseline.result()

    def serial(self, exchange: Callable[..., None]) -> None:
        """First the exchange, then the chain."""
        exchange()
        self.chain.run()

    def late(self, exchange: Callable[..., None]) -> None:
        """The exchange, to which the last rank comes late."""
        if self.context.rank == self.context.world_size - 1:
            self.delay()
        exchange()

    def delay(self) -> None:
        """The delay alone."""
        if self.context.device.type == "cuda":
            torch.cuda._sleep(int(LATE_US * CYCLES_PER_US))
        else:
            time.sleep(LATE_US * 1e-6)

    def steps(self) -> dict[str, Callable[[], None]]:
        """Everything that is timed, by ``way/what``."""
        steps: dict[str, Callable[[], None]] = {"/delay": self.delay, "/chain": self.chain.run}
        for way, run in {"ours": self.ours, "baseline": self.baseline}.items():
            steps[f"{way}/alone"] = run
            steps[f"{way}/serial"] = lambda run=run: self.serial(run)  # type: ignore[misc]
            steps[f"{way}/concurrent"] = lambda run=run: run(self.chain.run)  # type: ignore[misc]
            steps[f"{way}/late"] = lambda run=run: self.late(run)  # type: ignore[misc]
        return steps


def load_rows(
    context: RankContext, comm: UlyssesCommunicator, shape: Shape, effort: Effort
) -> list[Row]:
    """Check and time scatter and gather beside GEMMs, and with one rank late. Collective."""
    chain = GemmChain(shape, context)
    scatter, gather = scatter_of(context, comm, shape), gather_of(context, comm, shape)
    rows = _rows_of(_Loaded(context, comm, scatter, chain), effort.share(2))
    return rows + _rows_of(_Loaded(context, comm, gather, chain), effort)


def _rows_of(loaded: _Loaded, effort: Effort) -> list[Row]:
    context, prepared = loaded.context, loaded.prepared
    what = f"{prepared.shape.title}, {prepared.op} beside other work"
    context.progress(what)
    loaded.chain.fit(context, [loaded.ours, loaded.baseline])
    steps = loaded.steps()
    variants = {key: Variant(run) for key, run in steps.items()}
    with ExitStack() as graphs:
        if context.device.type == "cuda":
            for key, run in steps.items():
                replay = _captured(loaded, key, run, graphs)
                variants[key] = Variant(replay, CALLS)
        exact = {
            key: _is_exact(loaded, key, variants[key].run)
            for key in variants
            if key.endswith(("/concurrent", "/late"))
        }
        times = measure(context, variants, effort, what)
    rows_of = (_beside, _late)
    return [row_of(loaded, way, times, exact) for way in WAYS for row_of in rows_of]


def _is_exact(loaded: _Loaded, key: str, run: Callable[[], object]) -> bool:
    """Whether what arrives beside other work is what NCCL alone delivers, bit for bit."""
    context, prepared = loaded.context, loaded.prepared
    if key.startswith("ours"):
        return matches_baseline(context, prepared, run, 0)
    prepared.baseline.clear()
    context.line_up(f"check of {key}")
    run()
    context.finish(f"check of {key}")
    found = prepared.baseline.result().clone()
    context.line_up(f"check of {key}")
    return context.agree(torch.equal(found, prepared.baseline(prepared.source(0))))


def _captured(
    loaded: _Loaded, key: str, run: Callable[[], None], graphs: ExitStack
) -> Callable[[], Any]:
    def calls() -> None:
        for _ in range(CALLS):
            run()

    if key.startswith("ours"):
        step = capture_step(loaded.comm, calls)
        graphs.callback(step.close)
        return step.replay
    plain = PlainGraph(loaded.context, calls, key)
    graphs.callback(plain.close)
    return plain.run


def _beside(loaded: _Loaded, way: str, times: dict[str, Summary], exact: dict[str, bool]) -> Row:
    alone, serial = times[f"{way}/alone"], times[f"{way}/serial"]
    concurrent = times[f"{way}/concurrent"]
    hidden = hidden_percent(serial, concurrent, alone)
    return _row(
        loaded,
        "beside GEMMs",
        way,
        concurrent,
        exact[f"{way}/concurrent"],
        {
            "gemms": loaded.chain.count,
            "alone_us": round(alone.median_us, 3),
            "chain_us": round(times["/chain"].median_us, 3),
            "serial_us": round(serial.median_us, 3),
        },
        hidden_percent=hidden.median,
        hidden_quartiles=hidden.quartiles,
    )


def _late(loaded: _Loaded, way: str, times: dict[str, Summary], exact: dict[str, bool]) -> Row:
    late, delay = times[f"{way}/late"], times["/delay"]
    beyond = excess_us(late, delay)
    return _row(
        loaded,
        "one rank late",
        way,
        late,
        exact[f"{way}/late"],
        {
            "alone_us": round(times[f"{way}/alone"].median_us, 3),
            "delay_us": round(delay.median_us, 3),
            "beyond_delay_us": round(beyond.median, 3),
        },
    )


def _row(
    loaded: _Loaded,
    load: str,
    way: str,
    times: Summary,
    exact: bool,
    details: dict[str, float],
    **more: Any,
) -> Row:
    context, prepared, comm = loaded.context, loaded.prepared, loaded.comm
    mode: Mode = "graph" if context.device.type == "cuda" else "eager"
    plain = "nccl" if context.device.type == "cuda" else "gloo"
    return Row.of_times(
        f"{prepared.op}, {load}",
        prepared.shape,
        world_size=comm.world_size,
        transport=comm.transport if way == "ours" else plain,
        mode=mode,
        times=times,
        exact=exact,
        bytes_per_peer=prepared.bytes_per_peer,
        is_exchange=False,
        details={"variant": way, **details},
        **more,
    )
