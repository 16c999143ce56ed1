"""Starts one process a rank, watches all of them, and ends every one within a time limit."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Literal

import torch
import torch.distributed as dist

from ulysses_ops.agreement import Agreement, group_store
from ulysses_ops.errors import UlyssesError

POLL_S = 0.0005
PARTING_S = 20.0  # for a rank to leave after it handed in its result
HOST = "127.0.0.1"
SHARED_DEVICES = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"


class RankError(UlyssesError):
    """A rank raised, died or did not answer; every rank has been ended."""


@dataclass(frozen=True)
class Launch:
    """Ranks to start.

    Attributes:
        world_size: Number of ranks.
        device_type: Where they compute.
        num_devices: GPUs to spread them over, in turn; of no meaning on the CPU.
        limit_s: Wall time for everything, in seconds.
        stall_s: Longest time without a sign of life from any rank, in seconds.
    """

    world_size: int
    device_type: Literal["cpu", "cuda"]
    num_devices: int = 0
    limit_s: float = 540.0
    stall_s: float = 120.0

    @property
    def shares_devices(self) -> bool:
        """Whether several ranks use one GPU."""
        return self.device_type == "cuda" and self.world_size > self.num_devices

    @property
    def backend(self) -> str:
        """Backend of the process group; NCCL refuses to share a GPU."""
        if self.device_type == "cuda" and not self.shares_devices:
            return "cpu:gloo,cuda:nccl"
        return "gloo"

    def device(self, rank: int) -> torch.device:
        """Device of a rank."""
        if self.device_type == "cpu":
            return torch.device("cpu")
        return torch.device("cuda", rank % self.num_devices)


class RankContext:
    """What the work of one rank is given.

    Attributes:
        rank: This rank.
        world_size: Number of ranks.
        device: This rank's device.
        shares_devices: Whether several ranks use one GPU.
        deadline: When the ranks are ended, by ``time.monotonic``, which all processes share.
    """

    def __init__(self, launch: Launch, rank: int, deadline: float, connection: Connection) -> None:
        """Take a place in the default process group, which exists already."""
        self.rank = rank
        self.world_size = launch.world_size
        self.device = launch.device(rank)
        self.shares_devices = launch.shares_devices
        self.deadline = deadline
        self._limit_s = launch.stall_s
        self._connection = connection
        # Host-side meetings of their own, so that no CUDA work hides in them.
        self._control = dist.new_group(backend="gloo", timeout=timedelta(seconds=launch.stall_s))
        store = group_store(self._control)
        self._meetings = Agreement(store, "tools", rank, launch.world_size, launch.stall_s)

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, by rank: anything that JSON can hold. Collective."""
        records = self._meetings.exchange("gather", {"value": value})
        return [record["value"] for record in records]

    def agree(self, flag: bool) -> bool:
        """Whether the flag is set on every rank. Collective."""
        return all(self.gather(flag))

    def line_up(self, what: str) -> None:
        """Wait until this rank's device is idle, then until every rank is here. Collective."""
        self.finish(what)
        dist.barrier(group=self._control)

    def finish(self, what: str, event: torch.cuda.Event | None = None) -> None:
        """Wait, for a limited time, until the current stream has done what it holds now.

        Args:
            what: What is waited for, for the error.
            event: Wait for this event instead.

        Raises:
            RankError: it is not done in time, which is how a lost signal shows.
        """
        if self.device.type == "cpu":
            return
        if event is None:
            event = torch.cuda.Event()
            event.record()
        until = time.monotonic() + self._limit_s / 2
        while not event.query():
            if time.monotonic() > until:
                message = (
                    f"{what}: the GPU of rank {self.rank} did not finish within "
                    f"{self._limit_s / 2:g} s; is a peer missing from the exchange?"
                )
                raise RankError(message)
            time.sleep(POLL_S)

    def progress(self, text: str) -> None:
        """Say what is being done: a sign of life, shown for rank 0."""
        self._connection.send(("progress", text))

    def deliver(self, part: Any) -> None:
        """Hand in a part of the result, which survives what may go wrong later."""
        self._connection.send(("part", part))


Work = Callable[[RankContext, Any], Any]


def local_store() -> dist.TCPStore:
    """A store that this machine alone can reach: by itself it listens on every interface."""
    listener = socket.create_server((HOST, 0))
    port = listener.getsockname()[1]
    return dist.TCPStore(
        HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def run_ranks(
    work: Work,
    argument: Any,
    launch: Launch,
    *,
    on_progress: Callable[[str], None] = lambda text: None,
    on_part: Callable[[Any], None] = lambda part: None,
) -> list[Any]:
    """Run ``work(context, argument)`` on every rank and return the values, by rank.

    Args:
        work: A function of an importable module.
        argument: Anything that can be pickled.
        launch: The ranks.
        on_progress: Called with what rank 0 says it is doing.
        on_part: Called with the parts that rank 0 delivers.

    Raises:
        RankError: a rank raised, died, or the time is up. No rank is left running.
    """
    deadline = time.monotonic() + launch.limit_s
    store = local_store()
    context = multiprocessing.get_context("spawn")
    ranks: list[BaseProcess] = []
    connections: list[Connection] = []
    try:
        for rank in range(launch.world_size):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank_main,
                args=(work, argument, launch, rank, store.port, deadline, sender),
                name=f"rank{rank}",
                daemon=True,
            )
            process.start()
            sender.close()
            ranks.append(process)
            connections.append(receiver)
        values = _collect(connections, launch, deadline, on_progress, on_part)
        _part(ranks)
    finally:
        _end(ranks)
    return values


def _collect(
    connections: Sequence[Connection],
    launch: Launch,
    deadline: float,
    on_progress: Callable[[str], None],
    on_part: Callable[[Any], None],
) -> list[Any]:
    last_sign = time.monotonic()
    doing: dict[int, str] = dict.fromkeys(range(launch.world_size), "starting")
    results: dict[int, Any] = {}
    waiting = {connection: rank for rank, connection in enumerate(connections)}
    while waiting:
        for connection in wait(list(waiting), timeout=0.25):
            assert isinstance(connection, Connection)
            rank = waiting[connection]
            last_sign = time.monotonic()
            kind, value = _receive(connection)
            if kind == "progress":
                doing[rank] = value
                if rank == 0:
                    on_progress(value)
            elif kind == "part":
                if rank == 0:
                    on_part(value)
            elif kind == "result":
                results[rank] = value
                del waiting[connection]
            else:
                message = f"rank {rank} of {launch.world_size}, at '{doing[rank]}', {value}"
                raise RankError(message)
        now = time.monotonic()
        if waiting and (now > deadline or now - last_sign > launch.stall_s):
            late = ", ".join(f"{rank} (at '{doing[rank]}')" for rank in sorted(waiting.values()))
            message = (
                f"ranks {late} of {launch.world_size} were ended after "
                f"{now - deadline + launch.limit_s:.0f} s of {launch.limit_s:g} s, "
                f"{now - last_sign:.0f} s without a sign of life"
            )
            raise RankError(message)
    return [results[rank] for rank in range(launch.world_size)]


def _receive(connection: Connection) -> tuple[str, Any]:
    try:
        kind, value = connection.recv()
    except EOFError:
        return "gone", "died without a word"
    return str(kind), value


def _part(ranks: Sequence[BaseProcess]) -> None:
    until = time.monotonic() + PARTING_S
    for process in ranks:
        process.join(max(until - time.monotonic(), 0.0))


def _end(ranks: Sequence[BaseProcess]) -> None:
    for process in ranks:
        if process.is_alive():
            process.kill()
    for process in ranks:
        process.join(5.0)


def _rank_main(
    work: Work,
    argument: Any,
    launch: Launch,
    rank: int,
    port: int,
    deadline: float,
    connection: Connection,
) -> None:
    try:
        _join(launch, rank, port)
        context = RankContext(launch, rank, deadline, connection)
        connection.send(("result", work(context, argument)))
    except BaseException:  # noqa: BLE001  the parent raises it
        with contextlib.suppress(OSError):
            connection.send(("error", f"failed:\n{traceback.format_exc()}"))
        # Leaving in an orderly way would wait for peers, or for a device that waits for them.
        os._exit(1)
    dist.destroy_process_group()


def _join(launch: Launch, rank: int, port: int) -> None:
    if launch.shares_devices:
        os.environ[SHARED_DEVICES] = "1"
    if launch.device_type == "cuda":
        torch.cuda.set_device(launch.device(rank))
    else:
        torch.set_num_threads(1)
    limit = timedelta(seconds=launch.stall_s)
    store = dist.TCPStore(HOST, port, is_master=False, timeout=limit)
    dist.init_process_group(
        launch.backend, store=store, rank=rank, world_size=launch.world_size, timeout=limit
    )
