"""The tables of the README about whole denoising steps, generations, and graphs held together."""

from __future__ import annotations

from ulysses_ops.tools import step_loop, step_memory, step_rows
from ulysses_ops.tools.block_table import tax_of
from ulysses_ops.tools.block_variants import COMPUTE, OURS
from ulysses_ops.tools.markdown import Record, all_exact, detail, markdown, number, ranks_of, yes
from ulysses_ops.tools.results import Row
from ulysses_ops.tools.step_variants import FALLBACK, NCCL, STEP_VARIANTS

STEP_TITLES = {OURS: "ours", NCCL: "NCCL", FALLBACK: "ours on NCCL", COMPUTE: "compute only"}
# What a loop is called in its row, and in tables.
LOOP_TITLES = {
    "euler, eager": "Euler, eager",
    "euler, graph": "Euler in the graph",
    "euler, stepwise": "Euler, step by step",
    "unipc, eager": "UniPC, eager",
    "unipc, graph": "UniPC between replays",
}


def step_table(record: Record) -> str:
    """One model and mode a line: compute only, the tax of every variant, and ours for the host."""
    rows: dict[tuple[str, int, str], dict[str, Row]] = {}
    for row in record.rows:
        if row.op == step_rows.OP:
            of_line = rows.setdefault((row.model, row.world_size, row.mode), {})
            of_line[str(detail(row, "variant"))] = row
    ran = {name for by_variant in rows.values() for name in by_variant}
    names = [v.name for v in STEP_VARIANTS if v.name in ran and v.name != COMPUTE]
    lines = [
        _step_line(f"{ranks_of(by_variant[OURS], record)}, {mode}", by_variant, names)
        for (_, _, mode), by_variant in rows.items()
        if {COMPUTE, OURS} <= set(by_variant)
    ]
    head = (
        "step",
        "layers",
        "compute only, ms",
        *(STEP_TITLES[name] for name in names),
        "ours: host us, median / p99",
        "launches",
        "peak MB",
        "exact",
    )
    return markdown(head, lines) if lines else ""


def _step_line(where: str, rows: dict[str, Row], names: list[str]) -> tuple[str, ...]:
    compute, ours = rows[COMPUTE], rows[OURS]
    return (
        f"{ours.model}, S={ours.shape[1]}, H={ours.shape[2]}{where}",
        _layers(ours),
        _ms(compute.median_us),
        *(tax_of(rows.get(name)) for name in names),
        f"{number(ours.host_us, 0)} / {number(detail(ours, 'host_p99_us'), 0)}",
        number(ours.launches, 0),
        number(None if ours.peak_bytes is None else ours.peak_bytes / 1e6, 0),
        yes(all_exact(rows.values())),
    )


def generation_table(record: Record) -> str:
    """One loop a line: a step of it, and whether it made the bits of the eager one."""
    lines = [
        (
            f"{row.model}, {detail(row, 'steps')} steps, {LOOP_TITLES[detail(row, 'variant')]}",
            _layers(row),
            number(detail(row, "guidance_branches"), 0),
            _ms(row.median_us),
            number(row.host_us, 0),
            yes(row.exact),
        )
        for row in record.rows
        if row.op == step_loop.OP
    ]
    head = (
        "generation",
        "layers",
        "guidance branches",
        "ms a step",
        "host us a replay",
        "bits of the eager loop",
    )
    return markdown(head, lines) if lines else ""


def graphs_table(record: Record) -> str:
    """Graphs of one model held at once, with one memory pool and with a pool each."""
    lines = []
    for row in record.rows:
        if row.op != step_memory.OP:
            continue
        sizes, lengths = detail(row, "bytes_of_each"), detail(row, "sequences")
        lines.append(
            (
                f"{row.model}, {detail(row, 'variant')}",
                _layers(row),
                number(detail(row, "graphs"), 0),
                f"{max(lengths)} to {min(lengths)}",
                " ".join(_mb(size) for size in sizes),
                _mb(detail(row, "total_bytes")),
                _mb(detail(row, "window_bytes")),
                _mb(detail(row, "device_bytes")),
                yes(row.exact),
            )
        )
    head = (
        "graphs",
        "layers",
        "held",
        "S",
        "MB of each, in order of capture",
        "MB together",
        "MB of windows",
        "MB less on the device",
        "exact",
    )
    return markdown(head, lines) if lines else ""


def _layers(row: Row) -> str:
    ran, published = detail(row, "layers"), detail(row, "published_layers")
    return f"{ran}" if ran == published else f"{ran} of {published}"


def _ms(value_us: float | None) -> str:
    return number(None if value_us is None else value_us / 1e3, 2)


def _mb(value: float | None) -> str:
    return number(None if value is None else value / 1e6, 0)
