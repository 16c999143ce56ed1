"""How long after a peer was killed its ranks raise: in an exchange, in a graph, in a meeting.

One rank kills itself with ``SIGKILL`` in the middle of a loop; the time from there to the error of
each rank that is left may be the limit of the communicator and one second more.

::

    python -m ulysses_ops.tools.peer_death              # GPUs if there are two, else CPU ranks
    python -m ulysses_ops.tools.peer_death --limit 2 --trials 5
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Annotated, Literal, get_args

import torch
import torch.distributed as dist
import typer
from torch import Tensor

from ulysses_ops.communicator import UlyssesCommunicator
from ulysses_ops.errors import UlyssesError
from ulysses_ops.graphs import capture_step
from ulysses_ops.ops import scatter
from ulysses_ops.tools.attempts import describe
from ulysses_ops.tools.fault_cycle import GROUP_LIMIT_S, make_group
from ulysses_ops.tools.launch import HOST, SHARED_DEVICES, Launch, local_store
from ulysses_ops.tools.out_folder import refuse_folder
from ulysses_ops.tools.results import read_machine, write_results
from ulysses_ops.window_spec import WindowSpec
from ulysses_ops.windows import reserve

Place = Literal["eager", "graph", "meeting"]
GRACE_S = 1.0  # beyond the limit
ROUNDS = 5  # before the death
LAYERS = 6  # exchanges of a step
START_S = 60.0
VICTIM = 1


@dataclass(frozen=True)
class Death:
    """What came of one.

    Attributes:
        place: Where the others were when it came.
        limit_s: ``timeout_s`` of the communicator.
        seconds: From the kill to the error of each rank that was left; the limit of this tool for a
            rank that raised none.
        told: What each of them was told.
    """

    place: Place
    limit_s: float
    seconds: list[float]
    told: list[str]

    @property
    def is_in_time(self) -> bool:
        """Whether every rank raised an error of this package in time."""
        return all(self.told) and max(self.seconds) <= self.limit_s + GRACE_S


@dataclass(frozen=True)
class _Raised:
    at: float  # CLOCK_MONOTONIC, which the processes of a machine share
    text: str


def places_of(launch: Launch) -> list[Place]:
    """All; without GPUs there are no graphs."""
    return [place for place in get_args(Place) if place != "graph" or launch.device_type == "cuda"]


def live(
    launch: Launch, rank: int, port: int, place: Place, limit_s: float, line: Connection
) -> None:
    """One rank: the victim says when it dies, the others when they raise."""
    torch.set_num_threads(1)
    device = launch.device(rank)
    if launch.shares_devices:
        os.environ[SHARED_DEVICES] = "1"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    make_group(dist.TCPStore(HOST, port, is_master=False), place, rank, launch.world_size)
    comm = UlyssesCommunicator(
        device=device,
        transport="ce" if device.type == "cuda" else "gloo",
        timeout_s=GROUP_LIMIT_S,
        allow_shared_devices=launch.shares_devices,
    )
    x = torch.ones(1, 64, 4 * launch.world_size, 64, device=device)

    def step(x: Tensor) -> Tensor:
        for _ in range(LAYERS):
            x = x + scatter(x, comm)[:, : x.shape[1], :1]
        return x

    step(x)
    graph = capture_step(comm, step, [x]) if place == "graph" else None
    comm.synchronize()
    dist.barrier()
    comm.set_timeout(limit_s)
    for number in range(1000):
        if rank == VICTIM and number == ROUNDS:
            line.send(time.monotonic())
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            if place == "meeting":
                spec = WindowSpec(f"{number}", "scatter", (1, 64, 4, 64), torch.float32)
                reserve(comm, [spec])
            elif graph is not None:
                graph.replay(x)
            else:
                step(x)
            comm.synchronize()
        except UlyssesError as error:
            line.send(_Raised(time.monotonic(), describe(error)))
            break
    comm.close()


def die_once(launch: Launch, place: Place, limit_s: float) -> Death:
    """Start the ranks, let one die, and hear of the others."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([live.__module__])
    store = local_store()
    lines, processes = [], []
    for rank in range(launch.world_size):
        ours, theirs = context.Pipe()
        arguments = (launch, rank, store.port, place, limit_s, theirs)
        process = context.Process(target=live, args=arguments, daemon=True)
        process.start()
        theirs.close()
        lines.append(ours)
        processes.append(process)
    died_at: object = None
    try:
        died_at = _hear(lines[VICTIM], START_S)
        until = time.monotonic() + limit_s + 10.0
        raised = [
            _hear(line, until - time.monotonic())
            for rank, line in enumerate(lines)
            if rank != VICTIM
        ]
    finally:
        for process in processes:
            process.join(15.0 if died_at else 0.0)
            process.kill()
            process.join(10.0)
    if not isinstance(died_at, float):
        message = f"peer_death: rank {VICTIM} did not come to its death within {START_S:g} s"
        raise UlyssesError(message)
    seconds = [
        round(one.at - died_at, 3) if isinstance(one, _Raised) else limit_s + 10.0 for one in raised
    ]
    told = [one.text if isinstance(one, _Raised) else "" for one in raised]
    return Death(place, limit_s, seconds, told)


def _hear(line: Connection, limit_s: float) -> object:
    """What a rank says, or ``None``."""
    if not wait([line], timeout=max(limit_s, 0.0)):
        return None
    try:
        return line.recv()
    except (EOFError, OSError):
        return None


def all_in_time(deaths: Sequence[Death]) -> bool:
    """Whether all were told of in time."""
    return all(death.is_in_time for death in deaths)


def main(
    cpu: Annotated[bool, typer.Option("--cpu", help="CPU ranks, even where GPUs are.")] = False,
    limit: Annotated[float, typer.Option(min=0.5, help="timeout_s of the communicators.")] = 2.0,
    trials: Annotated[int, typer.Option(min=1, help="Deaths at each place.")] = 3,
    out: Annotated[Path, typer.Option(help="Folder of results.")] = Path("docs/results"),
    commit: Annotated[str | None, typer.Option(help="Commit, where git cannot tell.")] = None,
) -> None:
    """Kill, and write peer_death.json."""
    num_devices = 0 if cpu else min(torch.cuda.device_count(), 2)
    refuse_folder(out)
    launch = Launch(2, "cuda" if num_devices == 2 else "cpu", num_devices)
    deaths = []
    for place in places_of(launch):
        for _ in range(trials):
            deaths.append(die_once(launch, place, limit))
            typer.echo(deaths[-1])
    machine = read_machine(launch.device(0), num_devices if launch.device_type == "cuda" else 0)
    content = {
        "world_size": launch.world_size,
        "transport": "ce" if launch.device_type == "cuda" else "gloo",
        "deaths": [{**asdict(death), "is_in_time": death.is_in_time} for death in deaths],
    }
    typer.echo(f"written: {write_results(out, 'peer_death', machine, commit, content)}")
    if not all_in_time(deaths):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
