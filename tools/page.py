"""Tables that stay readable where the terminal is narrow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

Side = Literal["left", "right"]
Cell = str | Text

MIN_LAST = 16  # columns that are enough for the last column of a table
NO_LIMIT = 10_000  # columns; to learn how wide a table would like to be


def print_rows(
    console: Console,
    columns: Sequence[tuple[str, Side]],
    rows: Sequence[Sequence[str]],
    *,
    title: str | None = None,
) -> None:
    """Print a table, or a paragraph for each row where it would not fit; the last column wraps."""
    table = Table(title=title, box=None, pad_edge=False, header_style="bold", title_justify="left")
    for number, (name, side) in enumerate(columns, 1):
        table.add_column(name, justify=side, no_wrap=number < len(columns))
    for row in rows:
        table.add_row(*row)
    last = max(len(row[-1]) for row in rows) if rows else 0
    if _width(console, table) - max(0, last - MIN_LAST) <= console.width:
        console.print(table)
        return
    if title:
        console.print(Text(title))
    page = Table.grid(padding=(0, 1))
    page.add_column(no_wrap=True)
    page.add_column()
    (first, _), *others = columns
    for head, *cells in rows:
        told = ", ".join(
            f"{name} {cell}" for (name, _), cell in zip(others, cells, strict=True) if cell
        )
        page.add_row(Text(f"{first} {head}"), Text(told))
    console.print(page)


def print_matrix(
    console: Console, corner: str, labels: Sequence[str], cells: Sequence[Sequence[Cell]]
) -> None:
    """Print a square table, as many of its columns at a time as fit."""
    first = 0
    while first < len(labels):
        width = len(labels) - first
        table = _columns(corner, labels, cells, first, width)
        while width > 1 and _width(console, table) > console.width:
            width -= 1
            table = _columns(corner, labels, cells, first, width)
        console.print(table)
        first += width


def _columns(
    corner: str,
    labels: Sequence[str],
    cells: Sequence[Sequence[Cell]],
    first: int,
    width: int,
) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(corner, justify="right", no_wrap=True)
    for name in labels[first : first + width]:
        table.add_column(name, justify="left", no_wrap=True)
    for name, row in zip(labels, cells, strict=True):
        table.add_row(name, *row[first : first + width])
    return table


def print_paragraphs(console: Console, entries: Sequence[tuple[str, Text]], narrow: int) -> None:
    """Print named paragraphs: beside their names, or after them below ``narrow`` columns."""
    if console.width < narrow:
        for name, text in entries:
            console.print(Text(f"{name}: ").append_text(text))
        return
    page = Table.grid(padding=(0, 2))
    page.add_column()
    page.add_column(overflow="fold")
    for name, text in entries:
        page.add_row(name, text)
    console.print(page)


def _width(console: Console, table: Table) -> int:
    """Return how wide a table would like to be."""
    return console.measure(table, options=console.options.update(max_width=NO_LIMIT)).maximum
