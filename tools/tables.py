"""Rows as a table on the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from ulysses_ops.tools.results import Machine, Row

COLUMNS = (
    "op",
    "B",
    "S_global",
    "H",
    "D",
    "dtype",
    "W",
    "MB/rank",
    "by",
    "mode",
    "med_us",
    "p99_us",
    "algbw",
    "busbw",
    "%flat",
    "nccl_us",
    "x eager",
    "x graph",
    "tax %",
    "q1..q3",
    "hidden %",
    "rounds us",
    "slow",
    "host_us",
    "launches",
    "peak MB",
    "exact",
)
BY_VARIANT = ("block", "qkv", "step", "generation", "graphs")  # what has columns of its own
LEGEND = (
    "med_us, p99_us: slowest rank. algbw: GB/s of a rank's whole tensor; busbw: of the bytes it "
    "sends to peers (MB/rank); %flat: busbw over that of flat peer copies in the same rounds. "
    "x eager, x graph: time of NCCL with its packing over this one, paired by round. "
    "tax: time over the same step with nothing exchanged, paired by round; q1..q3: its quartiles, "
    "or those of hidden. hidden: (serial - concurrent) / exchange alone. rounds: lowest and "
    "highest median of a round. slow: the slowest rank. host_us, launches: the host's "
    "part of one call. peak: GPU memory beside input and weights."
)


def row_cells(row: Row) -> tuple[str, ...]:
    """One cell a column; ``-`` where it does not apply."""
    batch, seq, heads, dim = row.shape
    sent = row.bytes_per_peer * (row.world_size - 1) / 1e6
    return (
        row.op,
        str(batch),
        str(seq),
        str(heads),
        str(dim),
        {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}.get(row.dtype, row.dtype),
        str(row.world_size),
        f"{sent:.1f}" if sent >= 0.05 else "-",
        _moved_by(row),
        row.mode,
        _number(row.median_us, 1),
        _number(row.p99_us, 1),
        _number(row.algbw_gbs, 1),
        _number(row.busbw_gbs, 1),
        _number(row.percent_of_flat, 1),
        _number(row.nccl_us, 1),
        _number(row.x_nccl_eager, 2),
        _number(row.x_nccl_graph, 2),
        _number(row.tax_percent, 1),
        _span(row.tax_quartiles or row.hidden_quartiles),
        _number(row.hidden_percent, 0),
        _span(row.spread_us),
        "-" if row.slowest_rank is None else str(row.slowest_rank),
        _number(row.host_us, 1),
        "-" if row.launches is None else str(row.launches),
        _number(None if row.peak_bytes is None else row.peak_bytes / 1e6, 0),
        exactness(row),
    )


def _moved_by(row: Row) -> str:
    """What tells variants apart."""
    variant = (row.details or {}).get("variant")
    if row.op in BY_VARIANT:
        return str(variant)
    if variant in ("overlapped", "compute") or (variant == "baseline" and row.transport != "nccl"):
        return str(variant) if variant == "compute" else f"{row.transport} {variant}"
    return row.transport


def exactness(row: Row) -> str:
    """``ok``, ``WRONG``, or ``-`` where there is nothing to compare."""
    return "-" if row.exact is None else "ok" if row.exact else "WRONG"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _span(values: tuple[float, float] | None) -> str:
    return "-" if values is None else f"{values[0]:.1f}..{values[1]:.1f}"


def print_rows(
    console: Console,
    machine: Machine,
    transport: str,
    rows: Sequence[Row],
    not_run: Mapping[str, str] | None = None,
) -> None:
    """Print the machine, tables, below them what only some rows have, and what did not run."""
    where = "CPU" if machine.gpu == "cpu" else f"{machine.gpu_count}x {machine.gpu}"
    console.print(
        f"{where} | host {machine.host} | driver {machine.driver} | CUDA {machine.cuda} | "
        f"NCCL {machine.nccl} | torch {machine.torch} | Python {machine.python}",
        soft_wrap=True,
        highlight=False,
    )
    console.print(f"transport: {transport}", soft_wrap=True, highlight=False)
    for ops in (None, *BY_VARIANT):
        _print_table(console, [row for row in rows if _table_of(row) == ops])
    for entry in rows:
        hidden = ("variant", "attention", "rounds")
        notes = {k: v for k, v in (entry.details or {}).items() if k not in hidden}
        if notes:
            told = ", ".join(f"{key} {value}" for key, value in notes.items())
            name = entry.op if entry.model in entry.op else f"{entry.op}, {entry.model}"
            console.print(f"{name}: {told}", soft_wrap=True, highlight=False)
    for name, reason in (not_run or {}).items():
        console.print(f"not run: {name}: {reason}", soft_wrap=True, highlight=False, markup=False)
    console.print(LEGEND, style="dim", soft_wrap=True, highlight=False)


def _table_of(row: Row) -> str | None:
    return row.op if row.op in BY_VARIANT else None


def _print_table(console: Console, rows: Sequence[Row]) -> None:
    if not rows:
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    cells = [row_cells(row) for row in rows]
    shown = [i for i, _ in enumerate(COLUMNS) if i == 0 or any(row[i] != "-" for row in cells)]
    for i in shown:
        table.add_column(COLUMNS[i], justify="left" if i in (0, 8, 9) else "right", no_wrap=True)
    for row in cells:
        table.add_row(*(row[i] for i in shown), style="red" if row[-1] == "WRONG" else None)
    # Wider than a terminal, rather than cut off: a number that is not shown helps nobody.
    wide = Console(file=console.file, width=240, highlight=False)
    wide.print(table)
