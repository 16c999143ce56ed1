"""One cell of the fault matrix: starts its ranks, continues or buries one, and judges the rest."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TypeVar

from ulysses_ops.errors import UlyssesError
from ulysses_ops.tools.fault_cycle import GROUP_LIMIT_S, Restarted, Setting, Told, run_rank
from ulysses_ops.tools.faults import SHORTER, Fault, Moment
from ulysses_ops.tools.launch import local_store

T = TypeVar("T")

STOP_S = 5.0
START_S = 60.0
SETTLE_S = 30.0  # closing may take 10 s twice over; a wait and the clean cycles come on top
Work = Callable[[Setting, "Fault | None", int, int, Connection], None]
GOOD = ("right", "refused", "right or refused")


@dataclass(frozen=True)
class Cell:
    """What came of a fault.

    Attributes:
        fault: Its name.
        step: Where it struck.
        moment: When, within the step.
        outcome: ``right``: every rank that was left went on to the end with right data.
            ``refused``: every one raised an error that says why. ``right or refused``: some this,
            some that. Anything else is a failure of this package.
        seconds: Time of the slowest rank that was left, from the start of its cycle to its end or
            its error.
        told: What each rank said.
    """

    fault: str
    step: str
    moment: str
    outcome: str
    seconds: float
    told: list[str] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        """Whether the outcome is one of those that are allowed."""
        return self.outcome in GOOD

    def __str__(self) -> str:
        """One line."""
        return f"{self.fault} | {self.step} | {self.moment} | {self.outcome} | {self.seconds:.1f} s"


def find_moments(setting: Setting) -> list[Moment]:
    """The moments that the victim comes to when nothing strikes.

    Raises:
        UlyssesError: even then something went wrong.
    """
    with _Ranks(setting, None) as ranks:
        cell, told = ranks.play()
    victim = told.get(setting.victim)
    if cell.outcome != "right" or victim is None:
        message = f"fault matrix: with no fault at all the outcome is {cell.outcome}: {cell.told}"
        raise UlyssesError(message)
    return victim.moments


def run_cell(setting: Setting, fault: Fault, *, work: Work = run_rank) -> Cell:
    """Strike once and judge.

    Args:
        setting: What all cells share.
        fault: What is to happen, and when.
        work: What a rank does; tests put something worse in its place.
    """
    with _Ranks(setting, fault, work) as ranks:
        return ranks.play()[0]


def _state(pid: int) -> str:
    """One letter: ``T`` is stopped."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    return ""


class _Ranks:
    """The processes of a cell; none is left when the context ends."""

    def __init__(self, setting: Setting, fault: Fault | None, work: Work = run_rank) -> None:
        self._work = work
        self._setting = setting
        self._fault = fault
        self._processes: list[BaseProcess] = []
        self._lines: list[Connection] = []
        self._timers: list[threading.Timer] = []

    def __enter__(self) -> _Ranks:
        # Forked from a process that has imported everything and done nothing: ranks start at once.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([run_rank.__module__])
        self._store = local_store()
        for rank in range(self._setting.launch.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=self._work,
                args=(self._setting, self._fault, rank, self._store.port, theirs),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._lines.append(ours)
        return self

    def __exit__(self, *error: object) -> None:
        for timer in self._timers:
            timer.cancel()
        for process in self._processes:
            if process.is_alive():
                process.kill()
            process.join(10.0)
        for line in self._lines:
            line.close()

    def play(self) -> tuple[Cell, dict[int, Told]]:
        """Through the struck cycle, the fresh start, and the end of the processes."""
        begin = time.monotonic()
        told: dict[int, Told] = {}
        self._listen(told, Told, START_S + 4 * self._setting.limit_s + SETTLE_S)
        hung = [rank for rank in self._left() if rank not in told]
        restarted: dict[int, Restarted] = {}
        if not hung:
            left = self._left()
            for rank in left:
                self._lines[rank].send(left)
            self._listen(restarted, Restarted, GROUP_LIMIT_S + SETTLE_S)
            for process in self._processes:
                process.join(SETTLE_S)
        seconds = max((entry.seconds for entry in told.values()), default=time.monotonic() - begin)
        name, step, moment = "none", "", ""
        if self._fault is not None:
            where = self._fault.moment
            name, step, moment = self._fault.name, where.step, str(where)
        outcome = self._judge(told, restarted)
        lines = [self._describe(rank, told, restarted) for rank in range(len(self._processes))]
        return Cell(name, step, moment, outcome, round(seconds, 2), lines), told

    def _left(self) -> list[int]:
        """Ranks whose line is open."""
        return [rank for rank, line in enumerate(self._lines) if not line.closed]

    def _listen(self, heard: dict[int, T], kind: type[T], limit_s: float) -> None:
        """Until every rank that lives has sent one of ``kind``, or the time is up."""
        until = time.monotonic() + limit_s
        while time.monotonic() < until:
            open_lines = {self._lines[rank]: rank for rank in self._left() if rank not in heard}
            if not open_lines:
                return
            for line in wait(list(open_lines), timeout=0.5):
                assert isinstance(line, Connection)
                rank = open_lines[line]
                try:
                    message = line.recv()
                except (EOFError, OSError):
                    line.close()
                    continue
                if isinstance(message, kind):
                    heard[rank] = message
                else:
                    self._continue_later(rank)

    def _continue_later(self, rank: int) -> None:
        """This rank stops itself now."""
        pid = self._processes[rank].pid
        assert pid is not None

        def go_on() -> None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

        until = time.monotonic() + STOP_S
        while _state(pid) != "T" and time.monotonic() < until:
            time.sleep(0.005)
        timer = threading.Timer(SHORTER * self._setting.limit_s, go_on)
        timer.start()
        self._timers.append(timer)

    def _judge(self, told: dict[int, Told], restarted: dict[int, Restarted]) -> str:
        killed = {self._setting.victim} if self._is_killing else set()
        expected = set(range(len(self._processes))) - killed
        exits = {rank: process.exitcode for rank, process in enumerate(self._processes)}
        left = [told[rank] for rank in sorted(expected) if rank in told]
        unheard = sorted(expected - set(told)) or sorted(expected - set(restarted))
        problems = (
            (any(exits[rank] is None for rank in expected), "hang"),
            (bool(unheard) or any(exits[rank] != 0 for rank in expected), "died"),
            (any(exits[rank] != -signal.SIGKILL for rank in killed), "not killed"),
            (any(entry.ending == "wrong" for entry in left), "wrong data"),
            (self._is_unnamed(told), "error without a name"),
            (any(entry.failure for entry in restarted.values()), "no fresh start"),
            (any(entry.leaks for entry in restarted.values()), "leak"),
            (self._has_missed(told), "did not strike"),
        )
        for applies, name in problems:
            if applies:
                return name
        endings = {entry.ending == "right" for entry in left if entry.ending != "dropped"}
        return {frozenset({True}): "right", frozenset({False}): "refused"}.get(
            frozenset(endings), "right or refused"
        )

    @property
    def _is_killing(self) -> bool:
        return self._fault is not None and self._fault.name == "killed"

    def _is_unnamed(self, told: dict[int, Told]) -> bool:
        return any(
            entry.ending == "unnamed"
            or (entry.ending == "injected" and rank != self._setting.victim)
            for rank, entry in told.items()
        )

    def _has_missed(self, told: dict[int, Told]) -> bool:
        victim = told.get(self._setting.victim)
        return self._fault is not None and victim is not None and not victim.struck

    def _describe(self, rank: int, told: dict[int, Told], restarted: dict[int, Restarted]) -> str:
        entry = told.get(rank)
        if entry is None:
            return f"rank {rank}: ended with {self._processes[rank].exitcode}"
        after: Sequence[str] = ()
        if rank in restarted:
            after = [*filter(None, [restarted[rank].failure]), *restarted[rank].leaks]
        said = f"rank {rank}: {entry.ending} at {entry.step}"
        exit_code = self._processes[rank].exitcode
        if exit_code != 0:
            after = [*after, f"ended with {exit_code}"]
        return "; ".join([said, *filter(None, [entry.text]), *after])
