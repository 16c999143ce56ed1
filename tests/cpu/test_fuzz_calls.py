"""Random programs of public calls on gloo ranks: every result is that of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from random_calls import Call, Functional, programs
from rank_pool import RankError, RankPool
from torch import Tensor

from ulysses_ops import UlyssesCommunicator, all_to_all, collective
from ulysses_ops.plan import Layout

Ranks = Callable[[int], RankPool]


def bounded(examples: int) -> settings:
    """The same examples in each run, and no search for a smaller one, which would take minutes."""
    return settings(
        derandomize=True,
        database=None,
        deadline=None,
        max_examples=examples,
        phases=(Phase.explicit, Phase.generate),
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )


def run(rank: int, world_size: int, program: list[Call]) -> None:
    with UlyssesCommunicator(timeout_s=20, max_windows=5) as comm:  # few: windows are evicted
        for call in program:
            call.check(comm)


@bounded(25)
@given(program=programs(1))
def test_one_rank(ranks: Ranks, program: list[Call]) -> None:
    ranks(1).run(run, program, timeout_s=30)


@bounded(50)
@given(program=programs(2))
def test_two_ranks(ranks: Ranks, program: list[Call]) -> None:
    ranks(2).run(run, program, timeout_s=30)


@bounded(15)
@given(program=programs(4))
def test_four_ranks(ranks: Ranks, program: list[Call]) -> None:
    ranks(4).run(run, program, timeout_s=30)


# ---- control -------------------------------------------------------------------------------------


def flipped(rank: int, world_size: int, program: list[Call]) -> None:
    """One byte that rank 1 receives is another."""
    trade = all_to_all.all_to_all

    def spoil(comm: UlyssesCommunicator, received: Tensor, *more: Any) -> None:
        trade(comm, received, *more)
        if comm.rank == 1:
            received[-1] ^= 1

    with mock.patch.object(collective, "all_to_all", spoil):
        run(rank, world_size, program)


@pytest.mark.parametrize("direction", ["scatter", "gather"])
def test_control_one_wrong_byte_is_seen(direction: str) -> None:
    layout = Layout(direction, 1, 2, (2, 3), (1, 2))  # type: ignore[arg-type]
    program: list[Call] = [Functional(layout, torch.float32, "fused", False, 3)]
    with RankPool(2, env={"CUDA_VISIBLE_DEVICES": ""}) as pool:
        pool.run(run, program, timeout_s=30)
        with pytest.raises(RankError, match="AssertionError"):
            pool.run(flipped, program, timeout_s=30)


def test_programs_reach_every_kind_of_call() -> None:
    seen: set[str] = set()

    @bounded(60)
    @given(program=st.shared(programs(2)))
    def draw(program: list[Call]) -> None:
        seen.update(type(call).__name__ for call in program)

    draw()
    assert seen == {"Functional", "Grouped", "Attention", "Joint", "Refused"}
