"""``python -m ulysses_ops.tools.weight_benchmark``: output projections whose weights are sharded.

Says for each shape what a layer takes with whole weights, with weights prefetched one layer ahead,
and with weights gathered when they are needed, and what memory a rank saves. Without GPUs gloo
ranks run small shapes: that shows that it works, and nothing about its speed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from ulysses_ops.tools.launch import Launch
from ulysses_ops.tools.one_launch import FUNCTIONAL_RUN, run_and_report
from ulysses_ops.tools.shapes import FUNCTIONAL_BLOCKS, PRODUCTION, Shape, select_shapes
from ulysses_ops.tools.timing import Effort
from ulysses_ops.tools.weight_rows import WeightJob, weight_rows


def fitting_shapes(keys: str, ranks: int, *, on_gpu: bool) -> tuple[Shape, ...]:
    """Shapes that so many ranks divide; small ones without GPUs.

    Raises:
        ValueError: a name is unknown, or none of those named can be divided.
    """
    named = select_shapes(keys, PRODUCTION)
    chosen = named if on_gpu else FUNCTIONAL_BLOCKS
    fitting = tuple(shape for shape in chosen if named and shape.fits(ranks))
    if not fitting:
        known = [shape.key for shape in PRODUCTION if not on_gpu or shape.fits(ranks)]
        message = (
            f"'{keys}' has no shape that is measured here and that {ranks} ranks divide; choose "
            f"from {known}, or take fewer ranks"
        )
        raise ValueError(message)
    return fitting


def run_benchmark(
    shapes: Annotated[
        str, typer.Option(help="Keys of shapes, or all; on the CPU small ones stand for them.")
    ] = "all",
    world_size: Annotated[
        int | None, typer.Option(min=1, help="Ranks; by default one a GPU, or 2 on the CPU.")
    ] = None,
    layers: Annotated[
        int | None, typer.Option(min=1, help="Layers of a step; 8, or 3 on the CPU.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds.")] = 8,
    batch_ms: Annotated[float, typer.Option(min=0.1, help="Time in a round, in ms.")] = 80.0,
    cpu: Annotated[bool, typer.Option(help="Run on the CPU even where there is a GPU.")] = False,
    time_limit: Annotated[
        float, typer.Option(min=10, help="Wall time for everything, in seconds.")
    ] = 540.0,
    out: Annotated[Path | None, typer.Option(help="Folder for results.")] = None,
    commit: Annotated[
        str | None, typer.Option(help="Commit that is run, where git cannot tell.")
    ] = None,
) -> None:
    """Check and time output projections whose weights are sharded between the ranks."""
    console = Console()
    on_gpu = torch.cuda.is_available() and not cpu
    num_gpus = torch.cuda.device_count() if on_gpu else 0
    ranks = world_size or max(num_gpus, 2)
    try:
        fitting = fitting_shapes(shapes, ranks, on_gpu=on_gpu)
    except ValueError as error:
        raise typer.BadParameter(f"--shapes: {error}") from error
    effort = Effort(rounds, batch_ms) if on_gpu else Effort(2, 1.0)
    job = WeightJob(fitting, layers or (8 if on_gpu else 3), effort)
    if not on_gpu:
        console.print(FUNCTIONAL_RUN, style="bold yellow")
    launch = Launch(ranks, "cuda" if on_gpu else "cpu", num_gpus, time_limit)
    run_and_report(console, "weight_prefetch", weight_rows, job, launch, out=out, commit=commit)


def main() -> None:
    """Entry point."""
    typer.run(run_benchmark)


if __name__ == "__main__":
    main()
