"""Groups that are connected in full, within a set that is connected in part."""

from __future__ import annotations

from itertools import combinations, permutations

import pytest
from fake_nvml import NOT_SUPPORTED, NVLINK, FakeNvml, group_topologies, islands, machine
from hypothesis import given, settings
from hypothesis import strategies as st

from ulysses_ops.eligibility import Request, decide
from ulysses_ops.grouping import Group, Reach, best_grouping, largest_groups
from ulysses_ops.suggestions import _reach, suggest

NCCL = Request(backends=("nccl",))


def reach_of(count: int, edges: set[frozenset[int]]) -> Reach:
    return [frozenset(b for b in range(count) if frozenset((a, b)) in edges) for a in range(count)]


def is_joined(reach: Reach, group: Group) -> bool:
    return all(b in reach[a] for a, b in permutations(group, 2))


@st.composite
def graphs(draw: st.DrawFn) -> Reach:
    count = draw(st.integers(2, 7))
    ways = [frozenset(pair) for pair in combinations(range(count), 2)]
    return reach_of(count, set(draw(st.lists(st.sampled_from(ways), unique=True))))


@settings(max_examples=150, deadline=None)
@given(reach=graphs())
def test_largest_groups_are_all_of_them(reach: Reach) -> None:
    found = largest_groups(reach)
    joined = [
        group
        for size in range(2, len(reach) + 1)
        for group in combinations(range(len(reach)), size)
        if is_joined(reach, group)
    ]
    most = max(map(len, joined), default=0)
    assert sorted(found) == sorted(group for group in joined if len(group) == most)


@settings(max_examples=150, deadline=None)
@given(reach=graphs(), size=st.integers(2, 4))
def test_a_grouping_is_disjoint_joined_and_as_large_as_can_be(reach: Reach, size: int) -> None:
    found = best_grouping(reach, size)
    members = [member for group in found for member in group]
    assert len(members) == len(set(members)) == size * len(found)
    assert all(is_joined(reach, group) for group in found)
    possible = [g for g in combinations(range(len(reach)), size) if is_joined(reach, g)]
    for more in combinations(possible, len(found) + 1):
        together = [member for group in more for member in group]
        assert len(set(together)) < len(together), f"{more} would be better than {found}"


def test_of_equal_groupings_the_closest_is_taken() -> None:
    full = reach_of(4, {frozenset(pair) for pair in combinations(range(4), 2)})
    bridged = [{0, 2}, {1, 3}]
    found = best_grouping(full, 2, lambda a, b: int({a, b} in bridged))
    assert found == ((0, 2), (1, 3))
    assert best_grouping(full, 2) == ((0, 1), (2, 3))  # control: without closeness, the first


def test_sixteen_members_are_grouped_in_no_time() -> None:
    full = reach_of(16, {frozenset(pair) for pair in combinations(range(16), 2)})
    assert largest_groups(full) == (tuple(range(16)),)
    groups = best_grouping(full, 4, lambda a, b: int(a // 4 == b // 4))
    assert groups == tuple(tuple(range(i, i + 4)) for i in range(0, 16, 4))


def test_a_group_of_one_is_refused() -> None:
    with pytest.raises(ValueError, match="size=1 is too small"):
        best_grouping([frozenset()], 1)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_what_is_suggested_is_eligible(data: st.DataObject) -> None:
    count = data.draw(st.integers(3, 5))
    status = {
        (a, b, NVLINK): data.draw(st.sampled_from([0, 0, 0, NOT_SUPPORTED, 6]))
        for a, b in permutations(range(count), 2)
    }
    ranks = group_topologies(FakeNvml(machine(count), status))
    reach = _reach(ranks, False, set())
    for group in (*largest_groups(reach), *best_grouping(reach, 2)):
        assert decide([ranks[member] for member in group], NCCL).transport == "ce"
    for a, b in combinations(range(count), 2):
        if b not in reach[a]:
            assert decide([ranks[a], ranks[b]], NCCL).transport == "nccl"


def test_islands_and_their_suggestions() -> None:
    nvml = FakeNvml(machine(8), islands(8, [[0, 1, 2, 3], [4, 5, 6, 7]]))
    decision = decide(group_topologies(nvml), NCCL)
    assert decision.transport == "nccl"
    assert decision.certain
    four = "ranks 0, 1, 2, 3 (CUDA_VISIBLE_DEVICES=0,1,2,3)"
    others = "ranks 4, 5, 6, 7 (CUDA_VISIBLE_DEVICES=4,5,6,7)"
    pairs = [f"ranks {a}, {a + 1} (CUDA_VISIBLE_DEVICES={a},{a + 1})" for a in (0, 2, 4, 6)]
    assert decision.suggestions == (
        f"largest eligible: {four} or {others}",
        f"groups of 2: {' and '.join(pairs)}",
        f"groups of 4: {four} and {others}",
    )


def test_pairs_kept_apart_are_not_suggested() -> None:
    ranks = group_topologies(FakeNvml(machine(4)))
    (largest, pairs) = suggest(ranks, apart=[(0, 1)])
    assert largest.startswith("largest eligible: ranks 0, 2, 3 (")
    assert "ranks 0, 2 (" in pairs
    assert "ranks 1, 3 (" in pairs


def test_a_crowd_gets_no_suggestions() -> None:
    nvml = FakeNvml(machine(2), islands(2, []))
    assert suggest(group_topologies(nvml, [0, 1] * 9), allow_shared_devices=True) == ()
