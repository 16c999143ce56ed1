"""The data check and the rates of pairs, between devices that are all the CPU."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from pair_copies import (
    CPU,
    arrives,
    fixed_rate,
    ignores_the_pitch,
    is_lost,
    loses_a_row,
    no_connection,
)
from torch import Tensor

from ulysses_ops.tools.pair_bandwidth import (
    COPIES,
    FLAT,
    FORMS,
    ROUNDS,
    Form,
    Way,
    measure_pairs,
    measure_run,
    runs_of,
)
from ulysses_ops.tools.pair_check import BLOCKS, RowCopyCall, check_pairs

# ---- data check ----------------------------------------------------------------------------------


def test_data_that_arrives_is_no_failure() -> None:
    told: list[str] = []
    assert check_pairs(CPU, arrives, no_connection, progress=told.append) == []
    assert told == ["data check 0 <-> 1", "data check 0 <-> 2", "data check 1 <-> 2"]


@pytest.mark.parametrize("copy", [is_lost, loses_a_row, ignores_the_pitch])
def test_data_that_does_not_arrive_is_seen_on_every_pair(copy: RowCopyCall) -> None:
    failures = check_pairs(CPU, copy, no_connection)
    assert [(f.source, f.target) for f in failures] == [
        (0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)
    ]  # fmt: skip
    assert str(failures[0]).startswith("failed data check 0->1: ")
    assert "bytes are wrong" in failures[0].what


def test_a_failure_of_one_direction_names_that_direction() -> None:
    """Every third call is lost: of the two directions, alone and together, one each time."""
    calls = []

    def copy(target: Tensor, source: Tensor) -> None:
        calls.append(1)
        if len(calls) != 2:  # the call of 1->0 alone
            target.copy_(source)

    (failure,) = check_pairs(CPU[:2], copy, no_connection)
    assert (failure.source, failure.target) == (1, 0)


def test_what_fails_only_both_ways_at_once_is_seen() -> None:
    sent: list[Tensor] = []

    def copy(target: Tensor, source: Tensor) -> None:
        sent.append(source)
        if len(sent) != 4:  # after 0->1, 1->0, and 0->1 at the same time
            target.copy_(source)

    (failure,) = check_pairs(CPU[:2], copy, no_connection)
    assert (failure.source, failure.target) == (1, 0)
    assert "both ways at once" in failure.what


def test_data_is_new_in_every_round_and_direction() -> None:
    """What an earlier copy left would pass for a later one if patterns were the same."""
    sent: list[Tensor] = []

    def copy(target: Tensor, source: Tensor) -> None:
        sent.append(source.reshape(-1)[:4096].clone())
        target.copy_(source)

    check_pairs(CPU[:2], copy, no_connection)
    assert len(sent) == 4 * len(BLOCKS)
    there = sent[0::4]
    back = sent[1::4]
    for a, b in [(there[0], back[0]), (there[0], there[1]), (there[1], there[2])]:
        assert not torch.equal(a, b)


def test_a_call_that_raises_is_a_failure_of_its_pair() -> None:
    def refuses(source: torch.device, target: torch.device) -> None:
        raise RuntimeError("217")

    def breaks(target: Tensor, source: Tensor) -> None:
        raise RuntimeError("700")

    for failures in (
        check_pairs(CPU[:2], arrives, refuses),
        check_pairs(CPU[:2], breaks, no_connection),
    ):
        assert [(f.source, f.target) for f in failures] == [(0, 1), (1, 0)]
    assert "no peer access: RuntimeError: 217" in check_pairs(CPU[:2], arrives, refuses)[0].what


# ---- bandwidth -----------------------------------------------------------------------------------


def test_rates_of_every_pair_form_and_direction() -> None:
    done: list[str] = []
    rates, unmeasured = measure_pairs(CPU, no_connection, fixed_rate(400.0), advance=done.append)
    assert unmeasured == []
    assert len(done) == sum(1 for _ in runs_of(3)) == 3 * len(FORMS) * 3
    keys = {(r.source, r.target, r.rows, r.row_bytes, r.both_ways) for r in rates}
    assert len(keys) == len(rates) == 6 * len(FORMS) * 2
    assert {r.gbs for r in rates if not r.both_ways} == {400.0}
    assert {r.gbs for r in rates if r.both_ways} == {200.0}
    widths = {r.row_bytes for r in rates if r.rows > 1}
    assert min(widths) == 256


def test_pairs_that_cannot_be_connected_leave_the_others_measured() -> None:
    """CUDA 0 and 1 are joined, and 2 can write to 0."""
    numbers = [torch.device("cpu", i) for i in range(3)]
    joined = {(0, 1), (1, 0), (2, 0)}

    def connect(source: torch.device, target: torch.device) -> None:
        if (source.index, target.index) not in joined:
            raise RuntimeError("217")

    done: list[str] = []
    rates, unmeasured = measure_pairs(numbers, connect, fixed_rate(400.0), advance=done.append)
    assert len(done) == sum(1 for _ in runs_of(3))
    assert {(r.source, r.target) for r in rates if not r.both_ways} == joined
    assert {(r.source, r.target) for r in rates if r.both_ways} == {(0, 1), (1, 0)}
    assert [(u.source, u.target) for u in unmeasured] == [(0, 2), (1, 2), (2, 1)]
    assert str(unmeasured[0]) == "not measured 0->2: no peer access: RuntimeError: 217"


def test_a_copy_that_fails_leaves_the_other_pairs_measured() -> None:
    def time_copies(ways: Sequence[Way], form: Form, copies: int) -> list[float]:
        if (0, 1) in ways and form.rows > 1:
            raise RuntimeError("700")
        return fixed_rate(400.0)(ways, form, copies)

    rates, unmeasured = measure_pairs(CPU, no_connection, time_copies)
    assert [(u.source, u.target) for u in unmeasured] == [(0, 1)]
    assert unmeasured[0].what == "rows 256 B: RuntimeError: 700"
    assert {(r.source, r.target) for r in rates if r.rows > 1} == {
        (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)
    }  # fmt: skip


def test_a_rate_is_the_median_and_the_warm_up_does_not_count() -> None:
    asked: list[int] = []

    def time_copies(ways: Sequence[Way], form: Form, copies: int) -> list[float]:
        asked.append(copies)
        slow = 10.0 if len(asked) in (1, 2) else 1.0  # the warm-up, and one round
        return [slow * copies * form.total_bytes / 100e9]

    (rate,) = measure_run(FLAT, [(0, 1)], time_copies)
    assert asked == [1] + [COPIES] * ROUNDS
    assert (rate.gbs, rate.lowest_gbs, rate.highest_gbs) == (100.0, 10.0, 100.0)
