"""Plans for requests of different lengths, and the choice of a parallelism: by property."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ulysses_ops.constants import shipped_constants
from ulysses_ops.parallelism import choose_parallelism
from ulysses_ops.sequence_plan import data_parallel, imbalance_of, plan_sequences
from ulysses_ops.workload import ModelShape, Workload

SMALL = ModelShape(32, 4096, 32, 8, 128, 14336)
LARGE = ModelShape(80, 8192, 64, 8, 128, 28672)


def workload(model: ModelShape = SMALL) -> Workload:
    return Workload(model, shipped_constants())


LENGTHS = st.lists(st.integers(1, 9000), min_size=1, max_size=40)


@given(LENGTHS, st.sampled_from([1, 2, 4, 6, 8]))
@settings(deadline=None, max_examples=60)
def test_every_row_has_a_rank_and_ranks_hold_alike(lengths: list[int], world_size: int) -> None:
    plan = plan_sequences(lengths, world_size, workload())
    assert sorted(r for group in plan.groups for r in group) == list(range(len(lengths)))
    assert len(plan.groups) * plan.sp == world_size
    for group, members in enumerate(plan.groups):
        splits = plan.seq_splits(group)
        assert max(splits) - min(splits) <= 1
        assert sum(splits) == sum(lengths[r] for r in members) == plan.cu_seqlens(group)[-1]
        by_request = [plan.request_splits(r) for r in members]
        for request, rows in zip(members, by_request, strict=True):
            assert sum(rows) == lengths[request]
        if members:
            assert tuple(map(sum, zip(*by_request, strict=True))) == splits
    assert plan.step_us == min(us for _, us, _ in plan.compared)
    assert plan.imbalance >= 0


@given(LENGTHS, st.sampled_from([2, 4, 8]))
@settings(deadline=None, max_examples=40)
def test_of_one_size_it_is_no_worse_than_plain_data_parallel(
    lengths: list[int], world_size: int
) -> None:
    """Longest first is at most 4/3 of the best; plain turns may be that best."""
    planned = plan_sequences(lengths, world_size, workload(), sizes=[1])
    plain = data_parallel(lengths, world_size, workload())
    assert planned.step_us <= plain.step_us * 4 / 3 + 1e-6
    assert sorted(r for group in plain.groups for r in group) == list(range(len(lengths)))


def test_one_long_request_is_shared_and_many_alike_are_not() -> None:
    long = plan_sequences([64000, 900, 900, 900], 4, workload())
    assert long.sp == 4
    assert long.imbalance == 0
    plain = data_parallel([64000, 900, 900, 900], 4, workload())
    assert plain.imbalance > 2
    assert long.step_us < plain.step_us / 2
    alike = plan_sequences([4000] * 8, 4, workload())
    assert alike.sp == 1
    assert alike.imbalance == 0


def test_a_slow_link_speaks_against_sharing() -> None:
    slow = replace(shipped_constants(), peer_copy_gbs=0.5)
    lengths = [8000, 5000, 4000, 3000, 3000, 2000, 2000, 1000]
    fast_plan = plan_sequences(lengths, 4, workload())
    slow_plan = plan_sequences(lengths, 4, Workload(SMALL, slow))
    assert slow_plan.sp == 1
    assert slow_plan.step_us >= fast_plan.step_us


def test_work_grows_with_rows_and_shrinks_with_ranks() -> None:
    work = workload()
    times = [work.request_us(length) for length in (1, 100, 1000, 10000, 100000)]
    assert all(short < long for short, long in pairwise(times))
    assert work.step_us([100000], 4, 1) < work.step_us([100000], 2, 1) < times[-1]
    assert work.step_us([100000], 4, 1) > times[-1] / 4  # what the exchanges cost
    assert work.step_us([], 4, 1) == 0
    both = Workload(replace(SMALL, causal=False), shipped_constants())
    assert both.request_us(10000) > work.request_us(10000)
    assert imbalance_of([0.0, 0.0]) == 0
    assert imbalance_of([3.0, 1.0]) == 0.5


@pytest.mark.parametrize(
    ("lengths", "sizes", "complaint"),
    [
        ([], None, "lengths=.* must be at least one number, and each >= 1"),
        ([3, 0], None, "lengths=.* must be at least one number, and each >= 1"),
        ([3], [3], r"each divide world_size=4; choose from \[1, 2, 4\]"),
        ([3], [0], "each divide world_size=4"),
        ([3], [], r"sizes=\[\] must be at least one number"),
    ],
)
def test_what_cannot_be_planned(
    lengths: list[int], sizes: list[int] | None, complaint: str
) -> None:
    with pytest.raises(ValueError, match=f"plan_sequences: .*{complaint}"):
        plan_sequences(lengths, 4, workload(), sizes=sizes)


def test_a_group_has_no_more_ranks_than_heads() -> None:
    few = workload(replace(SMALL, heads=3, kv_heads=1))
    plan = plan_sequences([64000], 8, few)
    assert [sp for sp, _, _ in plan.compared] == [1, 2]
    refused = r"sizes=\[2, 4\] must be no more than heads=3, .* choose from \[1, 2\]"
    with pytest.raises(ValueError, match=refused):
        plan_sequences([64000], 8, few, sizes=[2, 4])
    many = plan_sequences([64000], 8, workload())
    assert [sp for sp, _, _ in many.compared] == [1, 2, 4, 8]


def test_lengths_may_come_one_by_one() -> None:
    lengths = [8000, 500, 500, 700]
    held = plan_sequences(lengths, 2, workload())
    assert plan_sequences((n for n in lengths), 2, workload()) == held  # type: ignore[arg-type]
    assert data_parallel(iter(lengths), 2, workload()).lengths == tuple(lengths)  # type: ignore[arg-type]
    by_hand = choose_parallelism(lengths, 2, workload(), memory_bytes=140 * GIB)
    once = choose_parallelism(iter(lengths), 2, workload(), memory_bytes=140 * GIB)  # type: ignore[arg-type]
    assert once == by_hand


# ---- sp, tp, dp ----------------------------------------------------------------------------------

GIB = 2**30


def test_one_long_sequence_is_sharded_by_sequence_where_the_weights_fit() -> None:
    choice = choose_parallelism([100000], 8, workload(), memory_bytes=140 * GIB)
    assert (choice.best.sp, choice.best.tp, choice.best.dp) == (8, 1, 1)
    assert [other.step_us for other in choice.others] == sorted(o.step_us for o in choice.others)


def test_weights_that_do_not_fit_are_sharded() -> None:
    choice = choose_parallelism([30000], 8, workload(LARGE), memory_bytes=60 * GIB)
    assert choice.best.tp >= 4
    assert any("do not fit into 60.0" in why for _, why in choice.refused)
    assert "-> sp=" in choice.explain()
    assert "no, " in choice.explain()


def test_many_short_requests_stay_whole() -> None:
    choice = choose_parallelism([2000] * 64, 8, workload(), memory_bytes=140 * GIB)
    assert choice.best.dp == 8


def test_what_is_not_connected_forms_no_group() -> None:
    choice = choose_parallelism([100000], 8, workload(), memory_bytes=140 * GIB, connected=4)
    assert choice.best.sp * choice.best.tp <= 4
    assert any("all reach each other" in why for _, why in choice.refused)


def test_heads_limit_both() -> None:
    model = replace(SMALL, heads=6, kv_heads=3)
    choice = choose_parallelism([50000], 8, workload(model), memory_bytes=140 * GIB)
    reasons = " ".join(why for _, why in choice.refused)
    assert "6 heads cannot be divided by tp=4" in reasons
    assert "6 heads are too few for sp=8" in reasons
    assert "3 KV heads cannot be divided by tp=2, nor repeated" in reasons


def test_a_cache_of_all_layers_takes_memory() -> None:
    without = choose_parallelism([100000], 4, workload(), memory_bytes=140 * GIB)
    with_it = choose_parallelism([100000], 4, workload(), memory_bytes=140 * GIB, cached=True)
    more = with_it.best.memory_bytes - without.best.memory_bytes
    assert more == 32 * 25000 * 2 * 8 * 128 * 2  # layers, rows, K and V, KV heads, D, bytes


def test_kv_heads_of_a_cache_are_whole() -> None:
    model = replace(SMALL, heads=24, kv_heads=6)
    sizes = []
    for cached in (False, True):
        choice = choose_parallelism(
            [100000], 4, workload(model), memory_bytes=140 * GIB, cached=cached
        )
        (one,) = (p for p in (choice.best, *choice.others) if (p.sp, p.tp) == (4, 1))
        sizes.append(one.memory_bytes)
    assert sizes[1] - sizes[0] == 32 * 100000 * 2 * 2 * 128 * 2  # 2 of the 6 on a rank, not 1.5


def test_where_nothing_fits_every_reason_is_told() -> None:
    with pytest.raises(ValueError, match=r"nothing fits on 2 GPUs: sp=1 tp=1 dp=2: .*GiB"):
        choose_parallelism([1000], 2, workload(LARGE), memory_bytes=GIB)
    with pytest.raises(ValueError, match="must be at least one number"):
        choose_parallelism([], 2, workload(), memory_bytes=GIB)
    with pytest.raises(ValueError, match="a multiple of kv_heads=3"):
        replace(SMALL, kv_heads=3)
