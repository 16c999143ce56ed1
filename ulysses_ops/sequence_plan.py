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

from .plan import even_splits
from .workload import Workload


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
        """Rows of each rank of a group, as the operators take them."""
        return even_splits(sum(self.lengths[request] for request in self.groups[group]), self.sp)

    def cu_seqlens(self, group: int) -> tuple[int, ...]:
        """Where each request of a group begins in its packed sequence, and where the last ends."""
        sizes = (self.lengths[request] for request in self.groups[group])
        return tuple(accumulate(sizes, initial=0))

    def request_splits(self, request: int) -> tuple[int, ...]:
        """Rows of one request on each rank of its group.

        Raises:
            ValueError: there is no such request.
        """
        for group, members in enumerate(self.groups):
            if request in members:
                place = members.index(request)
                first, end = self.cu_seqlens(group)[place : place + 2]
                edges = tuple(accumulate(self.seq_splits(group), initial=0))
                return tuple(
                    max(0, min(end, edges[rank + 1]) - max(first, edges[rank]))
                    for rank in range(self.sp)
                )
        message = f"SequencePlan: request={request} must be below {len(self.lengths)}"
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
        sizes: Ranks of a group to choose from; those that divide ``world_size`` when left out.

    Raises:
        ValueError: there is no request, a length is below 1, or a size does not divide.
    """
    tried = tuple(sizes or (n for n in range(1, world_size + 1) if world_size % n == 0))
    if not lengths or min(lengths) < 1 or any(n < 1 or world_size % n for n in tried):
        message = (
            f"plan_sequences: lengths={list(lengths)} must be at least one number >= 1, "
            f"and sizes={list(tried)} divide world_size={world_size}"
        )
        raise ValueError(message)
    found = [_plan_of_size(tuple(lengths), world_size // sp, sp, workload) for sp in sorted(tried)]
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
        ValueError: there is no request, or a length is below 1.
    """
    if not lengths or min(lengths) < 1:
        message = f"data_parallel: lengths={list(lengths)} must be at least one number >= 1"
        raise ValueError(message)
    members = tuple(tuple(range(rank, len(lengths), world_size)) for rank in range(world_size))
    times = tuple(workload.step_us([lengths[r] for r in group], 1, 1) for group in members)
    return SequencePlan(tuple(lengths), 1, members, times)
