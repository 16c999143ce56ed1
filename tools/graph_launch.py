"""Rows of what the launch of a graph takes of the host, by number and kind of its nodes.

    host us of a launch = fixed + us a unit * units

A graph of each kind is launched on an idle GPU for several numbers of units; the line through the
medians is that of least squares. What is timed is the call alone: the GPU may still run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from ulysses_ops.communicator import UlyssesCommunicator
from ulysses_ops.graphs import capture_step
from ulysses_ops.tools.attempts import attempt
from ulysses_ops.tools.baselines import PlainGraph
from ulysses_ops.tools.cuda_driver import nodes_if_captured
from ulysses_ops.tools.launch import RankContext
from ulysses_ops.tools.launch_kinds import Kind, all_kinds
from ulysses_ops.tools.results import Row
from ulysses_ops.tools.shapes import Shape
from ulysses_ops.tools.timing import Rounds, Summary, summarise

OP = "graph launch"
ROUNDS = 4  # the first warms up
LAUNCHES = 8

Nodes = dict[str, int]


def launch_rows(
    context: RankContext,
    comm: UlyssesCommunicator | None,
    not_run: dict[str, str],
    *,
    units: Sequence[int] = (),
) -> list[Row]:
    """Time launches of every kind that can run. Collective.

    Args:
        context: This rank.
        comm: For what exchanges with peers.
        not_run: Reasons of kinds without rows are added.
        units: How many units, instead of those of each kind.
    """
    kinds, reasons = all_kinds(context, comm)
    not_run.update({f"{OP}: {name}": why for name, why in reasons.items()})
    rows: list[Row] = []
    for kind in kinds:
        context.progress(f"{OP}: {kind.name}")
        made = attempt(context, kind.make)
        if made.reason or made.value is None:
            not_run[f"{OP}: {kind.name}"] = made.reason
            continue
        counts = tuple(units) or kind.units
        timed = attempt(context, partial(_time_kind, context, comm, kind, made.value, counts))
        if timed.reason or timed.value is None:
            not_run[f"{OP}: {kind.name}"] = timed.reason
            continue
        rows += rows_of(kind.name, timed.value, context, None if comm is None else comm.transport)
    return rows


def _time_kind(
    context: RankContext,
    comm: UlyssesCommunicator | None,
    kind: Kind,
    issue: Callable[[int], None],
    counts: Sequence[int],
) -> dict[int, tuple[Summary, Nodes]]:
    found: dict[int, tuple[Summary, Nodes]] = {}
    for units in counts:
        with ExitStack() as closing:
            run, nodes = _captured(context, comm, kind, partial(issue, units), closing)
            what = f"{OP}: {kind.name}, {units}"
            found[units] = (_launch_us(context, run, what), nodes)
    return found


def _captured(
    context: RankContext,
    comm: UlyssesCommunicator | None,
    kind: Kind,
    issue: Callable[[], None],
    closing: ExitStack,
) -> tuple[Callable[[], Any], Nodes]:
    """What launches the graph, and its nodes; on the CPU, the calls themselves."""
    nodes: Nodes = {}
    if context.device.type != "cuda":
        return issue, nodes

    def issue_and_count() -> None:
        issue()
        nodes.update(nodes_if_captured())

    if kind.uses_peers:
        assert comm is not None
        step = capture_step(comm, issue_and_count, warmup=1)
        closing.callback(step.close)
        return step.replay, nodes
    graph = PlainGraph(context, issue_and_count, kind.name, warm_up=1)
    closing.callback(graph.close)
    return graph.run, nodes


def _launch_us(context: RankContext, run: Callable[[], Any], what: str) -> Summary:
    rounds: Rounds = []
    for _ in range(ROUNDS):
        samples = []
        for _ in range(LAUNCHES):
            context.line_up(what)
            start = time.perf_counter()
            run()
            samples.append((time.perf_counter() - start) * 1e6)
        rounds.append(samples)
    context.line_up(what)
    return summarise(context.gather(rounds[1:]))


def fit_line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Slope and height at 0 of the line of least squares through ``(x, y)``.

    Raises:
        ValueError: there are fewer than two different x.
    """
    count = len(points)
    if len({x for x, _ in points}) < 2:
        message = f"fit: {count} points need at least two different x"
        raise ValueError(message)
    mean_x, mean_y = sum(x for x, _ in points) / count, sum(y for _, y in points) / count
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum(
        (x - mean_x) ** 2 for x, _ in points
    )
    return slope, mean_y - slope * mean_x


def rows_of(
    name: str,
    found: dict[int, tuple[Summary, Nodes]],
    context: RankContext,
    transport: str | None,
) -> list[Row]:
    """One row for each number of units; all with the line through them."""
    line = fit_line([(units, times.median_us) for units, (times, _) in found.items()])
    rows = []
    for units, (times, nodes) in found.items():
        details = {
            "units": units,
            "nodes": nodes,
            "us_per_unit": round(line[0], 4),
            "us_fixed": round(line[1], 2),
        }
        row = Row.of_times(
            OP,
            Shape("launch", name, units, 1, 1),
            world_size=context.world_size,
            transport=transport or "none",
            mode="graph" if context.device.type == "cuda" else "eager",
            times=times,
            exact=None,
            bytes_per_peer=0,
            host_us=times.median_us,
            details=details,
        )
        rows.append(row)
    return rows
