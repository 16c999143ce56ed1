"""Rows of one scatter and one gather: ours, a baseline and flat copies, eager and in a graph.

The baseline is NCCL with its packing; on the CPU gloo, without graphs and flat copies.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ulysses_ops.communicator import UlyssesCommunicator
from ulysses_ops.exchange import Exchange
from ulysses_ops.graphs import capture_step
from ulysses_ops.reference import gather_reference, scatter_reference
from ulysses_ops.tools.baselines import NcclGather, NcclScatter, PlainGraph
from ulysses_ops.tools.launch import RankContext
from ulysses_ops.tools.peer_copy import PeerCopy, received_slot
from ulysses_ops.tools.results import Mode, Row
from ulysses_ops.tools.shapes import Shape
from ulysses_ops.tools.timing import Effort, Summary, Variant, measure, paired_ratio
from ulysses_ops.window_spec import WindowSpec
from ulysses_ops.windows import Window, reserve

CALLS = 8  # calls in a graph: one replay shows the operator as it is inside a larger graph
ROTATED_BYTES = 256 << 20  # of sources used in turn, so that no cache holds them all
SEED = 1234
VARIANTS = ("ours graph", "ours eager", "baseline graph", "baseline eager", "flat graph")


@dataclass(frozen=True)
class Exchanged:
    """One operator at one shape, ready to be run.

    Attributes:
        op: Which.
        shape: Global shape.
        window: Where ours arrives.
        sources: Sources, used in turn.
        baseline: The same operator by NCCL.
        expected: What this rank receives of the first sources, by the reference.
    """

    op: Literal["scatter", "gather"]
    shape: Shape
    window: Window
    sources: list[Tensor]
    baseline: Callable[[Tensor], Tensor]
    expected: Callable[[], Tensor]

    def source(self, call: int) -> Tensor:
        """The source of a call."""
        return self.sources[call % len(self.sources)]


def random_values(shape: tuple[int, ...], context: RankContext, rank: int, salt: int) -> Tensor:
    """bf16 noise that every rank can make for every rank."""
    generator = torch.Generator(context.device).manual_seed(SEED + 1000 * salt + rank)
    return torch.randn(shape, generator=generator, dtype=torch.bfloat16, device=context.device)


def exchange_rows(
    context: RankContext, comm: UlyssesCommunicator, shape: Shape, effort: Effort
) -> list[Row]:
    """Check and time scatter and gather at one shape. Collective."""
    rows = []
    for prepared in (_scatter_of(context, comm, shape), _gather_of(context, comm, shape)):
        rows += _rows_of(context, comm, prepared, effort)
    return rows


def _num_sources(shape: Shape, context: RankContext) -> int:
    size = shape.bytes_per_peer(context.world_size, 2) * context.world_size
    return max(1, min(CALLS, -(-ROTATED_BYTES // size)))


def _scatter_of(context: RankContext, comm: UlyssesCommunicator, shape: Shape) -> Exchanged:
    """Sources are V's view of fused projections, as a model's would be."""
    spec = WindowSpec("bench.scatter", "scatter", shape.dims, torch.bfloat16)
    (window,) = reserve(comm, [spec])
    batch, seq, heads, dim = shape.local_source(context.world_size)

    def values_of(rank: int, salt: int) -> Tensor:
        return random_values((batch, seq, 3, heads, dim), context, rank, salt)[:, :, 2]

    def expected() -> Tensor:
        shards = [values_of(rank, 0) for rank in range(context.world_size)]
        return scatter_reference(shards)[context.rank]

    sources = [values_of(context.rank, salt) for salt in range(_num_sources(shape, context))]
    baseline = NcclScatter(shape, context, torch.bfloat16)
    return Exchanged("scatter", shape, window, sources, baseline, expected)


def _gather_of(context: RankContext, comm: UlyssesCommunicator, shape: Shape) -> Exchanged:
    spec = WindowSpec("bench.gather", "gather", shape.dims, torch.bfloat16)
    (window,) = reserve(comm, [spec])

    def values_of(rank: int, salt: int) -> Tensor:
        return random_values(shape.local_window(context.world_size), context, rank, 100 + salt)

    def expected() -> Tensor:
        shards = [values_of(rank, 0) for rank in range(context.world_size)]
        return gather_reference(shards)[context.rank]

    sources = [values_of(context.rank, salt) for salt in range(_num_sources(shape, context))]
    baseline = NcclGather(shape, context, torch.bfloat16)
    return Exchanged("gather", shape, window, sources, baseline, expected)


def _rows_of(
    context: RankContext, comm: UlyssesCommunicator, prepared: Exchanged, effort: Effort
) -> list[Row]:
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
        "ours eager": _matches_baseline(context, prepared, lambda: ours(1), 0),
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
            exact["ours graph"] = _matches_baseline(context, prepared, step.replay, CALLS - 1)
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


def _poison(context: RankContext, window: Window) -> None:
    """Fill the window with NaN bytes while no rank is sending."""
    context.line_up("before the check")
    window.tensor.view(-1).view(torch.uint8).fill_(0xFF)
    context.line_up("check")


def _matches_baseline(
    context: RankContext, prepared: Exchanged, run: Callable[[], object], last_call: int
) -> bool:
    """Whether the window holds, bit for bit, what NCCL delivers for the last call's source."""
    _poison(context, prepared.window)
    run()
    context.finish(f"check of {prepared.op}")
    found = prepared.window.tensor.clone()
    context.line_up("after the check")
    return context.agree(torch.equal(found, prepared.baseline(prepared.source(last_call))))


def _flat_copy(context: RankContext, prepared: Exchanged) -> PeerCopy:
    size = prepared.shape.bytes_per_peer(context.world_size, 2)
    source = random_values((size // 2,), context, context.rank, 200)
    return PeerCopy(prepared.window, context.rank, size, source)


def _flat_arrives(context: RankContext, prepared: Exchanged, flat: PeerCopy) -> bool:
    """Whether every peer's bytes are in this rank's window: the copies are not just fast."""
    _poison(context, prepared.window)
    flat.run()
    context.line_up("flat copy")
    peers = (peer for peer in range(context.world_size) if peer != context.rank)
    arrived = all(
        torch.equal(
            received_slot(prepared.window, peer, flat.bytes_per_peer),
            random_values((flat.bytes_per_peer // 2,), context, peer, 200).view(torch.uint8),
        )
        for peer in peers
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
                bytes_per_peer=prepared.shape.bytes_per_peer(comm.world_size, 2),
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
