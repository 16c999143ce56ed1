"""One launch of ranks from a command line: what it found as a table, in a file, and as the exit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from ulysses_ops.tools.kept_rows import keep_rows
from ulysses_ops.tools.launch import Launch, RankError, run_ranks
from ulysses_ops.tools.out_folder import refuse_folder
from ulysses_ops.tools.results import Machine, Row, rows_to_json
from ulysses_ops.tools.tables import print_rows

FUNCTIONAL_RUN = "functional run on CPU: these times say nothing about GPUs"


def run_and_report(
    console: Console,
    name: str,
    work: Callable[..., Any],
    job: Any,
    launch: Launch,
    *,
    out: Path | None,
    commit: str | None,
) -> None:
    """Run ``work(context, job)`` on every rank; print its rows, and write them to ``name``.json.

    Args:
        console: Where progress and the table go.
        name: Name of the results file.
        work: Delivers the machine and its rows, each time with those before.
        job: Its argument.
        launch: Which ranks, and for how long.
        out: Folder for results; nothing is written when left out.
        commit: What is run, where git cannot tell.

    Raises:
        BadParameter: nothing can be written into ``out``, or rows are to be added to what is no
            file of results; before ranks start.
        typer.Exit: with 1, when a rank failed or a row is wrong; what was found is kept.
    """
    refuse_folder(out, [name])
    parts: list[tuple[Machine, list[Row]]] = []
    try:
        run_ranks(work, job, launch, on_progress=console.print, on_part=parts.append)
        failure = ""
    except RankError as error:
        failure = str(error)
    rows: list[Row] = []
    if parts:
        machine, rows = parts[-1]  # each part holds those before it
        transport = next((row.transport for row in rows if row.transport != "none"), "none")
        print_rows(console, machine, transport, rows)
        if out is not None:
            content = {"transport": transport, "rows": rows_to_json(rows)}
            path, why_anew = keep_rows(out, name, machine, commit, content)
            if why_anew:
                console.print(f"earlier rows are not kept: {why_anew}", style="yellow")
            console.print(f"written: {path}", soft_wrap=True, highlight=False)
    if failure:
        console.print(failure, style="red", markup=False, highlight=False)
        raise typer.Exit(1)
    wrong = [row for row in rows if row.exact is False]
    if wrong:
        console.print(f"{len(wrong)} of {len(rows)} rows are WRONG", style="bold red")
        raise typer.Exit(1)
