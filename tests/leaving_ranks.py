"""Ranks that leave in every way there is, each a whole interpreter that ends as interpreters do.

A process that has imported torch forks each rank, which saves seconds a rank; what a rank returns
from is the end of the program, so that finalisers and exit handlers run. Prints what came of each
case as JSON: exit status, seconds, and what was written to standard error, by rank.

    python tests/leaving_ranks.py         # over gloo
    python tests/leaving_ranks.py cuda    # over copy engines, a GPU a rank
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

from ulysses_ops import Exchange, UlyssesCommunicator, Window, WindowSpec, reserve, scatter
from ulysses_ops.graphs import GraphCache

WORLD_SIZE = 2
LIMIT_S = 4.0
HARD_LIMIT_S = 30.0
BUSY_S = 1.0  # until a signal comes


class Life:
    """Everything that a rank may hold when it leaves."""

    def __init__(self, rank: int, device: torch.device) -> None:
        self.rank = rank
        self._device = device
        transport = "ce" if device.type == "cuda" else "gloo"
        comm = UlyssesCommunicator(device=device, transport=transport, timeout_s=LIMIT_S)
        self.comm: UlyssesCommunicator | None = comm
        (window,) = reserve(comm, [WindowSpec("w", "scatter", (1, 8, 4, 2), torch.float32)])
        self.window: Window | None = window
        self.cache: GraphCache | None = GraphCache(comm, lambda x: scatter(x, comm))
        for _ in range(2):
            self.cache(self.shard())
        with Exchange(comm) as exchange:
            exchange.send(self.shard(), window)
        comm.synchronize()

    def shard(self) -> torch.Tensor:
        """What this rank sends."""
        return torch.ones(1, 4, 4, 2, device=self._device)

    def wait_for_peer(self) -> None:
        """An exchange that the peer does not come to."""
        assert self.comm is not None
        scatter(self.shard(), self.comm)
        self.comm.synchronize()

    def meet_peer(self) -> None:
        """A meeting that the peer does not come to."""
        assert self.comm is not None
        reserve(self.comm, [WindowSpec("new", "scatter", (1, 8, 4, 2), torch.float32)])


Steps = dict[str, Callable[[Life], None]]


def close(life: Life) -> None:
    assert life.comm is not None
    life.comm.close()


def clear(life: Life) -> None:
    assert life.cache is not None
    life.cache.clear()


def destroy(life: Life) -> None:
    dist.destroy_process_group()


def drop(life: Life) -> None:
    life.comm = life.cache = life.window = None
    gc.collect()


STEPS: Steps = {"close": close, "clear": clear, "destroy": destroy}
ORDERS = list(itertools.permutations(STEPS))


def in_order(life: Life, orders: tuple[tuple[str, ...], ...]) -> None:
    """Each rank in an order of its own."""
    for name in orders[life.rank]:
        STEPS[name](life)


def drop_first(life: Life) -> None:
    drop(life)
    destroy(life)


def group_first(life: Life) -> None:
    destroy(life)
    drop(life)


def leave_everything(life: Life) -> None:
    """Not a word at the end."""


def raise_in_exchange(life: Life) -> None:
    assert life.comm is not None
    assert life.window is not None
    with life.comm, Exchange(life.comm) as exchange:
        exchange.send(life.shard(), life.window)
        message = "of the caller"
        raise KeyError(message)


def leave_by_exit(life: Life) -> None:
    sys.exit(3)


def one_raises(life: Life) -> None:
    """Rank 1 leaves by an exception; rank 0 waits for it in vain and says so."""
    if life.rank == 1:
        message = "of the caller"
        raise KeyError(message)
    life.wait_for_peer()


def one_is_killed(life: Life) -> None:
    if life.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    life.wait_for_peer()


def one_is_killed_before_a_meeting(life: Life) -> None:
    if life.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    life.meet_peer()


def signalled(life: Life) -> None:
    """Both are in an exchange, or idle, when the signal comes."""
    time.sleep(60)


def signalled_in_exchange(life: Life) -> None:
    if life.rank == 0:
        assert life.comm is not None
        life.comm.set_timeout(60.0)
        life.wait_for_peer()
    time.sleep(60)


def signalled_in_meeting(life: Life) -> None:
    if life.rank == 0:
        assert life.comm is not None
        life.comm.set_timeout(60.0)
        life.meet_peer()
    time.sleep(60)


def terminated_in_order(life: Life) -> None:
    """A program that turns SIGTERM into an exit of its own, as servers do."""

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, leave)
    assert life.comm is not None
    with life.comm:
        time.sleep(60)


CASES: dict[str, tuple[Callable[[Life], None], signal.Signals | None]] = {
    **{
        f"{' '.join(one)} beside {' '.join(other)}": (partial(in_order, orders=(one, other)), None)
        for one, other in zip(ORDERS[:3], ORDERS[3:], strict=True)
    },
    "drop first": (drop_first, None),
    "group first": (group_first, None),
    "leave everything": (leave_everything, None),
    "raise in exchange": (raise_in_exchange, None),
    "leave by exit": (leave_by_exit, None),
    "one raises": (one_raises, None),
    "one is killed": (one_is_killed, None),
    "one is killed before a meeting": (one_is_killed_before_a_meeting, None),
    "SIGTERM": (signalled, signal.SIGTERM),
    "SIGTERM with a handler": (terminated_in_order, signal.SIGTERM),
    "SIGINT": (signalled, signal.SIGINT),
    "SIGINT in an exchange": (signalled_in_exchange, signal.SIGINT),
    "SIGINT in a meeting": (signalled_in_meeting, signal.SIGINT),
}


def live(case: str, rank: int, folder: Path, device_type: str) -> None:
    """One rank, from its first breath to the end of the program."""
    descriptor = os.open(folder / f"stderr-{rank}", os.O_CREAT | os.O_WRONLY, 0o600)
    os.dup2(descriptor, 2)
    warnings.simplefilter("always")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    device = torch.device("cpu") if device_type == "cpu" else torch.device(device_type, rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=WORLD_SIZE,
        timeout=timedelta(seconds=60),
    )
    life = Life(rank, device)
    (folder / f"alive-{rank}").touch()
    CASES[case][0](life)


def watch(case: str, pids: list[int], folder: Path) -> list[dict[str, object]]:
    """Send the signal of the case once all are alive; wait for the ranks, within a limit."""
    begin = time.monotonic()
    ended: dict[int, tuple[int, float]] = {}
    number = CASES[case][1]
    sent_at = begin
    while len(ended) < len(pids) and time.monotonic() < begin + HARD_LIMIT_S:
        alive = all((folder / f"alive-{rank}").exists() for rank in range(len(pids)))
        if number is not None and alive:
            time.sleep(BUSY_S)
            sent_at = time.monotonic()
            for pid in pids:
                os.kill(pid, number)
            number = None
        for rank, pid in enumerate(pids):
            if rank not in ended:
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    seconds = time.monotonic() - sent_at
                    ended[rank] = (os.waitstatus_to_exitcode(status), seconds)
        time.sleep(0.02)
    for rank, pid in enumerate(pids):
        if rank not in ended:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return [
        {
            "exit": ended[rank][0] if rank in ended else None,
            "seconds": round(ended[rank][1], 2) if rank in ended else None,
            "stderr": (folder / f"stderr-{rank}").read_text(errors="replace"),
        }
        for rank in range(len(pids))
    ]


def main() -> None:
    """Every case, one after the other."""
    device_type = sys.argv[1] if len(sys.argv) > 1 else "cpu"
    found = {}
    for case in CASES:
        folder = Path(tempfile.mkdtemp())  # no context: a rank that leaves would end it
        pids = []
        for rank in range(WORLD_SIZE):
            pid = os.fork()
            if pid == 0:
                live(case, rank, folder, device_type)
                return  # the interpreter of this rank ends here
            pids.append(pid)
        found[case] = watch(case, pids, folder)
        shutil.rmtree(folder)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
