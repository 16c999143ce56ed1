"""Rows of one scatter and one gather: ours, a baseline and flat copies, eager and in a graph.

The baseline is NCCL with its packing; on the CPU gloo, without graphs and flat copies.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from ulysses_ops.communicator import UlyssesCommunicator
from ulysses_ops.exchange import Exchange
from ulysses_ops.graphs import capture_step
from ulysses_ops.tools.baselines import PlainGraph
from ulysses_ops.tools.exchanged import (
    CALLS,
    Exchanged,
    gather_of,
    matches_baseline,
    poison,
    scatter_of,
)
from ulysses_ops.tools.launch import RankContext
from ulysses_ops.tools.noise import random_values
from ulysses_ops.tools.peer_copy import PeerCopy, received_slot
from ulysses_ops.tools.results import Mode, Row
from ulysses_ops.tools.shapes import Shape
from ulysses_ops.tools.timing import Effort, Summary, Variant, measure, paired_ratio

VARIANTS = ("ours graph", "ours eager", "baseline graph", "baseline eager", "flat graph")


def exchange_rows(
    context: RankContext, comm: UlyssesCommunicator, shape: Shape, effort: Effort
) -> list[Row]:
    """Check and time scatter and gather at one shape. Collective."""
    scatter, gather = scatter_of(context, comm, shape), gather_of(context, comm, shape)
    rows = rows_of(context, comm, scatter, effort.share(2))
    return rows + rows_of(context, comm, gather, effort)


def rows_of(
    context: RankContext, comm: UlyssesCommunicator, prepared: Exchanged, effort: Effort
) -> list[Row]:
    """Check and time one operator: a row for each of ``VARIANTS`` that runs here. Collective."""
    what = f"{prepared.shape.title}, {prepared.op}"
    context.progress(f"{what}: check")

    def baseline(calls: int) -> None:
        for call in range(calls):
            prepared.baseline(prepared.source(call))

    def ours(calls: int) -> None:
        for call in range(calls):
            with Exchange(comm) as exchange:
                exchange.send(prepared.source(call), prepared.window)

    received = prepared.baseline(prepared.source(0))
    is_right = context.agree(torch.equal(received, prepared.expected()))
    exact = {
        "ours eager": matches_baseline(context, prepared, lambda: ours(1), 0),
        "baseline eager": is_right,
        "baseline graph": is_right,
    }
    variants = {
        "ours eager": Variant(lambda: ours(1)),
        "baseline eager": Variant(lambda: baseline(1)),
    }
    with ExitStack() as graphs:
        if context.device.type == "cuda":
            step = capture_step(comm, lambda: ours(CALLS))
            graphs.callback(step.close)
            plain = PlainGraph(context, lambda: baseline(CALLS), f"{what} by NCCL")
            graphs.callback(plain.close)
            exact["ours graph"] = matches_baseline(context, prepared, step.replay, CALLS - 1)
            variants["ours graph"] = Variant(step.replay, CALLS)
            variants["baseline graph"] = Variant(plain.run, CALLS)
        if prepared.window.memory is not None:
            flat = _flat_copy(context, prepared)
            exact["flat graph"] = _flat_arrives(context, prepared, flat)
            copies = PlainGraph(context, lambda: _repeat(flat.run), f"{what} by flat copies")
            graphs.callback(copies.close)
            variants["flat graph"] = Variant(copies.run, CALLS)
        times = measure(context, variants, effort, what)
    return _as_rows(prepared, comm, times, exact)


def _repeat(run: Callable[[], None]) -> None:
    for _ in range(CALLS):
        run()


def _flat_copy(context: RankContext, prepared: Exchanged) -> PeerCopy:
    rank, sent = context.rank, prepared.sent_bytes
    source = random_values((sent[rank] // 2,), context, rank, 200)
    return PeerCopy(prepared.window, rank, sent[rank], source, offset=sum(sent[:rank]))


def _flat_arrives(context: RankContext, prepared: Exchanged, flat: PeerCopy) -> bool:
    """Whether every peer's bytes are in this rank's window: the copies are not just fast."""
    poison(context, prepared.window)
    flat.run()
    context.line_up("flat copy")
    sent = prepared.sent_bytes
    arrived = all(
        torch.equal(
            received_slot(prepared.window, sum(sent[:peer]), sent[peer]),
            random_values((sent[peer] // 2,), context, peer, 200).view(torch.uint8),
        )
        for peer in range(context.world_size)
        if peer != context.rank
    )
    return context.agree(arrived)


def _as_rows(
    prepared: Exchanged,
    comm: UlyssesCommunicator,
    times: dict[str, Summary],
    exact: dict[str, bool],
) -> list[Row]:
    flat = times.get("flat graph")
    rows = []
    for key in VARIANTS:
        if key not in times:
            continue
        variant, mode = split_key(key)
        rows.append(
            Row.of_times(
                prepared.op,
                prepared.shape,
                world_size=comm.world_size,
                transport=transport_of(variant, comm),
                mode=mode,
                times=times[key],
                exact=exact[key],
                bytes_per_peer=prepared.bytes_per_peer,
                percent_of_flat=None if flat is None else 100 * paired_ratio(flat, times[key]),
                details={"variant": variant},
                **compared(times, key),
            )
        )
    return rows


def split_key(key: str) -> tuple[str, Mode]:
    """Variant and mode of a key such as ``"ours graph"``."""
    variant, _, mode = key.partition(" ")
    return variant, "graph" if mode == "graph" else "eager"


def transport_of(variant: str, comm: UlyssesCommunicator) -> str:
    """What moves the bytes of a variant."""
    if variant in ("flat", "compute"):
        return {"flat": "flat", "compute": "none"}[variant]
    if variant == "ours":
        return comm.transport
    return "nccl" if comm.device.type == "cuda" else "gloo"


def compared(times: dict[str, Summary], key: str) -> dict[str, Any]:
    """How one of ours compares with the baselines, as fields of a row; none for other variants."""
    variant, mode = split_key(key)
    if variant != "ours":
        return {}
    eager, graph = times.get("baseline eager"), times.get("baseline graph")
    same = graph if mode == "graph" else eager
    return {
        "nccl_us": None if same is None else same.median_us,
        "x_nccl_eager": None if eager is None else paired_ratio(eager, times[key]),
        "x_nccl_graph": None if graph is None else paired_ratio(graph, times[key]),
    }
