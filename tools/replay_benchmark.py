"""``ulysses-bench``: the attention step at production shapes: captured, replayed, checked, timed.

Without GPUs the same operators run on two CPU ranks with small shapes: that shows that they work,
and nothing about their speed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from ulysses_ops.tools.benchmark_job import BenchmarkJob, Outcome, run_rank
from ulysses_ops.tools.launch import Launch, RankError, run_ranks
from ulysses_ops.tools.parity import ParityJob
from ulysses_ops.tools.replays import ReplayJob
from ulysses_ops.tools.results import rows_to_json, write_results
from ulysses_ops.tools.shapes import FUNCTIONAL, SMALL_STEP, Shape, select_shapes
from ulysses_ops.tools.tables import print_rows
from ulysses_ops.tools.timing import Effort

RESULTS = Path("docs/results")
FUNCTIONAL_RUN = "functional run on CPU: these times say nothing about GPUs"
PRODUCTION_REPLAYS = 200
CPU_REPLAYS = 20


@dataclass(frozen=True)
class Plan:
    """What the command line asks for.

    Attributes:
        launch: Ranks to start.
        jobs: What each of them does.
        name: Name of the results file.
        is_functional: Its times mean nothing.
    """

    launch: Launch
    jobs: list[Any]
    name: str
    is_functional: bool


def run_benchmark(
    shapes: Annotated[
        str, typer.Option(help="Production shapes, separated by commas, or 'all'.")
    ] = "all",
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds.")] = 10,
    batch_ms: Annotated[
        float, typer.Option(min=0.1, help="Time for each variant in a round, in ms.")
    ] = 60.0,
    attention: Annotated[bool, typer.Option(help="Measure the attention step.")] = True,
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
        float, typer.Option(min=10, help="Wall time for all ranks, in seconds.")
    ] = 540.0,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for results; docs/results for runs on GPUs."),
    ] = None,
    commit: Annotated[
        str | None, typer.Option(help="Commit that is run, where git cannot tell.")
    ] = None,
) -> None:
    """Check and time exchanges and the attention step on GPUs, or check them on the CPU."""
    console = Console()
    num_devices = 0 if cpu else torch.cuda.device_count()
    effort = Effort(rounds, batch_ms)
    try:
        if num_devices < 2 and not (oversubscribe and num_devices):
            plan = _plan_functional(world_size or 2, replays, time_limit, transport)
        elif replays or oversubscribe:
            chosen = select_shapes(shapes)
            launch = _launch(world_size or 2, num_devices, oversubscribe, time_limit)
            plan = _plan_replays(launch, chosen, replays, (transport, mapping, signal))
        else:
            launch = _launch(world_size or 2, num_devices, False, time_limit)
            job = BenchmarkJob(select_shapes(shapes), effort, attention, transport, mapping, signal)
            plan = Plan(launch, [job], "attention_step", False)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if plan.is_functional:
        console.print(FUNCTIONAL_RUN, style="bold yellow")
    outcome = _run(console, plan)
    print_rows(console, outcome.machine, outcome.transport, outcome.rows)
    if plan.is_functional:
        console.print(FUNCTIONAL_RUN, style="bold yellow")
    folder = out or (None if plan.is_functional else RESULTS)
    if folder is not None:
        content = {"transport": outcome.transport, "rows": rows_to_json(outcome.rows)}
        path = write_results(folder, plan.name, outcome.machine, commit, content)
        console.print(f"written: {path}", soft_wrap=True, highlight=False)
    wrong = [row for row in outcome.rows if row.exact is False]
    if wrong:
        console.print(f"{len(wrong)} of {len(outcome.rows)} rows are WRONG", style="bold red")
        raise typer.Exit(1)


def _run(console: Console, plan: Plan) -> Outcome:
    parts: list[Outcome] = []
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    try:
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task("starting ranks", total=None)
            outcomes = run_ranks(
                run_rank,
                plan.jobs,
                plan.launch,
                on_progress=lambda text: progress.update(task, description=text),
                on_part=parts.append,
            )
    except RankError as error:
        for outcome in parts[-1:]:  # each part holds those before it
            print_rows(console, outcome.machine, outcome.transport, outcome.rows)
        console.print(str(error), style="red", markup=False, highlight=False)
        raise typer.Exit(1) from error
    first: Outcome = outcomes[0]
    return first


def _launch(world_size: int, num_devices: int, oversubscribe: bool, limit_s: float) -> Launch:
    if world_size > num_devices and not oversubscribe:
        message = (
            f"world_size={world_size} needs as many GPUs, {num_devices} are visible; "
            f"add --oversubscribe to check only"
        )
        raise ValueError(message)
    return Launch(world_size, "cuda", num_devices, limit_s)


def _plan_replays(
    launch: Launch,
    shapes: tuple[Shape, ...],
    replays: int,
    choice: tuple[str | None, str | None, str | None],
) -> Plan:
    transport, mapping, signal = choice
    if launch.shares_devices:
        transport = transport or "ce"  # what ranks that share GPUs are there to check
    replays = replays or PRODUCTION_REPLAYS
    fitting = [shape for shape in (SMALL_STEP, *shapes) if shape.fits(launch.world_size)]
    counts = tuple(
        (shape, replays if shape is SMALL_STEP else min(replays, PRODUCTION_REPLAYS))
        for shape in fitting
    )
    job = ReplayJob(counts, transport, mapping, signal)
    jobs: list[Any] = [job]
    name = "replays"
    if launch.shares_devices:
        parity = ParityJob(FUNCTIONAL, ("bfloat16", "uint8"), Effort(1, 1.0), transport)
        jobs.insert(0, parity)
        name = f"replays_w{launch.world_size}_oversubscribed"
    return Plan(launch, jobs, name, False)


def _plan_functional(world_size: int, replays: int, limit_s: float, transport: str | None) -> Plan:
    launch = Launch(world_size, "cpu", 0, limit_s)
    fitting = tuple(shape for shape in FUNCTIONAL if shape.fits(world_size))
    if not fitting:
        message = f"world_size={world_size} splits none of the small shapes; use 2 ranks"
        raise ValueError(message)
    effort = Effort(3, 2.0)
    parity = ParityJob(FUNCTIONAL, ("float32", "uint8"), effort, transport)
    steps = BenchmarkJob(fitting, effort, True, transport)
    counts = tuple((shape, replays or CPU_REPLAYS) for shape in fitting)
    skew = ReplayJob(counts, transport, skew_us=200.0)
    return Plan(launch, [parity, steps, skew], "functional", True)


def main() -> None:
    """Entry point of the console script."""
    typer.run(run_benchmark)


if __name__ == "__main__":
    main()
