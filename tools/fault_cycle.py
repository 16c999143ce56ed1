"""What one rank does in a cell of the fault matrix: a clean cycle, a struck one, and a fresh start.

A cycle goes through the life of a communicator: construction, reserve, exchange, capture, replay,
teardown. Every result that a rank hands out, which is after ``comm.synchronize()``, is compared
with what it must be. After the struck cycle the ranks that are left make a new process group and
communicator and exchange once more; files, threads and GPU memory must be as before.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from ulysses_ops.communicator import UlyssesCommunicator
from ulysses_ops.errors import UlyssesError
from ulysses_ops.exchange import Exchange
from ulysses_ops.graphs import GraphCache
from ulysses_ops.ops import scatter
from ulysses_ops.tools.attempts import describe
from ulysses_ops.tools.faults import DroppedError, Fault, Injector, Moment, is_injected
from ulysses_ops.tools.held import read_held
from ulysses_ops.tools.launch import HOST, SHARED_DEVICES, Launch
from ulysses_ops.window_spec import WindowSpec
from ulysses_ops.windows import reserve

STEPS = ("construction", "reserve", "exchange", "capture", "replay", "teardown")
# PyTorch does not close what it exported when a rendezvous of its symmetric memory fails.
HANDLES_KEPT = Counter({"/dev/nvidiactl": 2})
GROUP_LIMIT_S = 30.0  # of what nothing strikes: on a busy machine a rank may be kept waiting

Ending = Literal["right", "refused", "injected", "unnamed", "wrong", "dropped"]


class WrongDataError(Exception):
    """A rank handed out what was not sent to it."""


@dataclass(frozen=True)
class Setting:
    """What all cells share.

    Attributes:
        launch: The ranks.
        limit_s: ``timeout_s`` of the communicators, in seconds.
        victim: The rank that a fault strikes.
        parallel: Cells at a time. GPU memory is judged where a cell has the GPUs to itself alone.
    """

    launch: Launch
    limit_s: float
    victim: int = 1
    parallel: int = 1


@dataclass(frozen=True)
class Told:
    """How the struck cycle of one rank ended.

    Attributes:
        ending: ``right``: all steps done, all data right. ``refused``: an error of this package.
            ``injected``: the fault itself was raised. ``unnamed``: another error. ``wrong``: wrong
            data were handed out. ``dropped``: what it did was lost.
        step: The step in which it ended.
        text: What was raised, in one line.
        seconds: How long the cycle took.
        moments: The moments that the rank came to.
        struck: Whether the fault struck here.
    """

    ending: Ending
    step: str
    text: str
    seconds: float
    moments: list[Moment] = field(default_factory=list)
    struck: bool = False


@dataclass(frozen=True)
class Restarted:
    """How the fresh start of one rank went; both are empty when it went well."""

    failure: str
    leaks: list[str]


class Cycle:
    """The steps of one life of a communicator on one rank."""

    def __init__(
        self, setting: Setting, device: torch.device, name: str, limit_s: float = GROUP_LIMIT_S
    ) -> None:
        """Nothing is constructed yet."""
        self._setting = setting
        self._limit_s = limit_s
        self.device = device
        self._name = name
        self._comm: UlyssesCommunicator | None = None

    def run(self, enter: Callable[[str], None]) -> None:
        """Go through all steps; ``enter`` is called with the name of each.

        Raises:
            WrongDataError: a result is wrong.
        """
        world_size = dist.get_world_size()
        rank = dist.get_rank()
        shape = (1, 6 * world_size, 2 * world_size, 64)
        sources = [self._filled(rank, number, (1, 6, shape[2], 64)) for number in range(3)]
        enter("construction")
        comm = self._comm = UlyssesCommunicator(
            device=self.device,
            transport="gloo" if self.device.type == "cpu" else "ce",
            name=self._name,
            timeout_s=self._limit_s,
            allow_shared_devices=self._setting.launch.shares_devices,
        )
        enter("reserve")
        (window,) = reserve(comm, [WindowSpec("cycle", "scatter", shape, torch.float32)])
        enter("exchange")
        with Exchange(comm) as exchange:
            exchange.send(sources[0], window)
        self._check(comm, window.tensor, 0)
        cache = GraphCache(comm, lambda x: scatter(x, comm) + 1, copy_out=False)
        for number, step in ((1, "capture"), (2, "replay")):
            enter(step)
            self._check(comm, cache(sources[number]) - 1, number)
        enter("teardown")
        cache.clear()
        self.close()

    def close(self) -> None:
        """Close what was constructed."""
        if self._comm is not None:
            self._comm.close()
            self._comm = None

    def _filled(self, rank: int, number: int, shape: tuple[int, ...]) -> Tensor:
        return torch.full(shape, 1000.0 * rank + number, device=self.device)

    def _check(self, comm: UlyssesCommunicator, received: Tensor, number: int) -> None:
        comm.synchronize()
        for rank, part in enumerate(received.split(6, dim=1)):
            if not torch.equal(part, self._filled(rank, number, tuple(part.shape))):
                message = f"the part of rank {rank} in round {number} holds {part.unique()[:4]}"
                raise WrongDataError(message)


def run_rank(setting: Setting, fault: Fault | None, rank: int, port: int, line: Connection) -> None:
    """One rank of a cell; tells its parent by ``line``: Told, then, when told who is left, more."""
    torch.set_num_threads(1)
    device = setting.launch.device(rank)
    if setting.launch.shares_devices:
        os.environ[SHARED_DEVICES] = "1"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = dist.TCPStore(HOST, port, is_master=False)
    make_group(store, "clean", rank, setting.launch.world_size)
    Cycle(setting, device, "clean").run(lambda step: None)
    dist.barrier()
    before = read_held(device, others_too=setting.parallel > 1)
    mine = fault if rank == setting.victim else None
    line.send(_struck(setting, mine, device, line))
    left: list[int] = line.recv()
    dist.destroy_process_group()
    failure = ""
    try:
        make_group(store, "fresh", left.index(rank), len(left))
        fresh = Cycle(setting, device, "fresh")
        fresh.run(lambda step: None) if len(left) > 1 else _alone(fresh)
    except Exception as error:  # noqa: BLE001  whatever it was, the parent judges it
        failure = describe(error)
    after = read_held(device, others_too=setting.parallel > 1)
    excused = HANDLES_KEPT if fault is not None and fault.breaks_mapping else None
    line.send(Restarted(failure, after.leaks(before, excused)))
    dist.destroy_process_group()


def _struck(setting: Setting, fault: Fault | None, device: torch.device, line: Connection) -> Told:
    begin = time.monotonic()
    at = [""]
    cycle = Cycle(setting, device, "struck", setting.limit_s)
    ending: Ending = "right"
    text = ""
    with Injector(fault, setting.limit_s, lambda: line.send("stopping")) as injector:

        def enter(step: str) -> None:
            at.append(step)
            injector.enter(step)

        try:
            cycle.run(enter)
        except DroppedError:
            ending = "dropped"
        except WrongDataError as error:
            ending, text = "wrong", str(error)
        except Exception as error:  # noqa: BLE001  the parent judges it
            ending, text = _ending(error), describe(error)
        took_s = time.monotonic() - begin
        struck = injector.struck
        injector.disarm()
        cycle.close()
    return Told(ending, at[-1], text, took_s, injector.moments, struck)


def _ending(error: Exception) -> Ending:
    if isinstance(error, (UlyssesError, ValueError)):
        return "refused"
    return "injected" if is_injected(error) else "unnamed"


def _alone(cycle: Cycle) -> None:
    """One rank that is left has no peers; it makes a communicator of its own and closes it."""
    with UlyssesCommunicator(device=cycle.device, name="alone") as comm:
        comm.synchronize()
    cycle.close()


def make_group(store: dist.Store, name: str, rank: int, world_size: int) -> None:
    """A default group over gloo, whose keys in the store begin with ``name``."""
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(name, store),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=GROUP_LIMIT_S),
    )
