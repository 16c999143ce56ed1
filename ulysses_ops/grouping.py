"""Which members of a set that is connected in part can form groups that are connected in full.

``reach[a]`` holds the members that ``a`` is connected with, both ways; members are 0, 1, ...
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import combinations

Reach = Sequence[frozenset[int]]
Group = tuple[int, ...]

MAX_MEMBERS = 16  # searches are exhaustive: one host has no more GPUs than this
MAX_SEARCHED = 10  # members up to which every grouping is weighed


def connected_parts(reach: Reach) -> tuple[Group, ...]:
    """Return the islands: members that reach each other over any way, in order."""
    found: list[Group] = []
    left = set(range(len(reach)))
    while left:
        part: set[int] = set()
        edge = {min(left)}
        while edge:
            part |= edge
            edge = {other for member in edge for other in reach[member]} - part
        found.append(tuple(sorted(part)))
        left -= part
    return tuple(found)


def largest_groups(reach: Reach) -> tuple[Group, ...]:
    """Return the largest groups in which everyone reaches everyone, in order; none of one alone."""
    found: list[Group] = []

    def grow(group: Group, candidates: frozenset[int]) -> None:
        if found and len(group) + len(candidates) < len(found[-1]):
            return  # cannot become as large as what is found; that only grows
        if not candidates and len(group) > 1:
            found.append(group)
        for member in sorted(candidates):
            grow((*group, member), frozenset(m for m in candidates & reach[member] if m > member))

    if all(len(others) == len(reach) - 1 for others in reach):
        return (tuple(range(len(reach))),) if len(reach) > 1 else ()
    grow((), frozenset(range(len(reach))))
    most = max(map(len, found), default=0)
    return tuple(group for group in found if len(group) == most)


def best_grouping(
    reach: Reach, size: int, closeness: Callable[[int, int], int] = lambda a, b: 0
) -> tuple[Group, ...]:
    """Return as many disjoint groups of ``size`` as there can be, and of those the closest.

    Args:
        reach: Who is connected with whom.
        size: Members of a group, at least 2.
        closeness: Of two members; the sum over all pairs inside groups is made large. Beyond
            ``MAX_SEARCHED`` members, groups are taken one by one instead, the closest first.

    Raises:
        ValueError: ``size`` is less than 2.
    """
    if size < 2:
        raise ValueError(f"best_grouping: size={size} is too small; a group has 2 members or more")

    def worth(group: Group) -> int:
        return sum(closeness(a, b) for a, b in combinations(group, 2))

    groups = _groups_of(reach, size)
    if len(reach) > MAX_SEARCHED:
        return _take_closest(groups, worth)

    @cache
    def best(left: frozenset[int]) -> tuple[int, int, tuple[Group, ...]]:
        if len(left) < size:
            return 0, 0, ()
        first = min(left)
        choice = best(left - {first})
        for group in groups:
            if group[0] == first and left.issuperset(group):
                count, close, rest = best(left - set(group))
                option = (count + 1, close + worth(group), (group, *rest))
                choice = max(choice, option, key=lambda found: found[:2])
        return choice

    return best(frozenset(range(len(reach))))[2]


def _groups_of(reach: Reach, size: int) -> list[Group]:
    """Return every group of ``size`` in which everyone reaches everyone, in order."""
    found: list[Group] = []

    def grow(group: Group, candidates: Sequence[int]) -> None:
        if len(group) == size:
            found.append(group)
            return
        for place, member in enumerate(candidates):
            later = [other for other in candidates[place + 1 :] if other in reach[member]]
            if len(group) + 1 + len(later) >= size:
                grow((*group, member), later)

    grow((), range(len(reach)))
    return found


def _take_closest(groups: Sequence[Group], worth: Callable[[Group], int]) -> tuple[Group, ...]:
    taken: list[Group] = []
    for group in sorted(groups, key=worth, reverse=True):
        if all(not set(group) & set(other) for other in taken):
            taken.append(group)
    return tuple(sorted(taken))
