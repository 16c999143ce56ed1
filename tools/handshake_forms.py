"""Rows of what a handshake costs by its form, and a fork and a join: alone, and beside GEMMs.

    alone         handshakes one behind the other
    under GEMMs   the same, while a chain of GEMMs that is longer runs on another stream
    GEMMs lose    (the chain with the handshakes beside it - the chain alone) / handshakes

Each eager and in a graph. All forms speak the same protocol: write a word at every peer, wait for
the own words, put them back to 0, with two sets of words in turn.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ulysses_ops.tools.attempts import attempt
from ulysses_ops.tools.baselines import PlainGraph
from ulysses_ops.tools.launch import RankContext
from ulysses_ops.tools.load_rows import GemmChain
from ulysses_ops.tools.paired import excess_us
from ulysses_ops.tools.results import Mode, Row
from ulysses_ops.tools.shapes import Shape
from ulysses_ops.tools.timing import Effort, Summary, Variant, measure, time_runs

OP = "handshake form"
BRANCHES = "fork and join"
HANDSHAKES = 20  # in a run
KERNELS = 200  # of the caller, in a graph of forks or joins
LONGER = 1.5  # chain of GEMMs over the handshakes beside it
MAX_GEMMS = 200
TRIES = 4  # to find that length: beside GEMMs a form may take longer
GEMMS = Shape("gemms", "GEMMs", 4096, 32, 128)  # rows of all ranks, heads, head size


@dataclass(frozen=True)
class Form:
    """One way to shake hands.

    Attributes:
        run: Enqueues so many handshakes; an even number. Collective.
        capture: Captures ``run`` and returns what replays it, with what closes it on the stack.
        is_at_rest: Whether no wait ended unanswered and no word is left; asked when all is done.
    """

    run: Callable[[int], object]
    capture: Callable[[Callable[[], object], ExitStack], Callable[[], object]]
    is_at_rest: Callable[[], bool] = lambda: True


class Load:
    """A chain of GEMMs, on a stream of its own where there are streams."""

    def __init__(self, context: RankContext, chain: GemmChain, closing: ExitStack) -> None:
        """Take the chain as long as it is now, as a graph on GPUs: few calls of the host."""
        self.on_gpu = context.device.type == "cuda"
        self.count = chain.count
        self.run: Callable[[], object] = partial(_run_chain, chain, chain.count)
        if self.on_gpu:
            self.stream = torch.cuda.Stream(context.device)
            graph = PlainGraph(context, self.run, "chain of GEMMs", warm_up=1)
            closing.callback(graph.close)
            self.run = graph.run

    def beside(self, work: Callable[[], object]) -> None:
        """``work`` on the current stream while the chain runs; the chain may go on after it."""
        self._on_its_stream(self.run)
        work()

    def with_beside(self, work: Callable[[], object]) -> None:
        """The chain on the current stream, and ``work`` on the other one."""
        self._on_its_stream(work)
        self.run()

    def _on_its_stream(self, work: Callable[[], object]) -> None:
        if self.on_gpu:
            with torch.cuda.stream(self.stream):
                work()
        else:
            work()

    def join(self) -> None:
        """Order the current stream behind what is left on the other one."""
        if self.on_gpu:
            torch.cuda.current_stream().wait_stream(self.stream)


def _run_chain(chain: GemmChain, count: int) -> None:
    chain.count = count
    chain.run()


def form_rows(
    context: RankContext,
    forms: Mapping[str, Callable[[], Form]],
    effort: Effort,
    not_run: dict[str, str],
    *,
    gemms: Shape = GEMMS,
) -> list[Row]:
    """Time every form that can be made, all in one interleaved run. Collective."""
    with ExitStack() as closing:
        variants: dict[str, Variant] = {}
        built: dict[str, tuple[Form, Load]] = {}
        chain = GemmChain(gemms, context)
        for name, make in forms.items():
            context.progress(f"{OP}: {name}")
            made = attempt(context, make)
            if made.reason or made.value is None:
                not_run[f"{OP}: {name}"] = made.reason
                continue
            form = made.value
            for mode, run in _modes(context, form, closing).items():
                key = f"{name}/{mode}"
                load = _fit(context, chain, run, closing)
                built[key] = (form, load)
                variants |= _variants(key, run, load)
        times = measure(context, variants, effort, OP) if variants else {}
        for _, load in built.values():
            load.join()
        context.line_up(OP)
        return [
            _row(context, key, load, times, exact=context.agree(form.is_at_rest()))
            for key, (form, load) in built.items()
        ]


def _modes(context: RankContext, form: Form, closing: ExitStack) -> dict[str, Callable[[], object]]:
    run = partial(form.run, HANDSHAKES)
    modes: dict[str, Callable[[], object]] = {"eager": run}
    if context.device.type == "cuda":
        modes["graph"] = form.capture(run, closing)
    return modes


def _fit(
    context: RankContext, chain: GemmChain, run: Callable[[], object], closing: ExitStack
) -> Load:
    """A chain that is longer than the handshakes beside it, as far as that can be had."""
    chain.count = 1
    gemm_us = _quick_us(context, chain.run)
    needed_us = _quick_us(context, run)
    for _ in range(TRIES):
        wanted = LONGER * needed_us / gemm_us
        chain.count = max(1, min(MAX_GEMMS, round(max(context.gather(wanted)) + 0.5)))
        load = Load(context, chain, closing)
        beside_us = _quick_us(context, partial(load.beside, run))
        load.join()
        context.line_up("length of the chain")
        if context.agree(beside_us <= chain.count * gemm_us) or chain.count == MAX_GEMMS:
            break
        needed_us = beside_us
    return load


def _quick_us(context: RankContext, run: Callable[[], object]) -> float:
    context.line_up("length of the chain")
    return statistics.median(time_runs(context, run, 5, "length of the chain"))


def _variants(key: str, run: Callable[[], object], load: Load) -> dict[str, Variant]:
    return {
        f"{key}/alone": Variant(run, HANDSHAKES, load.join),
        f"{key}/under": Variant(partial(load.beside, run), HANDSHAKES, load.join),
        f"{key}/chain": Variant(load.run, 1, load.join),
        f"{key}/chain with": Variant(partial(load.with_beside, run), 1, load.join),
    }


def _row(
    context: RankContext, key: str, load: Load, times: Mapping[str, Summary], *, exact: bool
) -> Row:
    name, _, mode = key.rpartition("/")
    alone, under, chain = (times[f"{key}/{what}"] for what in ("alone", "under", "chain"))
    lost = excess_us(times[f"{key}/chain with"], chain)
    details = {
        "under_gemms_us": round(under.median_us, 3),
        "under_gemms_p99_us": round(under.p99_us, 3),
        "gemms_lose_us": round(lost.median / HANDSHAKES, 3),
        "gemms": load.count,
        "chain_us": round(chain.median_us, 3),
        "is_covered": chain.median_us >= HANDSHAKES * under.median_us,
    }
    told: Mode = "graph" if mode == "graph" else "eager"
    return _of_times(context, OP, name, alone, told, details, exact)


def branch_rows(context: RankContext, effort: Effort) -> list[Row]:
    """Time kernels of one stream in a graph, with forks and joins of another. Collective."""
    one, other = (torch.zeros(1, device=context.device) for _ in range(2))
    side = torch.cuda.Stream(context.device)

    def kernels(*, forks: bool = False, joins: bool = False) -> None:
        caller = torch.cuda.current_stream()
        side.wait_stream(caller)
        for _ in range(KERNELS):
            one.add_(1)
            if forks:
                side.wait_stream(caller)
            if forks or joins:
                with torch.cuda.stream(side):
                    other.add_(1)
            if joins:
                caller.wait_stream(side)
        caller.wait_stream(side)

    kinds = {
        "kernels in a line": partial(kernels),
        "and a fork each": partial(kernels, forks=True),
        "and a join each": partial(kernels, joins=True),
        "and a fork and a join each": partial(kernels, forks=True, joins=True),
    }
    with ExitStack() as closing:
        variants: dict[str, Variant] = {}
        for name, run in kinds.items():
            graph = PlainGraph(context, run, name, warm_up=1)
            closing.callback(graph.close)
            variants[name] = Variant(graph.run, KERNELS)
        times = measure(context, variants, effort, BRANCHES)
    line = times["kernels in a line"]
    return [
        _of_times(
            context,
            BRANCHES,
            name,
            found,
            "graph",
            {} if found is line else {"over_line_us": round(excess_us(found, line).median, 3)},
            None,
        )
        for name, found in times.items()
    ]


def _of_times(
    context: RankContext,
    op: str,
    name: str,
    times: Summary,
    mode: Mode,
    details: dict[str, Any],
    exact: bool | None,
) -> Row:
    world_size, on_gpu = context.world_size, context.device.type == "cuda"
    return Row.of_times(
        op,
        Shape("handshake", name, world_size, world_size, 1),
        world_size=world_size,
        transport="none" if op == BRANCHES else "ce" if on_gpu else "gloo",
        mode=mode,
        times=times,
        exact=exact,
        bytes_per_peer=0,
        details=details,
    )
