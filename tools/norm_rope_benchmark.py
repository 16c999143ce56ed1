"""``python -m ulysses_ops.tools.norm_rope_benchmark``: the fused RMSNorm + RoPE, checked and timed.

Without a GPU the PyTorch implementation runs with a small shape: that shows that it works, and
nothing about its speed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from ulysses_ops._native import NATIVE
from ulysses_ops.tools.launch import Launch
from ulysses_ops.tools.norm_rope_rows import NormRopeJob, run_norm_rope
from ulysses_ops.tools.one_launch import FUNCTIONAL_RUN, run_and_report
from ulysses_ops.tools.timing import Effort

SHAPES = "2000x24,4608x24,6240x40,9360x40,16380x40,32760x40,37888x56,40000x56"
FUNCTIONAL_SHAPES = ((33, 3),)


def parse_shapes(text: str) -> tuple[tuple[int, int], ...]:
    """``S x H`` pairs: ``2000x24,4608x24``.

    Raises:
        ValueError: a pair is not of that form.
    """
    pairs = []
    for entry in text.split(","):
        rows, _, heads = entry.strip().partition("x")
        if not (rows.isdecimal() and heads.isdecimal() and int(rows) and int(heads)):
            message = f"shapes: {entry!r} is not of the form 2000x24 (rows x heads)"
            raise ValueError(message)
        pairs.append((int(rows), int(heads)))
    return tuple(pairs)


def run_benchmark(
    shapes: Annotated[
        str, typer.Option(help="Rows x heads of Q and of K, separated by commas.")
    ] = SHAPES,
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds.")] = 8,
    batch_ms: Annotated[
        float, typer.Option(min=0.1, help="Time for each variant in a round, in ms.")
    ] = 20.0,
    inductor: Annotated[bool, typer.Option(help="Compare with Inductor.")] = True,
    cpu: Annotated[bool, typer.Option(help="Run on the CPU even where there is a GPU.")] = False,
    time_limit: Annotated[
        float, typer.Option(min=10, help="Wall time for everything, in seconds.")
    ] = 540.0,
    out: Annotated[Path | None, typer.Option(help="Folder for results.")] = None,
    commit: Annotated[
        str | None, typer.Option(help="Commit that is run, where git cannot tell.")
    ] = None,
) -> None:
    """Check and time the fused RMSNorm + RoPE against a copy of the same bytes and Inductor."""
    console = Console()
    on_gpu = torch.cuda.is_available() and not cpu
    if on_gpu and not NATIVE.kernels:
        console.print(f"no kernels to measure: {NATIVE.kernels_reason}", style="red")
        raise typer.Exit(1)
    try:
        chosen = parse_shapes(shapes) if on_gpu else FUNCTIONAL_SHAPES
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    job = NormRopeJob(
        chosen, ("per_head", "across_heads"), Effort(rounds, batch_ms), inductor=inductor
    )
    if not on_gpu:
        job = NormRopeJob(chosen, job.norms, Effort(2, 1.0), 32, inductor=False)
        console.print(FUNCTIONAL_RUN, style="bold yellow")
    launch = Launch(1, "cuda" if on_gpu else "cpu", 1 if on_gpu else 0, time_limit)
    run_and_report(console, "norm_rope", run_norm_rope, job, launch, out=out, commit=commit)


def main() -> None:
    """Entry point."""
    typer.run(run_benchmark)


if __name__ == "__main__":
    main()
