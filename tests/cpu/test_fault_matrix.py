"""Faults by steps on gloo ranks: nothing hangs, leaks or gives wrong data; and the judge sees."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ulysses_ops import UlyssesCommunicator, all_to_all, collective
from ulysses_ops.tools import fault_cell
from ulysses_ops.tools.fault_cell import Cell, find_moments, run_cell
from ulysses_ops.tools.fault_cycle import STEPS, Setting, run_rank
from ulysses_ops.tools.fault_matrix import chosen_faults, run_matrix
from ulysses_ops.tools.faults import FAULTS, Fault, Injector, Moment, possible_faults
from ulysses_ops.tools.launch import Launch

pytestmark = pytest.mark.long

LIMIT_S = 3.0  # of the communicators; a machine that is busy must not be taken for a late peer
SETTING = Setting(Launch(2, "cpu"), LIMIT_S, parallel=6)
EXCHANGE = Moment("exchange", "exchange", "bytes", 1)
LATE = Fault("late", EXCHANGE)
# What every rank that is left must come to, where only one outcome is right.
EXPECTED = {
    "late": {"right"},
    "stopped": {"right"},
    "failed allocation": {"refused"},
    "failed rendezvous": {"refused"},
}


@pytest.fixture(scope="module")
def moments() -> list[Moment]:
    return find_moments(SETTING)


@pytest.fixture(scope="module")
def cells(moments: list[Moment]) -> dict[str, list[Cell]]:
    """One moment of each step for each fault, several cells at a time: they wait, mostly."""
    faults = chosen_faults(possible_faults(moments), one_moment=True)
    by_fault: dict[str, list[Cell]] = {}
    for cell in run_matrix(SETTING, faults):
        by_fault.setdefault(cell.fault, []).append(cell)
    return by_fault


def test_every_step_has_moments(moments: list[Moment]) -> None:
    assert [moment.step for moment in moments if moment.kind == "entry"] == list(STEPS)
    assert len(moments) == len(set(moments))
    for step in STEPS[:-1]:
        assert {moment.kind for moment in moments if moment.step == step} >= {"entry", "allocation"}
    met = {moment.step for moment in moments if moment.kind == "meeting"}
    assert met == {"construction", "reserve", "capture"}


@pytest.mark.parametrize("fault", FAULTS)
def test_no_fault_hangs_leaks_or_gives_wrong_data(cells: dict[str, list[Cell]], fault: str) -> None:
    assert {cell.step for cell in cells[fault]} >= {"construction"}
    for cell in cells[fault]:
        assert cell.is_good, f"{cell}\n{cell.told}"
        assert cell.seconds < 3 * LIMIT_S + 5
        assert cell.outcome in EXPECTED.get(fault, {cell.outcome}), f"{cell}\n{cell.told}"


def test_the_error_of_a_survivor_says_what_and_how_to_go_on(cells: dict[str, list[Cell]]) -> None:
    for cell in cells["killed"]:
        if cell.step != "teardown":
            survivor, victim = cell.told
            assert victim == "rank 1: ended with -9"
            assert "Error: " in survivor
            assert "every rank" in survivor or "lost the store" in survivor


def test_ranks_that_meet_over_a_failed_allocation_say_the_same(
    cells: dict[str, list[Cell]],
) -> None:
    for cell in cells["failed allocation"]:
        if cell.step in ("construction", "reserve"):
            first, second = (told.partition("; ")[2] for told in cell.told)
            assert first == second
            assert "rank 1: OutOfMemoryError: injected: out of memory" in first


# ---- controls: what the judge must see -----------------------------------------------------------


Broken = Callable[[Injector, str], None]


def in_struck_cycle(
    broken: Broken, setting: Setting, fault: Fault | None, rank: int, port: int, line: Connection
) -> None:
    """A rank whose struck cycle is broken as each of its steps begins."""
    enter = Injector.enter

    def entered(injector: Injector, step: str) -> None:
        enter(injector, step)
        broken(injector, step)

    with mock.patch.object(Injector, "enter", entered):
        run_rank(setting, fault, rank, port, line)


def corrupting(
    setting: Setting, fault: Fault | None, rank: int, port: int, line: Connection
) -> None:
    def broken(injector: Injector, step: str) -> None:
        trade = all_to_all.all_to_all

        def lost(comm: UlyssesCommunicator, received: Tensor, *more: Any) -> None:
            trade(comm, received, *more)
            received[:4] = 0

        if step == "exchange" and rank == 0:
            mock.patch.object(collective, "all_to_all", lost).start()

    in_struck_cycle(broken, setting, fault, rank, port, line)


def leaking(setting: Setting, fault: Fault | None, rank: int, port: int, line: Connection) -> None:
    def broken(injector: Injector, step: str) -> None:
        if step == "reserve":
            os.open(os.devnull, os.O_RDONLY)

    in_struck_cycle(broken, setting, fault, rank, port, line)


def nameless(setting: Setting, fault: Fault | None, rank: int, port: int, line: Connection) -> None:
    def broken(injector: Injector, step: str) -> None:
        if step == "reserve":
            raise KeyError(step)

    in_struck_cycle(broken, setting, fault, rank, port, line)


def dying(setting: Setting, fault: Fault | None, rank: int, port: int, line: Connection) -> None:
    def broken(injector: Injector, step: str) -> None:
        if step == "reserve" and rank == 0:
            os._exit(3)

    in_struck_cycle(broken, setting, fault, rank, port, line)


def asleep(setting: Setting, fault: Fault | None, rank: int, port: int, line: Connection) -> None:
    def broken(injector: Injector, step: str) -> None:
        if step == "teardown" and rank == 0:
            time.sleep(600)

    in_struck_cycle(broken, setting, fault, rank, port, line)


def as_patient_as_its_group(
    setting: Setting, fault: Fault | None, rank: int, port: int, line: Connection
) -> None:
    """The collective of torch.distributed, which knows no limit but that of its group."""

    def patient(
        comm: UlyssesCommunicator, received: Tensor, sent: Tensor, to: list[int], of: list[int]
    ) -> None:
        dist.all_to_all_single(received, sent, to, of, group=comm.group)

    for module in (all_to_all, collective):
        mock.patch.object(module, "all_to_all", patient).start()
    run_rank(setting, fault, rank, port, line)


@pytest.mark.parametrize(
    ("work", "outcome"),
    [
        (run_rank, "right"),
        (corrupting, "wrong data"),
        (leaking, "leak"),
        (nameless, "error without a name"),
        (dying, "died"),
    ],
)
def test_control_what_is_broken_is_seen(work: fault_cell.Work, outcome: str) -> None:
    cell = run_cell(SETTING, LATE, work=work)
    assert cell.outcome == outcome, cell.told


def test_control_a_rank_that_never_ends_is_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fault_cell, "START_S", 4.0)
    monkeypatch.setattr(fault_cell, "SETTLE_S", 0.0)
    cell = run_cell(Setting(Launch(2, "cpu"), 1.0), LATE, work=asleep)
    assert cell.outcome == "hang", cell.told


def test_control_without_a_limit_of_its_own_an_exchange_waits_for_its_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fault_cell, "START_S", 4.0)
    monkeypatch.setattr(fault_cell, "SETTLE_S", 0.0)
    setting = Setting(Launch(2, "cpu"), 1.0)
    dropped = Fault("dropped write", Moment("exchange", "exchange", "complete", 0))
    assert run_cell(setting, dropped, work=as_patient_as_its_group).outcome == "hang"
    monkeypatch.undo()
    assert run_cell(setting, dropped).outcome == "refused"


def test_a_moment_that_does_not_come_is_said() -> None:
    never = Fault("late", Moment("reserve", "exchange", "bytes", 7))
    assert run_cell(SETTING, never).outcome == "did not strike"


def test_an_injector_strikes_once_and_only_while_its_seams_are_in_place() -> None:
    empty = torch.empty
    fault = Fault("failed allocation", Moment("exchange", "allocation", "torch.empty", 1))
    with Injector(fault, 1.0) as injector:
        injector.enter("exchange")
        torch.empty(1)
        with pytest.raises(torch.OutOfMemoryError, match="injected"):
            torch.empty(1)
        torch.empty(1)
    assert injector.struck
    assert torch.empty is empty
    assert [moment.ordinal for moment in injector.moments] == [0, 0, 1, 2]


def test_no_cell_begins_behind_the_time_limit() -> None:
    one_by_one = replace(SETTING, parallel=1)  # and one takes longer than the limit
    other = Fault("stopped", EXCHANGE)
    assert run_matrix(one_by_one, [LATE, other], time_limit_s=0.0) == []
    begun: list[str] = []
    cells = run_matrix(
        one_by_one, [LATE, other], time_limit_s=0.2, on_cell=lambda cell: begun.append(cell.fault)
    )
    assert [cell.outcome for cell in cells] == ["right"]
    assert begun == ["late"]
