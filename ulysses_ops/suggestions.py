"""Which ranks of a group could use the copy engines among themselves, where all cannot."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import combinations

from .facts import Topology
from .grouping import (
    MAX_MEMBERS,
    Group,
    Reach,
    best_grouping,
    connected_parts,
    largest_groups,
)
from .obstacles import faulty_pairs, known, name_ranks, obstacles_but_pairs, pairs_by_ends

Rates = Sequence[Sequence[int]]  # how close the members of an island are

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
    reach = _reach(topologies, allow_shared_devices, {frozenset(pair) for pair in apart})
    islands = [island for island in connected_parts(reach) if len(island) <= MAX_MEMBERS]
    largest = _largest(reach, islands)
    if not largest:
        return ()
    found = []
    if len(largest[0]) < count:
        found.append(f"largest eligible: {_choices(topologies, largest, ' or ')}")
    rates = [_closeness(topologies, island) for island in islands]
    for size in sizes or [size for size in range(2, count) if count % size == 0]:
        groups = _equal(reach, islands, rates, size)
        if groups:
            left = count - size * len(groups)
            rest = f" (of {count}, {left} stay alone)" if left else ""
            found.append(f"groups of {size}: {_choices(topologies, groups, ' and ')}{rest}")
    return tuple(found)


def equal_groups(
    topologies: Sequence[Topology], size: int, *, allow_shared_devices: bool = False
) -> list[Group]:
    """Return the most groups of ``size`` ranks that could use ``ce``, and of those the closest.

    Args:
        topologies: What every rank knows, by rank.
        size: Ranks of a group, at least 2.
        allow_shared_devices: Whether ranks may share a GPU.
    """
    reach = _reach(topologies, allow_shared_devices, set())
    islands = [island for island in connected_parts(reach) if len(island) <= MAX_MEMBERS]
    rates = [_closeness(topologies, island) for island in islands]
    return _equal(reach, islands, rates, size)


def _within(reach: Reach, island: Group) -> Reach:
    """Return ``reach`` with the members of ``island`` counted from 0."""
    place = {member: number for number, member in enumerate(island)}
    return [frozenset(place[other] for other in reach[member]) for member in island]


def _largest(reach: Reach, islands: Sequence[Group]) -> list[Group]:
    """Return the largest groups of all islands."""
    found = [
        tuple(island[member] for member in group)
        for island in islands
        for group in largest_groups(_within(reach, island))
    ]
    most = max(map(len, found), default=0)
    return [group for group in found if len(group) == most]


def _equal(
    reach: Reach, islands: Sequence[Group], rates: Sequence[Rates], size: int
) -> list[Group]:
    """Return the most groups of ``size``, and of those the closest; islands share no group."""
    if size < 2:
        return []
    found: list[Group] = []
    for island, rate in zip(islands, rates, strict=True):
        groups = best_grouping(_within(reach, island), size, partial(_rated, rate))
        found += [tuple(island[member] for member in group) for group in groups]
    return sorted(found)


def _rated(rates: Rates, a: int, b: int) -> int:
    return rates[a][b]


def _reach(
    topologies: Sequence[Topology], allow_shared_devices: bool, apart: set[frozenset[int]]
) -> list[frozenset[int]]:
    """Return, for each rank, the ranks that it could form a group with."""
    faulty = {frozenset(pair) for pair in faulty_pairs(topologies)} | apart
    hosts = [known(topology.process.boot_id) for topology in topologies]
    reach: list[set[int]] = [set() for _ in topologies]
    for a, b in combinations(range(len(topologies)), 2):
        if (
            hosts[a] == hosts[b]
            and {a, b} not in faulty
            and not obstacles_but_pairs(
                [topologies[a], topologies[b]], allow_shared_devices=allow_shared_devices
            )
        ):
            reach[a].add(b)
            reach[b].add(a)
    return [frozenset(others) for others in reach]


def _closeness(topologies: Sequence[Topology], island: Group) -> Rates:
    """Rate every two ranks: links without a switch between count most, then the way over PCI."""
    rates = []
    for a in island:
        own = topologies[a]
        pairs = pairs_by_ends(own)
        row = []
        for b in island:
            uuid = topologies[b].device_uuid or ""
            pair = pairs.get((own.device_uuid or "", uuid))
            near = 0 if pair is None else NEAREST.get(str(pair.ancestor.value), 0)
            row.append(10 * own.direct_links(uuid) + near)
        rates.append(row)
    return rates


def _choices(topologies: Sequence[Topology], groups: Sequence[Group], word: str) -> str:
    """Name groups by rank, and by what ``CUDA_VISIBLE_DEVICES`` would start them alone."""
    hosts = {known(topology.process.boot_id) for topology in topologies}

    def named(group: Group) -> str:
        tokens = [_visible_token(topologies[rank]) for rank in group]
        host = topologies[group[0]].process.hostname
        where = f"on {host}, " if len(hosts) > 1 else ""
        return f"{name_ranks(group)} ({where}CUDA_VISIBLE_DEVICES={','.join(tokens)})"

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
