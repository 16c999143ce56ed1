"""Processes that outlive a test, one a rank: they run functions of the test modules together.

::

    def task(rank: int, world_size: int, shape: list[int]) -> Tensor: ...

    pool = RankPool(2)
    by_rank = pool.run(task, [1, 4, 2, 8], timeout_s=10)

The ranks find each other through a file, so no port is needed. Starting them takes seconds, hence
they are kept. A failure or a time-out ends them all, since nobody knows in what state the process
group is; the next :meth:`RankPool.run` starts fresh ones.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")

START_TIMEOUT_S = 120.0
TASK_TIMEOUT_S = 60.0
GRACE_S = 3.0  # how long the others may still report once one rank has failed
STOP_TIMEOUT_S = 5.0


class RankError(AssertionError):
    """Some rank raised, died, or did not finish; the text has every rank's account."""


class _Reply(NamedTuple):
    """What a rank sends back: its value, or the account of its failure."""

    value: Any
    failure: str


class _Rank(NamedTuple):
    """One process as its parent sees it."""

    process: BaseProcess
    connection: Connection
    stacks: Path


class RankPool:
    """``world_size`` processes in one process group."""

    def __init__(
        self,
        world_size: int,
        *,
        backend: str = "gloo",
        env: Mapping[str, str] | None = None,
        devices: Sequence[int] | None = None,
    ) -> None:
        """Describe the ranks; the first :meth:`run` starts them.

        Args:
            world_size: Number of ranks.
            backend: For ``init_process_group``, for example ``"cpu:gloo,cuda:nccl"``.
            env: Variables for the children, there before they import torch.
            devices: Current CUDA device of each rank; none is touched when left out.
        """
        self.world_size = world_size
        self._backend = backend
        self._env = dict(env or {})
        self._devices = devices
        self._ranks: list[_Rank] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def run(self, task: Callable[..., T], *args: Any, timeout_s: float = TASK_TIMEOUT_S) -> list[T]:
        """Run ``task(rank, world_size, *args)`` on every rank and return the values by rank.

        Args:
            task: A function at the top of its module.
            args: The same for every rank; pickled.
            timeout_s: Limit for the slowest rank; starting the processes does not count.

        Raises:
            RankError: a rank raised, died, or ran past the limit.
        """
        __tracebackhide__ = True
        message = pickle.dumps((task, args))
        try:
            if not self._ranks:
                self._start()
                self._collect(START_TIMEOUT_S)
            for rank in self._ranks:
                with suppress(OSError):  # it is dead, which collecting reports
                    rank.connection.send_bytes(message)
            return self._collect(timeout_s)
        except BaseException:
            self._kill()
            raise

    def pids(self) -> list[int | None]:
        """Process ids by rank; empty when no process is running."""
        return [rank.process.pid for rank in self._ranks]

    def close(self) -> None:
        """End the ranks, politely at first. Idempotent."""
        for rank in self._ranks:
            with suppress(OSError):
                rank.connection.send_bytes(b"")
        deadline = time.monotonic() + STOP_TIMEOUT_S
        for rank in self._ranks:
            rank.process.join(max(0.0, deadline - time.monotonic()))
        self._kill()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        folder = Path(self._folder.name)
        with _environment(self._env):
            for rank in range(self.world_size):
                ours, theirs = context.Pipe()
                stacks = folder / f"stacks-{rank}"
                device = None if self._devices is None else self._devices[rank]
                process = context.Process(
                    target=_serve,
                    args=(rank, self.world_size, self._backend, device, folder, stacks, theirs),
                    name=f"rank {rank} of {self.world_size}",
                    daemon=True,
                )
                process.start()
                theirs.close()
                self._ranks.append(_Rank(process, ours, stacks))

    def _collect(self, timeout_s: float) -> list[Any]:
        """Wait for one reply of each rank."""
        __tracebackhide__ = True
        deadline = time.monotonic() + timeout_s
        replies: dict[int, _Reply] = {}
        place = {rank.connection: number for number, rank in enumerate(self._ranks)}
        while len(replies) < self.world_size and time.monotonic() < deadline:
            waiting = [peer for peer, number in place.items() if number not in replies]
            for ready in wait(waiting, max(0.0, deadline - time.monotonic())):
                assert isinstance(ready, Connection)
                number = place[ready]
                replies[number] = self._receive(number)
                if replies[number].failure:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        failed = any(reply.failure for reply in replies.values())
        if failed or len(replies) < self.world_size:
            raise RankError(self._account(replies, timeout_s))
        return [replies[number].value for number in range(self.world_size)]

    def _receive(self, number: int) -> _Reply:
        rank = self._ranks[number]
        try:
            reply: _Reply = pickle.loads(rank.connection.recv_bytes())
        except (EOFError, OSError):
            rank.process.join(STOP_TIMEOUT_S)
            return _Reply(None, f"died with exit code {rank.process.exitcode}")
        return reply

    def _account(self, replies: dict[int, _Reply], timeout_s: float) -> str:
        """One paragraph a rank."""
        silent = [number for number in range(self.world_size) if number not in replies]
        for number in silent:
            pid = self._ranks[number].process.pid
            if pid is not None:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGUSR1)  # writes its stacks, wherever it hangs
        if silent:
            time.sleep(0.3)
        lines = []
        for number, rank in enumerate(self._ranks):
            if number in replies:
                text = replies[number].failure or "finished"
            else:
                stacks = rank.stacks.read_text() if rank.stacks.exists() else ""
                text = f"did not finish (limit {timeout_s:g} s); it is at\n{stacks}"
            lines.append(f"rank {number}: {text}")
        return "\n".join(["", *lines])

    def _kill(self) -> None:
        for rank in self._ranks:
            rank.process.terminate()
        deadline = time.monotonic() + STOP_TIMEOUT_S
        for rank in self._ranks:
            rank.process.join(max(0.0, deadline - time.monotonic()))
            if rank.process.is_alive():
                rank.process.kill()
                rank.process.join()
            rank.connection.close()
        self._ranks = []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables for the processes started inside."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def on_gpus(world_size: int, env: Mapping[str, str] | None = None) -> RankPool:
    """Ranks with a GPU each, NCCL for CUDA and gloo for CPU tensors; too few GPUs are shared."""
    if torch.cuda.device_count() < world_size:
        return on_shared_gpus(world_size, env)
    return RankPool(
        world_size, backend="cpu:gloo,cuda:nccl", env=env, devices=list(range(world_size))
    )


def on_shared_gpus(world_size: int, env: Mapping[str, str] | None = None) -> RankPool:
    """More ranks than GPUs, over gloo, since NCCL refuses that: correct, never fast."""
    there = torch.cuda.device_count()
    return RankPool(
        world_size,
        env={"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1", **(env or {})},
        devices=[rank % there for rank in range(world_size)],
    )


def _serve(
    rank: int,
    world_size: int,
    backend: str,
    device: int | None,
    folder: Path,
    stacks: Path,
    connection: Connection,
) -> None:
    """Life of one rank: join the process group, then one task after another."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    with stacks.open("w") as file:
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)

        def join() -> None:
            torch.set_num_threads(1)
            if device is not None:
                torch.cuda.set_device(device)
            dist.init_process_group(
                backend,
                init_method=f"file://{folder}/rendezvous",
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=START_TIMEOUT_S),
            )

        _answer(connection, join)
        while True:
            try:
                message = connection.recv_bytes()
            except EOFError:
                return  # the parent is gone
            if not message:
                break
            if not _answer(connection, lambda: _perform(message, rank, world_size)):  # noqa: B023
                signal.pause()  # destroying the group now could block; the parent ends this process
        if dist.is_initialized():
            dist.destroy_process_group()


def _perform(message: bytes, rank: int, world_size: int) -> Any:
    task, args = pickle.loads(message)
    return task(rank, world_size, *args)


def _answer(connection: Connection, work: Callable[[], Any]) -> bool:
    """Send what ``work`` returns, or how it failed."""
    try:
        reply, is_good = pickle.dumps(_Reply(work(), "")), True
    except BaseException:  # noqa: BLE001 - the parent raises it
        reply, is_good = pickle.dumps(_Reply(None, f"raised\n{traceback.format_exc()}")), False
    connection.send_bytes(reply)
    return is_good
