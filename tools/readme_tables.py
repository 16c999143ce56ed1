"""Writes the tables of README.md, or of a page of docs, from docs/results.

With ``--check`` it says if they are current.

A table stands between ``<!-- table:NAME -->`` and ``<!-- /table -->``; all between them belongs to
this tool.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from ulysses_ops.tools.block_table import (
    block_table,
    power_table,
    projection_table,
    schedules_table,
)
from ulysses_ops.tools.fault_table import (
    deaths_table,
    faults_table,
    models_table,
    sanitizers_table,
    soak_table,
)
from ulysses_ops.tools.llm_tables import all_gather_table, mixes_table, weights_table
from ulysses_ops.tools.markdown import (
    Record,
    all_exact,
    detail,
    markdown,
    number,
    ranks_of,
    read_records,
    yes,
)
from ulysses_ops.tools.overhead_table import forms_table, launch_table
from ulysses_ops.tools.results import Row
from ulysses_ops.tools.step_table import generation_table, graphs_table, step_table

# Whatever looks like a marker, so that a misspelt one is found, too.
MARKER = re.compile(r"<!--\s*(/?)\s*tables?\b\s*:?\s*(.*?)\s*-->\n?", re.IGNORECASE)
END = "<!-- /table -->"
NOTHING = "Nothing recorded yet.\n"


def exchange_table(record: Record) -> str:
    """One scatter or gather a line: ours beside NCCL and the flat copy."""
    lines = [
        (
            f"{row.op}, {row.model}, {row.mode}{ranks_of(row, record)}",
            number(row.bytes_per_peer / 1e6, 1),
            number(row.median_us, 1),
            number(row.p99_us, 1),
            number(row.busbw_gbs, 0),
            number(row.percent_of_flat, 0, " %"),
            number(row.x_nccl_eager, 2),
            number(row.x_nccl_graph, 2),
            yes(row.exact),
        )
        for row in record.rows
        if row.op in ("scatter", "gather") and detail(row, "variant") == "ours"
    ]
    head = (
        "operator",
        "MB to a peer",
        "median us",
        "p99 us",
        "GB/s",
        "of a flat copy",
        "x NCCL eager",
        "x NCCL in a graph",
        "exact",
    )
    return markdown(head, lines) if lines else ""


def attention_table(record: Record) -> str:
    """One shape a line: the step in a graph, by what moves the bytes, and what that adds."""
    by_subject: dict[tuple[str, int], dict[str, Row]] = {}
    for row in record.rows:
        if row.op == "attention_step" and row.mode == "graph":
            rows = by_subject.setdefault((row.model, row.world_size), {})
            rows[str(detail(row, "variant"))] = row
    lines = []
    for (model, _), rows in by_subject.items():
        if not {"ours", "baseline", "overlapped", "compute"} <= set(rows):
            continue
        ours, compute = rows["ours"], rows["compute"]
        _, seq, heads, _ = ours.shape
        times = (
            number(rows[key].median_us, 0) + _tax(rows[key].tax_percent)
            for key in ("ours", "baseline", "overlapped")
        )
        lines.append(
            (
                f"{model}, S={seq}, H={heads}{ranks_of(ours, record)}",
                number(compute.median_us, 0),
                *times,
                number(ours.x_nccl_graph, 3),
                number(ours.x_nccl_eager, 3),
                yes(all_exact(rows.values())),
            )
        )
    head = (
        "attention step in a graph, us",
        "compute only",
        "ours",
        "NCCL",
        "NCCL, overlapped",
        "x NCCL in a graph",
        "x NCCL eager",
        "exact",
    )
    return markdown(head, lines) if lines else ""


def _tax(percent: float | None) -> str:
    return "" if percent is None else f" ({percent:+.1f} %)"


def costs_table(record: Record) -> str:
    """Handshake on the device, and the host's part of calls."""
    lines = []
    for row in record.rows:
        if row.op == "handshake round":
            bare = detail(row, "bare_handshake_us")
            if bare is not None:
                lines.append(("one handshake alone, in a graph", number(bare, 1)))
            in_round = number(detail(row, "handshake_us"), 1)
            lines.append(("one handshake within a round, in a graph", in_round))
            lines.append(("round of a few bytes, in a graph", number(row.median_us, 1)))
        elif row.op.startswith("host cost"):
            lines.append((row.op, number(row.median_us, 1)))
            in_a_row = detail(row, "in_a_row_us")
            if in_a_row is not None:
                lines.append((f"{row.op}, call after call", number(in_a_row, 1)))
    return markdown(("cost", "median us"), lines) if lines else ""


def replays_table(record: Record) -> str:
    """One shape a line: replays with skewed ranks and new data, and wrong elements."""
    lines = [
        (
            f"{row.model}, {list(row.shape)}",
            str(row.world_size) + (" (sharing GPUs)" if detail(row, "shared_gpus") else ""),
            number(detail(row, "replays_done"), 0),
            number(detail(row, "mismatches"), 0),
        )
        for row in record.rows
        if row.op == "replayed exchange"
    ]
    return markdown(("exchange", "ranks", "replays", "mismatches"), lines) if lines else ""


def uneven_table(record: Record) -> str:
    """One exchange a line: what uneven splits add to the time of even ones."""
    lines = [
        (
            f"{row.model}, {row.op}{ranks_of(row, record)}",
            str(list(row.shape)),
            number(row.median_us, 1),
            number(detail(row, "percent_over_even"), 1, " %"),
            number(detail(row, "percent_over_its_bytes"), 1, " %"),
            yes(row.exact),
        )
        for row in record.rows
        if detail(row, "percent_over_even") is not None
    ]
    head = ("exchange", "shape", "median us", "over even", "over its largest part", "exact")
    return markdown(head, lines) if lines else ""


def tests_table(record: Record) -> str:
    """Outcome of a run of the test suite, and the trees that were tested."""
    content = record.content
    if "trees" not in content:
        return ""
    trees = ", ".join(f"{name} {tree[:12]}" for name, tree in (content["trees"] or {}).items())
    found = [content.get(outcome) for outcome in ("passed", "failed", "skipped")]
    counts = ["unknown" if tests is None else str(len(tests)) for tests in found]
    line = (content.get("selection") or "all", *counts, _not_run(content), trees or "unknown")
    return markdown(("tests", "passed", "failed", "skipped", "not run", "git trees"), [line])


def _not_run(content: dict[str, Any]) -> str:
    """How many tests a session that was cut left out; of older records, files of which none ran."""
    if "not_run" in content:
        return str(len(content["not_run"]))
    known = [*(content.get("passed") or ()), *(content.get("failed") or ())]
    known += content.get("skipped") or ()
    files = [name for name in (content.get("selection") or "").split() if name.endswith(".py")]
    missing = [name for name in files if not any(test.startswith(name) for test in known)]
    return "all of " + ", ".join(name.rpartition("/")[2] for name in missing) if missing else "-"


TABLES: dict[str, Callable[[Record], str]] = {
    "exchange": exchange_table,
    "attention": attention_table,
    "block": block_table,
    "schedules": schedules_table,
    "power": power_table,
    "qkv": projection_table,
    "step": step_table,
    "generation": generation_table,
    "graphs": graphs_table,
    "costs": costs_table,
    "replays": replays_table,
    "tests": tests_table,
    "uneven": uneven_table,
    "faults": faults_table,
    "models": models_table,
    "launch": launch_table,
    "forms": forms_table,
    "all_gather": all_gather_table,
    "weights": weights_table,
    "length_mixes": mixes_table,
    "deaths": deaths_table,
    "soak": soak_table,
    "sanitizers": sanitizers_table,
}
ON_CPU_TOO = ("faults", "models", "length_mixes", "deaths")  # what needs no GPU to be shown


def render(name: str, records: Sequence[Record]) -> str:
    """The table of this name from every record that has something for it.

    Raises:
        ValueError: there is no such table, or a file has not what it is made of.
    """
    if name not in TABLES:
        message = f"readme_tables: table:{name} is unknown; choose from {list(TABLES)}"
        raise ValueError(message)
    shown = [record for record in records if record.content["gpu"] != "cpu" or name in ON_CPU_TOO]
    made = [(record, _made(name, record)) for record in shown]
    return "\n".join(record.caption() + table for record, table in made if table) or NOTHING


def _made(name: str, record: Record) -> str:
    try:
        return TABLES[name](record)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        message = (
            f"readme_tables: {record.folder}/{record.name}.json has not what table:{name} is made "
            f"of: {type(error).__name__}: {error}"
        )
        raise ValueError(message) from error


@dataclass(frozen=True)
class Place:
    """Where a table stands in a text.

    Attributes:
        name: Of the table.
        begin: First character behind the marker before it.
        end: First character of the marker after it.
    """

    name: str
    begin: int
    end: int


def find_places(text: str) -> list[Place]:
    """Every marked table, in order.

    Raises:
        ValueError: a marker is misspelt, names no table, or has no counterpart before the next.
    """
    places: list[Place] = []
    opened: re.Match[str] | None = None
    for found in MARKER.finditer(text):
        closes, name = bool(found[1]), found[2]
        wanted = END if closes else f"<!-- table:{name} -->\n"
        wrong = ""
        if not found[0].startswith(wanted):
            wrong = f"must read {wanted.strip()}" + ("" if closes else ", on a line of its own")
        elif not closes and name not in TABLES:
            wrong = f"table:{name} is unknown; choose from {list(TABLES)}"
        elif closes == (opened is None):
            wrong = "has no table before it" if closes else f"stands before the {END} of the last"
        if wrong:
            message = f"readme_tables: line {_line_of(text, found)}: {found[0].strip()} {wrong}"
            raise ValueError(message)
        if opened is not None:
            places.append(Place(opened[2], opened.end(), found.start()))
        opened = None if closes else found
    if opened is not None:
        message = (
            f"readme_tables: line {_line_of(text, opened)}: {opened[0].strip()} has no {END} "
            f"behind it"
        )
        raise ValueError(message)
    return places


def _line_of(text: str, found: re.Match[str]) -> int:
    return text.count("\n", 0, found.start()) + 1


def regenerate(text: str, records: Sequence[Record]) -> str:
    """``text`` with every marked table written anew.

    Raises:
        ValueError: a marker is not as it must be; then nothing can be said of what it encloses.
    """
    parts, done = [], 0
    for place in find_places(text):
        parts += [text[done : place.begin], render(place.name, records)]
        done = place.end
    return "".join((*parts, text[done:]))


def update_tables(
    readme: Annotated[Path, typer.Option(help="File with marked tables.")] = Path("README.md"),
    results: Annotated[Path, typer.Option(help="Folder of results.")] = Path("docs/results"),
    check: Annotated[bool, typer.Option(help="Change nothing; fail if not current.")] = False,
) -> None:
    """Write the tables of README.md from docs/results."""
    for path, is_there, what in (
        (readme, readme.is_file(), "--readme: {} is no file"),
        (results, results.is_dir(), "--results: {} is no folder"),
    ):
        if not is_there:
            raise typer.BadParameter(what.format(path))
    before = readme.read_text()
    try:
        after = regenerate(before, read_records(results))
    except ValueError as error:
        raise typer.BadParameter(f"{readme}: {error}") from error
    if before == after:
        typer.echo(f"{readme}: tables are current")
        return
    if check:
        typer.echo(
            f"{readme}: tables are not those of {results}; run "
            f"python -m ulysses_ops.tools.readme_tables",
            err=True,
        )
        raise typer.Exit(1)
    readme.write_text(after)
    typer.echo(f"{readme}: tables written")


def main() -> None:
    """Entry point."""
    typer.run(update_tables)


if __name__ == "__main__":
    main()
