"""A long run in pieces: mixed graphs and eager calls with skewed ranks, and lives of communicators.

A piece is a communicator of its own with a graph for each shape; in an order that all ranks draw
alike it replays them, or makes the same calls eagerly, each rank held up at random. Every element
of every exchange is compared (:mod:`ulysses_ops.tools.replays`). Cycles create a communicator,
exchange once and close it, and what the process holds must not grow. The file is written after
each piece, and ``--resume`` does the pieces that are missing.

::

    python -m ulysses_ops.tools.soak --cycles 200 --pieces 4 --time-limit 540
    python -m ulysses_ops.tools.soak --resume --pieces 20 --parallel 2 --time-limit 540
"""

from __future__ import annotations

import itertools
import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Annotated, Any

import torch
import typer

from ulysses_ops.communicator import UlyssesCommunicator
from ulysses_ops.tools.held import read_held
from ulysses_ops.tools.launch import Launch, RankContext, run_ranks
from ulysses_ops.tools.out_folder import refuse_folder
from ulysses_ops.tools.replays import CheckedExchange, delay
from ulysses_ops.tools.results import Machine, read_machine, read_results, write_results
from ulysses_ops.tools.revision import read_commit
from ulysses_ops.tools.shapes import Shape

NAME = "soak"
SHAPES = (
    Shape("small", "small", 512, 8, 64),
    Shape("flux", "FLUX", 4608, 24, 128),
    Shape("odd", "odd", 1000, 10, 72, batch=2),
)
SMALL = (Shape("tiny", "tiny", 16, 4, 8), Shape("odd", "odd", 12, 2, 6, batch=2))
EAGER = 0.2  # of the calls
CHUNK = 200  # calls between two meetings of the ranks
WARM_CYCLES = 3  # before what is held is read for the first time
PARTING_S = 20.0


@dataclass(frozen=True)
class SoakJob:
    """What is to be done.

    Attributes:
        shapes: A graph each.
        numbers: Of the pieces; seeds follow from them.
        calls: Replays and eager calls of a piece.
        cycles: Lives of communicators ahead of the pieces.
        skew_us: Largest delay of a rank ahead of a call; in rare ones 30 times that.
    """

    shapes: tuple[Shape, ...]
    numbers: tuple[int, ...]
    calls: int
    cycles: int
    skew_us: float = 50.0


def soak_rank(context: RankContext, job: SoakJob) -> None:
    """Deliver what the cycles, and each piece, came to. Collective."""
    if job.cycles:
        context.deliver({"cycles": _run_cycles(context, job)})
    for number in job.numbers:
        if not context.agree(time.monotonic() < context.deadline - PARTING_S):
            return
        context.deliver({"piece": _run_piece(context, job, number)})


def _communicator(context: RankContext, name: str) -> UlyssesCommunicator:
    return UlyssesCommunicator(
        device=context.device, name=name, allow_shared_devices=context.shares_devices
    )


def _run_piece(context: RankContext, job: SoakJob, number: int) -> dict[str, Any]:
    """Calls in random order with random delays; what was wrong, and whether that can be seen."""
    begin = time.monotonic()
    shared = random.Random(f"soak/{number}")  # the same on every rank: the order of the calls
    mine = random.Random(f"soak/{number}/{context.rank}")
    with _communicator(context, f"soak.{number}") as comm:
        checked = [CheckedExchange(context, comm, shape) for shape in job.shapes]
        done = eager = 0
        while done < job.calls:
            for _ in range(min(CHUNK, job.calls - done)):
                one = shared.choice(checked)
                delay(context, mine, job.skew_us)
                if shared.random() < EAGER:
                    one.call()
                    eager += 1
                else:
                    one.replay()
                done += 1
            context.finish(f"piece {number}: call {done}")
            context.progress(f"piece {number}: {done} of {job.calls} calls")
            if not context.agree(time.monotonic() < context.deadline - PARTING_S):
                break
        comm.check()
        mismatches = sum(context.gather(sum(int(one.mismatches) for one in checked)))
        for one in checked:
            one.mismatches.zero_()
            one.replay_judged_wrongly()
        context.finish("control")
        seen = min(context.gather(min(int(one.mismatches) for one in checked)))
        for one in checked:
            one.close()
        transport = comm.transport
    return {
        "number": number,
        "transport": transport,
        "calls": done,
        "eager": eager,
        "mismatches": mismatches,
        "control_mismatches": seen,
        "seconds": round(time.monotonic() - begin, 1),
    }


def _run_cycles(context: RankContext, job: SoakJob) -> dict[str, Any]:
    """Create, exchange, close; what the process holds after the first few, and at the end."""
    begin = time.monotonic()
    shape = job.shapes[0]
    before = read_held(context.device)
    done = 0
    for number in range(job.cycles):
        with _communicator(context, f"cycle.{number}") as comm:
            checked = CheckedExchange(context, comm, shape)
            checked.replay()
            context.finish(f"cycle {number}")
            checked.close()
        del checked, comm
        done += 1
        if number + 1 == WARM_CYCLES:
            before = read_held(context.device)
        context.progress(f"{done} of {job.cycles} cycles")
        if not context.agree(time.monotonic() < context.deadline - PARTING_S):
            break
    after = read_held(context.device)
    return {
        "cycles": done,
        "leaks": context.gather(after.leaks(before)),
        "gpu_bytes_more": context.gather(after.gpu_bytes - before.gpu_bytes),
        "seconds": round(time.monotonic() - begin, 1),
    }


def read_earlier(path: Path, machine: Machine, commit: str | None) -> dict[str, Any]:
    """What an earlier run has finished.

    Raises:
        ValueError: it ran elsewhere, or from another commit, or is no file of results.
    """
    if not path.exists():
        return {"cycles": [], "pieces": []}
    earlier = read_results(path)
    for field, here in (("gpu", machine.gpu), ("torch", machine.torch), ("commit", commit)):
        if earlier[field] != here:
            message = f"soak: {path} is of {field} {earlier[field]}, this is {here}; do not resume"
            raise ValueError(message)
    return {"cycles": earlier.get("cycles", []), "pieces": earlier.get("pieces", [])}


def missing_numbers(found: dict[str, Any], pieces: int) -> tuple[int, ...]:
    """The first so many numbers of which there is no piece yet."""
    done = {int(piece["number"]) for piece in found["pieces"]}
    return tuple(itertools.islice((n for n in itertools.count() if n not in done), pieces))


def is_wrong(found: dict[str, Any]) -> bool:
    """Whether a piece has mismatches, or cannot see any, or cycles have left something behind."""
    return any(
        piece["mismatches"] or not piece["control_mismatches"] for piece in found["pieces"]
    ) or any(any(cycles["leaks"]) for cycles in found["cycles"])


def main(
    pieces: Annotated[int, typer.Option(min=0, help="Pieces to do now.")] = 4,
    calls: Annotated[int, typer.Option(min=1, help="Calls of a piece.")] = 20_000,
    cycles: Annotated[int, typer.Option(min=0, help="Lives of communicators.")] = 0,
    cpu: Annotated[bool, typer.Option("--cpu", help="CPU ranks and tiny shapes.")] = False,
    parallel: Annotated[
        int, typer.Option(min=1, help="Pairs of ranks that do pieces side by side.")
    ] = 1,
    resume: Annotated[bool, typer.Option("--resume", help="Do missing pieces alone.")] = False,
    time_limit: Annotated[float, typer.Option(min=20, help="Wall time, in seconds.")] = 540.0,
    out: Annotated[Path, typer.Option(help="Folder of results.")] = Path("docs/results"),
    commit: Annotated[str | None, typer.Option(help="Commit, where git cannot tell.")] = None,
) -> None:
    """Soak, and write soak.json after every piece."""
    num_devices = 0 if cpu else min(torch.cuda.device_count(), 2)
    if not cpu and num_devices < 2:
        message = f"two GPUs are needed, {num_devices} are visible; or add --cpu"
        raise typer.BadParameter(message)
    refuse_folder(out)
    launch = Launch(2, "cpu" if cpu else "cuda", num_devices, time_limit)
    machine = read_machine(launch.device(0), num_devices)
    commit = commit or read_commit()
    found: dict[str, Any] = {"cycles": [], "pieces": []}
    if resume:
        try:
            found = read_earlier(out / machine.folder / f"{NAME}.json", machine, commit)
        except ValueError as error:
            raise typer.BadParameter(f"--resume: {error}") from error
    if cycles and parallel > 1:
        message = "--cycles judge the memory of a GPU, which the other pairs use as well; run apart"
        raise typer.BadParameter(message)
    numbers = missing_numbers(found, pieces)
    keeping = Lock()

    def keep(part: dict[str, Any]) -> None:
        with keeping:
            found["cycles"] += [part["cycles"]] if "cycles" in part else []
            found["pieces"] += [part["piece"]] if "piece" in part else []
            found["pieces"].sort(key=lambda piece: int(piece["number"]))
            path = write_results(out, NAME, machine, commit, found)
            typer.echo(f"{part} -> {path}")

    def soak_pair(pair: int) -> None:
        mine = numbers[pair::parallel]
        job = SoakJob(SMALL if cpu else SHAPES, mine, calls, cycles)
        run_ranks(soak_rank, job, launch, on_part=keep)

    with ThreadPoolExecutor(parallel) as pairs:
        list(pairs.map(soak_pair, range(parallel)))  # raises what a pair raised
    if is_wrong(found):
        typer.echo("WRONG", err=True)
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
