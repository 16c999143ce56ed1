"""Requests of different lengths, divided over the ranks so that these finish together. Pure.

Data parallelism gives each rank whole requests, and the rank with the longest sets the pace. Here
the ranks form groups of ``sp``; a group packs its requests one after the other into one sequence,
and shards that: every rank of it gets as many rows, to within one, and attends with its heads over
all of them. With one group nothing is left to balance, but every row crosses the link.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from .kinds import check_at_least_1, check_kind, is_whole, shown, whole_numbers
from .plan import even_splits
from .workload import Workload

LENGTHS = "rows, a whole number for each request"


@dataclass(frozen=True)
class SequencePlan:
    """Who computes what.

    Attributes:
        lengths: Rows of the requests.
        sp: Ranks of a group.
        groups: For each group, its requests, in the order in which they are packed.
        group_us: Predicted time of each group.
        compared: Step time by ``sp``, of every size that was tried, as ``(sp, us, imbalance)``.
    """

    lengths: tuple[int, ...]
    sp: int
    groups: tuple[tuple[int, ...], ...]
    group_us: tuple[float, ...]
    compared: tuple[tuple[int, float, float], ...] = ()

    @property
    def step_us(self) -> float:
        """Predicted time of the slowest group."""
        return max(self.group_us)

    @property
    def imbalance(self) -> float:
        """How much longer the slowest group takes than they do on average: 0 is even."""
        return imbalance_of(self.group_us)

    def seq_splits(self, group: int) -> tuple[int, ...]:
        """Rows of each rank of a group, as the operators take them.

        Raises:
            ValueError: there is no such group.
        """
        members = self._members(group)
        return even_splits(sum(self.lengths[request] for request in members), self.sp)

    def cu_seqlens(self, group: int) -> tuple[int, ...]:
        """Where each request of a group begins in its packed sequence, and where the last ends.

        Raises:
            ValueError: there is no such group.
        """
        sizes = (self.lengths[request] for request in self._members(group))
        return tuple(accumulate(sizes, initial=0))

    def _members(self, group: int) -> tuple[int, ...]:
        _check_index("group", group, len(self.groups))
        return self.groups[group]

    def request_splits(self, request: int) -> tuple[int, ...]:
        """Rows of one request on each rank of its group.

        Raises:
            ValueError: there is no such request.
        """
        _check_index("request", request, len(self.lengths))
        (group,) = (g for g, members in enumerate(self.groups) if request in members)
        place = self.groups[group].index(request)
        first, end = self.cu_seqlens(group)[place : place + 2]
        edges = tuple(accumulate(self.seq_splits(group), initial=0))
        return tuple(
            max(0, min(end, edges[rank + 1]) - max(first, edges[rank])) for rank in range(self.sp)
        )


def _check_index(name: str, index: object, count: int) -> None:
    """From the end, as Python counts below 0, it would be the numbers of something else."""
    if not is_whole(index) or not 0 <= index < count:  # type: ignore[operator]
        message = (
            f"SequencePlan: {name}={shown(index)} must be a whole number from 0 to {count - 1}"
        )
        raise ValueError(message)


def imbalance_of(times: Sequence[float]) -> float:
    """``max / mean - 1``; 0 where nothing takes any time."""
    total = sum(times)
    return max(times) * len(times) / total - 1 if total else 0.0


def plan_sequences(
    lengths: Sequence[int],
    world_size: int,
    workload: Workload,
    *,
    sizes: Sequence[int] | None = None,
) -> SequencePlan:
    """Choose the size of the groups, and their requests, for the shortest step.

    For each size, requests go to the group that is done first, the longest request first; of equal
    predictions the smaller group wins, since it sends less.

    Args:
        lengths: Rows of each request, at least 1 each.
        world_size: Number of ranks.
        workload: What a request costs.
        sizes: Ranks of a group to choose from. When left out, those that divide ``world_size``
            and are no more than the heads: every rank of a group needs a head of its own.

    Raises:
        ValueError: something is of a wrong kind, there is no request, a length is below 1, or a
            size does not divide or is above the heads.
    """
    op = "plan_sequences"
    lengths = _checked(op, lengths, world_size, workload)
    heads = workload.model.heads
    possible = [n for n in range(1, min(world_size, heads) + 1) if world_size % n == 0]
    tried = whole_numbers(
        op, "sizes", possible if sizes is None else sizes, "numbers of ranks, or left out"
    )
    if not tried or any(n < 1 or world_size % n for n in tried):
        message = (
            f"{op}: sizes={list(tried)} must be at least one number, and each divide "
            f"world_size={world_size}; choose from {possible}"
        )
        raise ValueError(message)
    if max(tried) > heads:
        message = (
            f"{op}: sizes={list(tried)} must be no more than heads={heads}, since each rank of a "
            f"group needs a head; choose from {possible}"
        )
        raise ValueError(message)
    found = [_plan_of_size(lengths, world_size // sp, sp, workload) for sp in sorted(set(tried))]
    best = min(found, key=lambda plan: plan.step_us)
    compared = tuple((plan.sp, plan.step_us, plan.imbalance) for plan in found)
    return SequencePlan(best.lengths, best.sp, best.groups, best.group_us, compared)


def _plan_of_size(
    lengths: tuple[int, ...], num_groups: int, sp: int, workload: Workload
) -> SequencePlan:
    groups: list[list[int]] = [[] for _ in range(num_groups)]
    loads = [0.0] * num_groups
    for request in sorted(range(len(lengths)), key=lambda r: (-lengths[r], r)):
        group = loads.index(min(loads))
        groups[group].append(request)
        loads[group] += workload.request_us(lengths[request])
    members = tuple(tuple(sorted(group)) for group in groups)
    times = tuple(workload.step_us([lengths[r] for r in group], sp, 1) for group in members)
    return SequencePlan(lengths, sp, members, times)


def data_parallel(lengths: Sequence[int], world_size: int, workload: Workload) -> SequencePlan:
    """Whole requests to ranks in turn, as they come: what a plan is compared with.

    Raises:
        ValueError: something is of a wrong kind, there is no request, or a length is below 1.
    """
    lengths = _checked("data_parallel", lengths, world_size, workload)
    members = tuple(tuple(range(rank, len(lengths), world_size)) for rank in range(world_size))
    times = tuple(workload.step_us([lengths[r] for r in group], 1, 1) for group in members)
    return SequencePlan(lengths, 1, members, times)


def _checked(op: str, lengths: object, world_size: object, workload: object) -> tuple[int, ...]:
    """The lengths, held."""
    held = whole_numbers(op, "lengths", lengths, LENGTHS)
    check_at_least_1(op, world_size=world_size)
    check_kind(op, "workload", workload, Workload, "a Workload")
    if not held or min(held) < 1:
        message = f"{op}: lengths={list(held)} must be at least one number, and each >= 1"
        raise ValueError(message)
    return held
