"""The tables of docs/llm.md: all-gathers, weights by shards, and requests of different lengths."""

from __future__ import annotations

from ulysses_ops.tools import weight_rows
from ulysses_ops.tools.length_mixes import NAME, MixRow
from ulysses_ops.tools.markdown import Record, all_exact, detail, markdown, number, ranks_of, yes
from ulysses_ops.tools.results import Row
from ulysses_ops.tools.weight_rows import BASELINE, PREFETCHED, WHEN_NEEDED, WHOLE


def all_gather_table(record: Record) -> str:
    """One shape and mode a line: ours beside NCCL's all-gather and the flat copy."""
    lines = [
        (
            f"{row.model}, {row.mode}{ranks_of(row, record)}",
            str(list(row.shape)),
            number(row.bytes_per_peer / 1e6, 1),
            number(row.median_us, 1),
            number(row.p99_us, 1),
            number(row.busbw_gbs, 0),
            number(row.percent_of_flat, 0, " %"),
            _needed(row),
            number(row.x_nccl_graph if row.mode == "graph" else row.x_nccl_eager, 2),
            yes(row.exact),
        )
        for row in record.rows
        if row.op == "all_gather" and detail(row, "variant") == "ours"
    ]
    head = (
        "all-gather",
        "shape",
        "MB to a peer",
        "median us",
        "p99 us",
        "GB/s",
        "of a flat copy",
        "needed",
        "x NCCL, same mode",
        "exact",
    )
    return markdown(head, lines) if lines else ""


def _needed(row: Row) -> str:
    needed = detail(row, "needed_percent_of_flat")
    if needed is None:
        return ""
    return f"{number(needed, 0, ' %')}: {yes(detail(row, 'is_fast_enough'))}"


def weights_table(record: Record) -> str:
    """One shape a line: what a layer takes longer by each way, and the memory of all layers."""
    rows: dict[tuple[str, int], dict[str, Row]] = {}
    for row in record.rows:
        if row.op.startswith(weight_rows.OP):
            of_line = rows.setdefault((row.model, row.world_size), {})
            of_line[str(detail(row, "variant"))] = row
    lines = [
        _weights_line(ranks_of(by_way[WHOLE], record), by_way)
        for by_way in rows.values()
        if {WHOLE, PREFETCHED, WHEN_NEEDED} <= set(by_way)
    ]
    head = (
        "output projections",
        "layers",
        "a layer, us",
        "prefetched: exposed us",
        "gathered when needed",
        "the same by NCCL",
        "whole, MB",
        "sharded, MB",
        "saved, MB",
        "exact",
    )
    return markdown(head, lines) if lines else ""


def _weights_line(ranks: str, rows: dict[str, Row]) -> tuple[str, ...]:
    whole, prefetched = rows[WHOLE], rows[PREFETCHED]
    taken = [detail(prefetched, name) for name in ("whole_bytes", "sharded_bytes")]
    saved = detail(prefetched, "saved_bytes") if None in taken else taken[0] - taken[1]
    return (
        f"{whole.model}, S={whole.shape[1]}, H={whole.shape[2]}{ranks}",
        number(detail(whole, "layers"), 0),
        number(whole.median_us, 0),
        *(_exposed(rows.get(way)) for way in (PREFETCHED, WHEN_NEEDED, BASELINE)),
        *(number(None if size is None else size / 1e6, 0) for size in (*taken, saved)),
        yes(all_exact(rows.values())),
    )


def _exposed(row: Row | None) -> str:
    if row is None:
        return "not run"
    exposed, quartiles = detail(row, "exposed_us"), detail(row, "exposed_quartiles_us")
    if exposed is None:
        return "unknown"
    span = "" if quartiles is None else f" ({quartiles[0]:.1f} to {quartiles[1]:.1f})"
    return f"{exposed:+.1f}{span}"


def mixes_table(record: Record) -> str:
    """One mix of lengths and world size a line: data parallelism, and as planned."""
    if record.name != NAME:
        return ""
    rows = [MixRow(**entry) for entry in record.content["mixes"]]
    lines = [
        (
            row.mix,
            str(row.world_size),
            number(row.plain_us / 1e3, 1),
            number(100 * row.plain_imbalance, 0, " %"),
            number(100 * row.longest_first_imbalance, 0, " %"),
            str(row.sp),
            number(100 * row.planned_imbalance, 1, " %"),
            number(row.planned_us / 1e3, 1),
            number(row.plain_us / row.planned_us, 2),
            number(row.longest_first_us / row.planned_us, 2),
        )
        for row in rows
    ]
    head = (
        "lengths",
        "ranks",
        "in turn, ms",
        "imbalance",
        "longest first, imbalance",
        "planned: ranks of a group",
        "imbalance",
        "ms",
        "x in turn",
        "x longest first",
    )
    return markdown(head, lines)
