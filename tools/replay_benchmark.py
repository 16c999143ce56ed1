"""``ulysses-bench``: from single exchanges to whole denoising steps: captured, checked, timed.

Without GPUs the same code runs on two CPU ranks with small shapes: that shows that it works, and
nothing about its speed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from ulysses_ops.tools.benchmark_plan import (
    Choice,
    Plan,
    launch_on_gpus,
    plan_benchmark,
    plan_functional,
    plan_replays,
)
from ulysses_ops.tools.benchmark_run import Keeping, run_plans
from ulysses_ops.tools.one_launch import FUNCTIONAL_RUN
from ulysses_ops.tools.out_folder import refuse_folder
from ulysses_ops.tools.revision import read_commit
from ulysses_ops.tools.step_cases import DEFAULT_MODELS
from ulysses_ops.tools.tables import print_rows
from ulysses_ops.tools.timing import Effort

RESULTS = Path("docs/results")


def run_benchmark(
    shapes: Annotated[
        str, typer.Option(help="Production shapes, separated by commas, or 'all'.")
    ] = "all",
    only: Annotated[
        str,
        typer.Option(
            help="What to measure, separated by commas: handshake, exchange, attention, load, "
            "block; or 'all' of these. And, not part of 'all', uneven: splits that are not alike; "
            "all_gather: shards of the sequence, to every rank; "
            "qkv: the stage of the block before attention; power: what the block draws, and the "
            "clock it leaves; step: whole models of diffusers; "
            "launch: of graphs, by their nodes (one rank will do); forms: of handshakes."
        ),
    ] = "all",
    variants: Annotated[
        str, typer.Option(help="Variants of block, qkv or step, separated by commas, or 'all'.")
    ] = "all",
    models: Annotated[
        str, typer.Option(help="Models of the step, separated by commas.")
    ] = DEFAULT_MODELS,
    layers: Annotated[
        int, typer.Option(min=0, help="Layers of the step's models; 0 for all of them.")
    ] = 0,
    parts: Annotated[
        str,
        typer.Option(
            help="Parts of the step, separated by commas: step, generation, graphs (ten shapes "
            "held together), launches; or 'all'."
        ),
    ] = "all",
    size: Annotated[
        str,
        typer.Option(help="Of the step that is timed: 1024x1024, 832x480x81; or the model's."),
    ] = "",
    trial: Annotated[
        bool,
        typer.Option(help="Try the block's variants, in processes of their own, and profile them."),
    ] = True,
    modes: Annotated[
        str, typer.Option(help="Modes in which block and qkv are timed: eager, graph; or 'all'.")
    ] = "all",
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds.")] = 10,
    batch_ms: Annotated[
        float, typer.Option(min=0.1, help="Time for each variant in a round, in ms.")
    ] = 60.0,
    replays: Annotated[
        int,
        typer.Option(
            min=0,
            help="Instead of timing, replay a small step this often and each production "
            "shape up to 200 times, ranks skewed, and count mismatches.",
        ),
    ] = 0,
    world_size: Annotated[int, typer.Option(min=0, help="Ranks; 2 when left out.")] = 0,
    oversubscribe: Annotated[
        bool, typer.Option(help="Let ranks share GPUs: checks only, no times.")
    ] = False,
    cpu: Annotated[bool, typer.Option(help="Run on the CPU even where there are GPUs.")] = False,
    transport: Annotated[str | None, typer.Option(help="Transport to insist on.")] = None,
    mapping: Annotated[str | None, typer.Option(help="Mapping to insist on.")] = None,
    signal: Annotated[str | None, typer.Option(help="Signal to insist on.")] = None,
    time_limit: Annotated[
        float,
        typer.Option(min=10, help="Wall time for everything, in seconds; shared out."),
    ] = 540.0,
    resume: Annotated[
        bool,
        typer.Option(help="Do not measure again what an earlier run of this commit has finished."),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for results; docs/results for runs on GPUs."),
    ] = None,
    commit: Annotated[
        str | None, typer.Option(help="Commit that is run, where git cannot tell.")
    ] = None,
) -> None:
    """Check and time exchanges, blocks and steps on GPUs, or check them on the CPU."""
    console = Console()
    num_devices = 0 if cpu else torch.cuda.device_count()
    commit = commit or read_commit()
    folder = out or RESULTS
    earlier = folder if resume else None
    chosen = (shapes, only, variants, models, layers or None, parts, size, trial, modes)
    choice = Choice(*chosen, transport, mapping, signal, earlier, commit)
    ranks = world_size or 2
    is_alone = world_size == 1 and num_devices > 0
    try:
        plans: list[Plan]
        if num_devices < 2 and not (oversubscribe and num_devices) and not is_alone:
            plans = [plan_functional(ranks, replays, time_limit, choice)]
        elif replays or oversubscribe:
            launch = launch_on_gpus(ranks, num_devices, oversubscribe, time_limit)
            plans = [plan_replays(launch, replays, choice)]
        else:
            launch = launch_on_gpus(ranks, num_devices, False, time_limit)
            plans = plan_benchmark(launch, choice, Effort(rounds, batch_ms))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    is_functional = plans[0].is_functional
    kept = out if is_functional else folder
    refuse_folder(kept, [plan.name for plan in plans])
    if is_functional:
        console.print(FUNCTIONAL_RUN, style="bold yellow")
    finished = run_plans(console, plans, Keeping(kept, commit), time_limit)
    for outcome in finished.outcomes:
        print_rows(console, outcome.machine, outcome.transport, outcome.rows, outcome.not_run)
    if is_functional:
        console.print(FUNCTIONAL_RUN, style="bold yellow")
    for path in finished.written:
        console.print(f"written: {path}", soft_wrap=True, highlight=False)
    for note in finished.notes:
        console.print(note, style="yellow", markup=False, highlight=False)
    rows = [row for outcome in finished.outcomes for row in outcome.rows]
    wrong = [row for row in rows if row.exact is False]
    if wrong:
        console.print(f"{len(wrong)} of {len(rows)} rows are WRONG", style="bold red")
    for failure in finished.failures:
        console.print(failure, style="red", markup=False, highlight=False)
    if wrong or finished.failures:
        raise typer.Exit(1)


def main() -> None:
    """Entry point of the console script."""
    typer.run(run_benchmark)


if __name__ == "__main__":
    main()
