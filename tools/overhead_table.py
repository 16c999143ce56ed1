"""Tables of what is not bytes: launches of graphs by their nodes, forks, joins and handshakes."""

from __future__ import annotations

from ulysses_ops.tools import graph_launch, handshake_forms, step_rows
from ulysses_ops.tools.markdown import Record, detail, markdown, number, ranks_of
from ulysses_ops.tools.results import Row


def launch_table(record: Record) -> str:
    """One kind of node a line: host time by number of units, of one unit and of one node.

    Of whole steps: one graph a line, its nodes and its host time.
    """
    by_kind: dict[tuple[str, str], list[Row]] = {}
    for row in record.rows:
        if row.op == graph_launch.OP:
            by_kind.setdefault((row.model, ranks_of(row, record)), []).append(row)
    lines = []
    for (kind, ranks), rows in by_kind.items():
        last = max(rows, key=lambda row: int(detail(row, "units")))
        units, nodes = int(detail(last, "units")), detail(last, "nodes")
        slope, a_unit = float(detail(last, "us_per_unit")), sum(nodes.values()) / units
        lines.append(
            (
                kind + ranks,
                ", ".join(f"{number(count / units, 1)} {name}" for name, count in nodes.items()),
                ", ".join(f"{detail(row, 'units')}: {number(row.host_us, 0)}" for row in rows),
                number(slope, 2),
                number(slope / a_unit, 2) if a_unit else "",
                number(detail(last, "us_fixed"), 0),
            )
        )
    head = (
        "units in a graph",
        "nodes of a unit",
        "units: host us of a launch",
        "us a unit",
        "us a node",
        "us besides",
    )
    tables = [markdown(head, lines)] if lines else []
    steps = [
        (
            f"{row.model}, {detail(row, 'variant')}, in a graph",
            ", ".join(f"{count:,} {name}" for name, count in nodes.items()),
            number(row.host_us, 0),
            number(row.host_us / sum(nodes.values()), 2),
        )
        for row in record.rows
        if row.op == step_rows.OP and (nodes := detail(row, "nodes")) and row.host_us is not None
    ]
    head_of_steps = ("step", "nodes", "host us of a launch", "us a node")
    return "\n".join(tables + ([markdown(head_of_steps, steps)] if steps else []))


def forms_table(record: Record) -> str:
    """One form of handshake a line, alone and under GEMMs, eager and in graphs; and forks."""
    forms: dict[str, dict[str, Row]] = {}
    branches: list[Row] = []
    for row in record.rows:
        if row.op == handshake_forms.OP:
            forms.setdefault(row.model + ranks_of(row, record), {})[row.mode] = row
        elif row.op == handshake_forms.BRANCHES:
            branches.append(row)
    lines = [
        (name, *_cells(by.get("eager")), *_cells(by.get("graph"))) for name, by in forms.items()
    ]
    head = (
        "us a handshake",
        *(
            f"{what}, {mode}"
            for mode in ("eager", "in a graph")
            for what in ("alone", "under GEMMs", "GEMMs lose")
        ),
    )
    of_branches = [
        (row.model, number(row.median_us, 2), number(detail(row, "over_line_us"), 2))
        for row in branches
    ]
    head_of_branches = ("in a graph", "us a kernel of the caller", "over kernels in a line, us")
    tables = [markdown(head, lines)] if lines else []
    tables += [markdown(head_of_branches, of_branches)] if of_branches else []
    return "\n".join(tables)


def _cells(row: Row | None) -> tuple[str, str, str]:
    if row is None:
        return ("", "", "")
    covered = "" if detail(row, "is_covered") is not False else " (in part)"
    return (
        number(row.median_us, 1),
        number(detail(row, "under_gemms_us"), 1, covered),
        number(detail(row, "gemms_lose_us"), 2),
    )
