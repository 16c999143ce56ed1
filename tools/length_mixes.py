"""Predicts how evenly plans and plain data parallelism load the ranks, for mixes of lengths.

    python -m ulysses_ops.tools.length_mixes

writes ``docs/results/cpu/length_mixes.json``, of which ``readme_tables`` makes the table of
docs/llm.md. Everything is computed from the constants that come with the package; nothing is
measured.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer

from ulysses_ops.constants import shipped_constants
from ulysses_ops.sequence_plan import SequencePlan, data_parallel, plan_sequences
from ulysses_ops.tools.out_folder import refuse_folder
from ulysses_ops.tools.results import read_machine, write_results
from ulysses_ops.workload import ModelShape, Workload

NAME = "length_mixes"
MODEL = ModelShape(32, 4096, 32, 8, 128, 14336)
WORLD_SIZES = (2, 4, 8)
DRAWS = 25
SHORT, LONG = 1024, 8192

Draw = Callable[[random.Random, int], list[int]]


def _even(draw: random.Random, count: int) -> list[int]:
    return [draw.randint(SHORT, LONG) for _ in range(count)]


def _by_ratio(draw: random.Random, count: int) -> list[int]:
    return [int(SHORT * (LONG / SHORT) ** draw.random()) for _ in range(count)]


def _mostly_short(draw: random.Random, count: int) -> list[int]:
    return [LONG if draw.random() < 0.1 else SHORT for _ in range(count)]


def _one_long(draw: random.Random, count: int) -> list[int]:
    lengths = [SHORT] * (count - 1) + [LONG]
    draw.shuffle(lengths)
    return lengths


# What it is, requests for each rank, and how lengths are drawn.
MIXES: dict[str, tuple[int, Draw]] = {
    "1K to 8K, all alike likely, one a rank": (1, _even),
    "1K to 8K, all alike likely, eight a rank": (8, _even),
    "1K to 8K, all ratios alike likely, four a rank": (4, _by_ratio),
    "1K, one in ten 8K, four a rank": (4, _mostly_short),
    "1K, and a single one of 8K, two a rank": (2, _one_long),
}


@dataclass(frozen=True)
class MixRow:
    """Medians over the draws of one mix.

    Attributes:
        mix: What was drawn.
        world_size: Number of ranks.
        requests: Requests of a draw.
        plain_us: Step with whole requests to ranks in turn.
        plain_imbalance: ``max / mean - 1`` over the ranks.
        longest_first_us: Step with whole requests, each to the rank that is done first.
        longest_first_imbalance: Likewise.
        planned_us: Step as planned.
        planned_imbalance: Likewise, over the groups.
        sp: Ranks of a group, of most draws.
    """

    mix: str
    world_size: int
    requests: int
    plain_us: float
    plain_imbalance: float
    longest_first_us: float
    longest_first_imbalance: float
    planned_us: float
    planned_imbalance: float
    sp: int


def predict() -> list[MixRow]:
    """Every mix at every world size."""
    workload = Workload(MODEL, shipped_constants())
    return [_predict_one(mix, world_size, workload) for mix in MIXES for world_size in WORLD_SIZES]


def _predict_one(mix: str, world_size: int, workload: Workload) -> MixRow:
    per_rank, draw_lengths = MIXES[mix]
    draw = random.Random(f"{mix}/{world_size}")
    plain: list[SequencePlan] = []
    longest: list[SequencePlan] = []
    planned: list[SequencePlan] = []
    for _ in range(DRAWS):
        lengths = draw_lengths(draw, per_rank * world_size)
        plain.append(data_parallel(lengths, world_size, workload))
        longest.append(plan_sequences(lengths, world_size, workload, sizes=[1]))
        planned.append(plan_sequences(lengths, world_size, workload))

    def medians(plans: list[SequencePlan]) -> tuple[float, float]:
        times = statistics.median(plan.step_us for plan in plans)
        imbalance = statistics.median(plan.imbalance for plan in plans)
        return round(times, 1), round(imbalance, 4)

    sp = statistics.mode(plan.sp for plan in planned)
    columns = (*medians(plain), *medians(longest), *medians(planned))
    return MixRow(mix, world_size, per_rank * world_size, *columns, sp)


def write_predictions(
    results: Annotated[Path, typer.Option(help="Folder of results.")] = Path("docs/results"),
) -> None:
    """Predict every mix, and write the results file."""
    refuse_folder(results, option="--results")
    content = {
        "model": asdict(MODEL),
        "constants": shipped_constants().to_json(),
        "draws": DRAWS,
        "mixes": [asdict(row) for row in predict()],
    }
    path = write_results(results, NAME, read_machine(torch.device("cpu"), 0), None, content)
    typer.echo(f"written: {path}")


def main() -> None:
    """Entry point."""
    typer.run(write_predictions)


if __name__ == "__main__":
    main()
