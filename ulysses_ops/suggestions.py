"""Which ranks of a group could use the copy engines among themselves, where all cannot."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import combinations

from .facts import Topology
from .grouping import MAX_MEMBERS, Group, best_grouping, largest_groups
from .obstacles import faulty_pairs, name_ranks, obstacles_but_pairs

NEAREST = {"internal": 5, "single": 4, "multiple": 3, "hostbridge": 2, "node": 1}  # else 0
MAX_SHOWN = 8  # groups that one suggestion names


def suggest(
    topologies: Sequence[Topology],
    *,
    allow_shared_devices: bool = False,
    sizes: Sequence[int] | None = None,
    apart: Iterable[tuple[int, int]] = (),
) -> tuple[str, ...]:
    """Say which ranks could use ``ce`` among themselves: the most at once, and in equal groups.

    Args:
        topologies: What every rank knows, by rank.
        allow_shared_devices: Whether ranks may share a GPU.
        sizes: Sizes of equal groups; by default what divides the number of ranks.
        apart: Pairs of ranks that are not to be in one group, for a reason of the caller's.
    """
    count = len(topologies)
    if not 2 <= count <= MAX_MEMBERS:
        return ()
    reach = _reach(topologies, allow_shared_devices, {frozenset(pair) for pair in apart})
    largest = largest_groups(reach)
    if not largest:
        return ()
    found = []
    if len(largest[0]) < count:
        found.append(f"largest eligible: {_choices(topologies, largest, ' or ')}")
    for size in sizes or [size for size in range(2, count) if count % size == 0]:
        groups = best_grouping(reach, size, _closeness(topologies)) if size > 1 else ()
        if groups:
            left = count - size * len(groups)
            rest = f" (of {count}, {left} stay alone)" if left else ""
            found.append(f"groups of {size}: {_choices(topologies, groups, ' and ')}{rest}")
    return tuple(found)


def _reach(
    topologies: Sequence[Topology], allow_shared_devices: bool, apart: set[frozenset[int]]
) -> list[frozenset[int]]:
    """Return, for each rank, the ranks that it could form a group with."""
    faulty = {frozenset(pair) for pair in faulty_pairs(topologies)} | apart
    reach: list[set[int]] = [set() for _ in topologies]
    for a, b in combinations(range(len(topologies)), 2):
        if {a, b} not in faulty and not obstacles_but_pairs(
            [topologies[a], topologies[b]], allow_shared_devices=allow_shared_devices
        ):
            reach[a].add(b)
            reach[b].add(a)
    return [frozenset(others) for others in reach]


def _closeness(topologies: Sequence[Topology]) -> Callable[[int, int], int]:
    """Rate two ranks: links without a switch between count most, then the way over PCI."""

    def rate(a: int, b: int) -> int:
        ends = {topologies[a].device_uuid, topologies[b].device_uuid}
        pair = next(
            (p for p in topologies[a].pairs if {p.source_uuid, p.target_uuid} == ends), None
        )
        near = 0 if pair is None else NEAREST.get(str(pair.ancestor.value), 0)
        return 10 * topologies[a].direct_links(topologies[b].device_uuid or "") + near

    return rate


def _choices(topologies: Sequence[Topology], groups: Sequence[Group], word: str) -> str:
    """Name groups by rank, and by what ``CUDA_VISIBLE_DEVICES`` would start them alone."""

    def named(group: Group) -> str:
        tokens = [_visible_token(topologies[rank]) for rank in group]
        return f"{name_ranks(group)} (CUDA_VISIBLE_DEVICES={','.join(tokens)})"

    shown = [named(group) for group in groups[:MAX_SHOWN]]
    more = len(groups) - len(shown)
    return word.join(shown) + (f", and {more} more" if more else "")


def _visible_token(topology: Topology) -> str:
    """What stands, or would stand, for a rank's GPU in ``CUDA_VISIBLE_DEVICES``."""
    ordinal = None if topology.gpu is None else topology.gpu.cuda_ordinal
    if ordinal is None:
        return str(topology.device_uuid)
    given = [token.strip() for token in (topology.visible_devices or "").split(",")]
    return given[ordinal] if ordinal < len(given) and given[ordinal] else str(ordinal)
