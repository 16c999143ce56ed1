"""Figures of the same rounds, and time shared out."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import pytest

from ulysses_ops.tools import budget as budget_module
from ulysses_ops.tools.budget import Budget
from ulysses_ops.tools.launch import Launch, RankContext, run_ranks
from ulysses_ops.tools.paired import Paired, excess_us, hidden_percent, tax_percent
from ulysses_ops.tools.timing import LEAD_IN, MIN_COUNT, Effort, Summary, Variant, measure


def rounds(*values: float) -> Summary:
    return Summary(0.0, 0.0, values, len(values))


def test_a_tax_is_the_median_of_the_rounds_own_taxes() -> None:
    # Clocks halve in the last two rounds; every round on its own says 10 %, 20 %, 10 %, 30 %.
    compute = rounds(100.0, 100.0, 200.0, 200.0)
    tax = tax_percent(rounds(110.0, 120.0, 220.0, 260.0), compute)
    assert tax.median == pytest.approx(15.0)
    assert tax.quartiles == pytest.approx((10.0, 22.5))
    assert tax_percent(compute, compute) == Paired(0.0, (0.0, 0.0))


def test_one_round_is_its_own_quartiles() -> None:
    assert Paired.of_rounds([7.0]) == Paired(7.0, (7.0, 7.0))
    with pytest.raises(ValueError, match="no round was measured"):
        Paired.of_rounds([])


@pytest.mark.parametrize(
    ("serial", "concurrent", "expected"),
    [(150.0, 100.0, 100.0), (150.0, 150.0, 0.0), (150.0, 125.0, 50.0), (150.0, 160.0, -20.0)],
)
def test_hidden_is_what_the_exchange_no_longer_adds(
    serial: float, concurrent: float, expected: float
) -> None:
    hidden = hidden_percent(rounds(serial), rounds(concurrent), rounds(50.0))
    assert hidden.median == pytest.approx(expected)


def test_excess_is_paired_by_round() -> None:
    assert excess_us(rounds(250.0, 300.0, 245.0), rounds(200.0, 260.0, 190.0)).median == 50.0


@pytest.mark.parametrize("compare", [tax_percent, excess_us])
def test_figures_of_other_rounds_are_refused(compare: Any) -> None:
    with pytest.raises(ValueError, match="zip"):
        compare(rounds(1.0, 2.0), rounds(1.0))


# ---- time ----------------------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    stopped = Clock()
    monkeypatch.setattr(budget_module, "time", stopped)
    return stopped


def test_what_one_leaves_over_the_others_share(clock: Clock) -> None:
    shared = Budget(1100.0, {"a": 1.0, "b": 1.0, "c": 2.0})
    assert shared.allot("a") == 1025.0
    clock.now = 1010.0  # done early
    assert shared.allot("b") == pytest.approx(1010.0 + 90.0 / 3)
    clock.now = 1060.0  # took too long
    assert shared.allot("c") == 1100.0
    with pytest.raises(KeyError):
        shared.allot("c")


def test_past_the_deadline_nothing_is_left(clock: Clock) -> None:
    shared = Budget(900.0, {"a": 1.0})
    assert shared.left_s == -100.0
    assert shared.allot("a") == 1000.0
    with pytest.raises(ValueError, match="weight 0 of 'a'"):
        Budget(900.0, {"a": 0})


def test_an_effort_is_over_when_time_is_up_and_enough_is_measured() -> None:
    past, later = time.monotonic() - 1.0, time.monotonic() + 100.0
    assert Effort(10, 1.0, 3, past).is_over(3)
    assert not Effort(10, 1.0, 3, past).is_over(2)
    assert not Effort(10, 1.0, 3, later).is_over(9)
    assert not Effort(10, 1.0, 3).is_over(9)
    half = Effort(10, 1.0, 3, later).share(2)
    assert half.until is not None and 45.0 < half.until - time.monotonic() < 50.5


def _measure_late(context: RankContext, until: float) -> dict[str, int]:
    # Rank 1's clock says that there is no time: the ranks must not part over it.
    effort = Effort(6, 0.1, 2, until if context.rank == 0 else 0.0)
    summary = measure(context, {"a": Variant(lambda: None), "b": Variant(lambda: None)}, effort, "")
    return {name: len(times.round_us) for name, times in summary.items()}


def _orders(context: RankContext, rounds: int) -> list[str]:
    called: list[str] = []
    variants = {name: Variant(partial(called.append, name)) for name in "abcdef"}
    measure(context, variants, Effort(rounds, 0.001), "")
    a_round = len(variants) * (LEAD_IN + MIN_COUNT)  # a batch of the shortest kind for each
    timed = called[-a_round * rounds :]
    return [
        "".join(dict.fromkeys(timed[start : start + a_round]))
        for start in range(0, len(timed), a_round)
    ]


def test_each_round_has_an_order_of_its_own() -> None:
    orders, others = run_ranks(_orders, 4, Launch(2, "cpu", 0, 90.0, 60.0))
    assert orders == others
    assert len(set(orders)) == 4
    assert all(sorted(order) == list("abcdef") for order in orders)


def test_ranks_stop_in_the_same_round() -> None:
    launch = Launch(2, "cpu", 0, 90.0, 60.0)
    assert run_ranks(_measure_late, time.monotonic() - 1.0, launch) == 2 * [{"a": 2, "b": 2}]
    assert run_ranks(_measure_late, time.monotonic() + 600.0, launch) == 2 * [{"a": 6, "b": 6}]
