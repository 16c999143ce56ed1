"""Faults by steps: every cell strikes one rank once and says what came of it, on every rank.

Nothing may hang, leak, or hand out wrong data, and what is refused is refused by name. Ranks are
processes of their own in each cell, so that one may be killed or stopped for real.

::

    python -m ulysses_ops.tools.fault_matrix              # GPUs if there are two, else CPU ranks
    python -m ulysses_ops.tools.fault_matrix --one-moment --out /tmp/results
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import typer

from ulysses_ops.tools.fault_cell import Cell, find_moments, run_cell
from ulysses_ops.tools.fault_cycle import Setting
from ulysses_ops.tools.faults import FAULTS, Fault, possible_faults
from ulysses_ops.tools.launch import Launch
from ulysses_ops.tools.out_folder import refuse_folder
from ulysses_ops.tools.results import read_machine, write_results

RESULTS = Path("docs/results")


def chosen_faults(faults: Sequence[Fault], one_moment: bool) -> list[Fault]:
    """All, or for each fault and step the one in the middle of its moments."""
    if not one_moment:
        return list(faults)
    by_place: dict[tuple[str, str], list[Fault]] = {}
    for fault in faults:
        by_place.setdefault((fault.name, fault.moment.step), []).append(fault)
    return [group[len(group) // 2] for group in by_place.values()]


def chosen_folder(out: Path | None, only: str, one_moment: bool, time_limit: float) -> Path:
    """Where to write. A run of some cells replaces no record of all of them unasked.

    Raises:
        BadParameter: cells are left out, and no folder is named.
    """
    cuts = {
        "--only": only != "all",
        "--one-moment": one_moment,
        "--time-limit": math.isfinite(time_limit),
    }
    named = ", ".join(name for name, is_cut in cuts.items() if is_cut)
    if out is None and named:
        message = (
            f"--out: with {named} cells are left out, and the file would replace a record of all; "
            f"name a folder"
        )
        raise typer.BadParameter(message)
    return RESULTS if out is None else out


def run_matrix(
    setting: Setting,
    faults: Sequence[Fault],
    *,
    time_limit_s: float = math.inf,
    on_cell: Callable[[Cell], None] = lambda cell: None,
) -> list[Cell]:
    """Run a cell for each fault, and return them in the order of faults.

    Args:
        setting: What all cells share.
        faults: One a cell.
        time_limit_s: Wall time after which none is begun; their cells are left out.
        on_cell: Called with each.
    """
    until = time.monotonic() + time_limit_s

    def run_in_time(fault: Fault) -> Cell | None:
        return run_cell(setting, fault) if time.monotonic() < until else None

    with ThreadPoolExecutor(setting.parallel) as threads:
        running = {threads.submit(run_in_time, fault): fault for fault in faults}
        done: dict[Fault, Cell] = {}
        for finished in as_completed(running):
            cell = finished.result()
            if cell is not None:
                done[running[finished]] = cell
                on_cell(cell)
    return [done[fault] for fault in faults if fault in done]


def main(
    cpu: Annotated[bool, typer.Option("--cpu", help="CPU ranks, even where GPUs are.")] = False,
    world_size: Annotated[int, typer.Option(min=2, help="Ranks.")] = 2,
    limit: Annotated[float, typer.Option(min=0.5, help="timeout_s of the communicators.")] = 2.0,
    only: Annotated[str, typer.Option(help="Faults, separated by commas; or 'all'.")] = "all",
    one_moment: Annotated[
        bool, typer.Option("--one-moment", help="One moment of each step, not every one.")
    ] = False,
    parallel: Annotated[
        int, typer.Option(min=1, help="Cells at a time; with 1, GPU memory is judged.")
    ] = 1,
    time_limit: Annotated[float, typer.Option(min=1, help="Begin no cell later.")] = math.inf,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of results; docs/results, where every cell is wanted."),
    ] = None,
    commit: Annotated[str | None, typer.Option(help="Commit, where git cannot tell.")] = None,
) -> None:
    """Run the matrix and write fault_matrix.json."""
    names = list(FAULTS) if only == "all" else [name.strip() for name in only.split(",")]
    unknown = [name for name in names if name not in FAULTS]
    if unknown:
        message = f"--only: {unknown} is none of {list(FAULTS)}"
        raise typer.BadParameter(message)
    folder = chosen_folder(out, only, one_moment, time_limit)
    refuse_folder(folder)
    num_devices = 0 if cpu else torch.cuda.device_count()
    on_gpu = num_devices >= 2
    launch = Launch(world_size, "cuda" if on_gpu else "cpu", num_devices)
    setting = Setting(launch, limit, parallel=parallel)
    moments = find_moments(setting)
    faults = [
        fault
        for fault in chosen_faults(possible_faults(moments), one_moment)
        if fault.name in names
    ]
    cells = run_matrix(setting, faults, time_limit_s=time_limit, on_cell=typer.echo)
    bad = [cell for cell in cells if not cell.is_good]
    machine = read_machine(launch.device(0), min(num_devices, world_size) if on_gpu else 0)
    content = {
        "world_size": world_size,
        "transport": "ce" if on_gpu else "gloo",
        "limit_s": limit,
        "moments": len(moments),
        "cells_left_out": len(faults) - len(cells),
        "parallel": parallel,
        "only": only,
        "one_moment": one_moment,
        "cells": [asdict(cell) for cell in cells],
    }
    path = write_results(folder, "fault_matrix", machine, commit, content)
    typer.echo(f"{len(cells)} of {len(faults)} cells, {len(bad)} bad; written: {path}")
    if bad:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
