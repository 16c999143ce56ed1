"""The tables of the README about whole DiT blocks, and about their stage before attention."""

from __future__ import annotations

from ulysses_ops.tools.block_variants import COMPUTE, OURS, VARIANTS
from ulysses_ops.tools.layer_variants import (
    HANDSHAKES_ALONE,
    LINKS_AWAKE,
    PLANNED,
    SCHEDULES,
    SPLIT_ALONE,
)
from ulysses_ops.tools.markdown import (
    Record,
    all_exact,
    commits_of_rows,
    detail,
    head_of_commits,
    markdown,
    number,
    ranks_of,
    yes,
)
from ulysses_ops.tools.power import POWER, Power
from ulysses_ops.tools.projection_variants import GEMMS, PROJECTIONS, QKV
from ulysses_ops.tools.results import Row

OTHER_SCHEDULES = {*SCHEDULES, SPLIT_ALONE, HANDSHAKES_ALONE} - {PLANNED}
TITLES = {
    OURS: "ours, V first",
    PLANNED: "ours, as planned",
    "naive": "NCCL",
    "packed": "NCCL, packed Q K V",
    "overlapped": "NCCL, overlapped",
    "zero-CTA": "NCCL, copy engines",
    "flashinfer": "FlashInfer",
    "fast_ulysses": "fast_ulysses",
}


def block_table(record: Record) -> str:
    """One shape and mode a line: compute only, and the tax of every variant that ran anywhere.

    Of the layer's schedules the planned one; :func:`schedules_table` has the others. ``exact`` is
    over the variants whose bits are compared; beside it stands how far the others may be off, as a
    part of the output's norm, where they ran.
    """
    return _block_table(record, {v.name for v in VARIANTS} - OTHER_SCHEDULES)


def schedules_table(record: Record) -> str:
    """The same for the schedules of the layer, and for what is left of one when it sends less."""
    return _block_table(record, {PLANNED, LINKS_AWAKE} | OTHER_SCHEDULES)


def _block_table(record: Record, shown: set[str]) -> str:
    rows: dict[tuple[str, int, str], dict[str, Row]] = {}
    for row in record.rows:
        if row.op == "block":
            of_line = rows.setdefault((row.model, row.world_size, row.mode), {})
            of_line[str(detail(row, "variant"))] = row
    ran = {name for by_variant in rows.values() for name in by_variant}
    names = [v.name for v in VARIANTS if v.name in ran & shown and v.name != COMPUTE]
    lines = [
        _line(f"{ranks_of(by_variant[COMPUTE], record)}, {mode}", by_variant, names)
        + commits_of_rows(by_variant.values(), record)
        for (_, _, mode), by_variant in rows.items()
        if COMPUTE in by_variant
    ]
    head = (
        "block",
        "compute only, us",
        *(TITLES.get(name, name) for name in names),
        "exact",
        *head_of_commits(record),
    )
    return markdown(head, lines) if lines and names else ""


def power_table(record: Record) -> str:
    """One shape and variant a line: power, clock and cycles of a block run over and over."""
    found: dict[tuple[str, int], dict[str, tuple[Row, Power]]] = {}
    for row in record.rows:
        if row.op == POWER and (power := detail(row, POWER)):
            of_shape = found.setdefault((row.model, row.world_size), {})
            of_shape[str(detail(row, "variant"))] = (row, Power(**power))
    lines = [
        (
            _title(row) + ranks_of(row, record),
            TITLES.get(name, name),
            "unknown" if power.links_awake is None else f"{100 * power.links_awake:.0f} %",
            number(power.watts, 0),
            number(power.sm_mhz, 0),
            number(power.step_us, 0),
            _more(power.step_us, compute.step_us),
            number(power.cycles / 1e6, 2),
            _more(power.cycles, compute.cycles),
        )
        for by_variant in found.values()
        if COMPUTE in by_variant
        for compute in [by_variant[COMPUTE][1]]
        for name, (row, power) in by_variant.items()
    ]
    head = (
        "block, graphs replayed without a pause",
        "variant",
        "links awake",
        "W",
        "SM MHz",
        "us",
        "more time",
        "million cycles",
        "more cycles",
    )
    return markdown(head, lines) if lines else ""


def _more(figure: float, compute: float) -> str:
    return "" if figure == compute else f"{100 * (figure / compute - 1):+.1f} %"


def projection_table(record: Record) -> str:
    """One shape a line, in graphs: the bare GEMMs, and the multiples of them that others are.

    A variant that ran at no shape has no column. In a file of several commits a column says which
    line is of which.
    """
    rows: dict[tuple[str, int], dict[str, Row]] = {}
    for row in record.rows:
        if row.op == QKV and row.mode == "graph":
            of_line = rows.setdefault((row.model, row.world_size), {})
            of_line[str(detail(row, "variant"))] = row
    ran = {name for by_variant in rows.values() for name in by_variant}
    names = [v.name for v in PROJECTIONS if v.name in ran and v.name != GEMMS]
    lines = [
        (
            _title(by_variant[GEMMS]) + ranks_of(by_variant[GEMMS], record),
            number(by_variant[GEMMS].median_us, 0),
            *(_multiple(by_variant.get(name)) for name in names),
            *commits_of_rows(by_variant.values(), record),
        )
        for by_variant in rows.values()
        if GEMMS in by_variant
    ]
    titles = {**TITLES, COMPUTE: "with norm and RoPE, nothing sent"}
    head = (
        "before attention, in a graph",
        "GEMMs, us",
        *(titles.get(n, n) for n in names),
        *head_of_commits(record),
    )
    return markdown(head, lines) if lines else ""


def _multiple(row: Row | None) -> str:
    if row is None:
        return "not run"
    found = detail(row, "ratio_to_gemm")
    ratio = "unknown" if found is None else f"{number(found, 2)} x"
    return f"{ratio} WRONG" if row.exact is False else ratio


def _title(row: Row) -> str:
    _, seq, heads, _ = row.shape
    return row.model if f"S={seq}" in row.model else f"{row.model}, S={seq}, H={heads}"


def tax_of(row: Row | None) -> str:
    """Tax, and the quartiles of its rounds."""
    if row is None or row.tax_percent is None or row.tax_quartiles is None:
        return "not run"
    low, high = row.tax_quartiles
    return f"{row.tax_percent:+.1f} % ({low:.1f} to {high:.1f})"


def _line(where: str, rows: dict[str, Row], names: list[str]) -> tuple[str, ...]:
    compute = rows[COMPUTE]
    errors = [detail(row, "relative_error") for row in rows.values()]
    error = max((float(error) for error in errors if error is not None), default=None)
    return (
        f"{_title(compute)}{where}",
        number(compute.median_us, 0),
        *(tax_of(rows.get(name)) for name in names),
        yes(all_exact(rows.values())) + ("" if error is None else f", others {error:.1e}"),
    )
