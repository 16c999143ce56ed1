"""Groups that are connected in full, within a set that is connected in part."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, permutations

import pytest
from fake_nvml import (
    NOT_SUPPORTED,
    NVLINK,
    FakeNvml,
    group_topologies,
    islands,
    machine,
    pair_lines,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from ulysses_ops import eligibility
from ulysses_ops.eligibility import Request, decide
from ulysses_ops.facts import Reading, Topology
from ulysses_ops.grouping import Group, Reach, best_grouping, connected_parts, largest_groups
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


def test_a_crowd_on_one_gpu_gets_no_suggestions() -> None:
    nvml = FakeNvml(machine(2), islands(2, []))
    assert suggest(group_topologies(nvml, [0] * 17 + [1]), allow_shared_devices=True) == ()
    (largest, _) = suggest(group_topologies(nvml, [0] * 3 + [1]), allow_shared_devices=True)
    assert largest.startswith("largest eligible: ranks 0, 1, 2 (")  # control: a small one does


def partly_connected(count: int) -> list[Topology]:
    """Every GPU reaches all but one other: no group of all, and many of any size."""
    apart = {(a, a ^ 1) for a in range(count)}
    status = {(a, b, NVLINK): NOT_SUPPORTED for a, b in apart}
    return group_topologies(FakeNvml(machine(count), status))


def test_sixteen_partly_connected_gpus_take_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = partly_connected(16)
    asked: list[str] = []
    real = Topology.direct_links

    def counted(topology: Topology, uuid: str) -> int:
        asked.append(uuid)
        return real(topology, uuid)

    monkeypatch.setattr(Topology, "direct_links", counted)
    start = time.perf_counter()
    largest, *equal = suggest(ranks)
    took_s = time.perf_counter() - start
    assert largest.startswith("largest eligible: ranks 0, 2, 4, 6, 8, 10, 12, 14 (")
    assert [text.split(":")[0] for text in equal] == ["groups of 2", "groups of 4", "groups of 8"]
    assert len(asked) == 16 * 16  # each pair is rated once, however many groups it is part of
    assert took_s < 3  # 0.5 s on a slow machine; it was 6 s when every group rated its pairs


def test_who_does_not_ask_pays_for_no_suggestion(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def counted(topologies: Sequence[Topology], **options: object) -> tuple[str, ...]:
        asked.append(len(topologies))
        return ("x",)

    monkeypatch.setattr(eligibility, "suggest", counted)
    ranks = partly_connected(4)
    quiet = decide(ranks, replace(NCCL, suggest=False))
    assert (asked, quiet.suggestions) == ([], ())
    told = decide(ranks, NCCL)
    assert (asked, told.suggestions) == ([4], ("x",))  # control
    assert replace(told, suggestions=()) == quiet


# ---- several hosts -------------------------------------------------------------------------------


def on_hosts(hosts: int, each: int, status: dict[tuple[int, int, int], int]) -> list[Topology]:
    """``each`` ranks on each of ``hosts`` hosts, whose GPUs are their own."""
    ranks = []
    for host in range(hosts):
        cards = [
            replace(gpu, uuid=str(uuid.UUID(int=0x1000 * (host + 1) + i)))
            for i, gpu in enumerate(machine(each))
        ]
        for topology in group_topologies(FakeNvml(cards, status)):
            boot_id = Reading(f"boot-{host}", "test")
            process = replace(topology.process, hostname=f"host{host}", boot_id=boot_id)
            ranks.append(replace(topology, process=process))
    return ranks


def test_two_hosts_are_one_line_and_each_is_suggested() -> None:
    decision = decide(on_hosts(2, 4, {}), NCCL)
    assert decision.transport == "nccl"
    (reason,) = decision.reasons
    assert reason == (
        "ranks differ in boot id: ranks 0, 1, 2, 3 on host0 (boot id boot-0), "
        "ranks 4, 5, 6, 7 on host1 (boot id boot-1); ce works within one host"
    )
    first = "ranks 0, 1, 2, 3 (on host0, CUDA_VISIBLE_DEVICES=0,1,2,3)"
    second = "ranks 4, 5, 6, 7 (on host1, CUDA_VISIBLE_DEVICES=0,1,2,3)"
    assert decision.suggestions[0] == f"largest eligible: {first} or {second}"
    assert decision.suggestions[-1] == f"groups of 4: {first} and {second}"


def test_a_bad_pair_of_one_host_is_seen_by_its_own_host_alone() -> None:
    ranks = on_hosts(2, 3, {(0, 1, NVLINK): NOT_SUPPORTED})
    decision = decide(ranks, NCCL)
    assert pair_lines(decision) == {(0, 1), (3, 4)}
    (line,) = [text for text in decision.reasons if text.startswith("rank 3 -> rank 4 ")]
    assert line.endswith("P2P nvlink status is NOT_SUPPORTED (seen by ranks 3, 4, 5)")
    assert decision.suggestions[0].startswith("largest eligible: ranks 0, 2 (on host0, ")


def test_a_rank_that_does_not_know_its_host_is_not_taken_for_elsewhere() -> None:
    ranks = on_hosts(1, 3, {(0, 1, NVLINK): NOT_SUPPORTED})
    for blank in (Reading(None, "test", "no /proc"), Reading("", "test"), Reading(" ", "test")):
        ranks[2] = replace(ranks[2], process=replace(ranks[2].process, boot_id=blank))
        decision = decide(ranks, NCCL)
        assert f"rank 2: boot id unknown: {blank.reason or 'empty'}" in decision.reasons
        (line,) = [text for text in decision.reasons if text.startswith("rank 0 -> rank 1 ")]
        assert line.endswith("(seen by ranks 0, 1, 2)")
        assert not any("ranks differ" in text for text in decision.reasons)


def test_ranks_of_many_hosts_are_judged_in_no_time() -> None:
    ranks = on_hosts(16, 8, {})
    start = time.perf_counter()
    decision = decide(ranks, replace(NCCL, suggest=False))
    assert len(decision.reasons) == 1
    assert time.perf_counter() - start < 2  # 128 ranks: 16,256 pairs seen by 128 each before


def test_names_of_namespaces_count_within_a_host_alone() -> None:
    ranks = on_hosts(2, 2, {})
    for rank, space in enumerate(("a", "a", "b", "b")):
        ranks[rank] = replace(
            ranks[rank], process=replace(ranks[rank].process, pid_namespace=Reading(space, "test"))
        )
    assert len(decide(ranks, NCCL).reasons) == 1
    ranks[1] = replace(
        ranks[1], process=replace(ranks[1].process, pid_namespace=Reading("c", "test"))
    )
    (_, line) = decide(ranks, NCCL).reasons
    assert line.startswith("ranks differ in PID namespace: rank 0 on host0 (PID namespace a), rank")


@settings(max_examples=60, deadline=None)
@given(reach=graphs())
def test_parts_are_joined_inside_and_not_to_each_other(reach: Reach) -> None:
    parts = connected_parts(reach)
    assert sorted(member for part in parts for member in part) == list(range(len(reach)))
    for part, other in permutations(parts, 2):
        assert not any(reach[member] & set(other) for member in part)
    for part in parts:
        seen = {part[0]}
        for _ in part:
            seen |= {other for member in seen for other in reach[member]}
        assert seen == set(part)
