"""Which heads a rank attends with, and which KV heads it needs for them (GQA, MQA).

Query head ``h`` reads KV head ``h // (H / H_kv)`` (repeat-interleave order). A rank is sent the KV
heads that its query heads read and no others, so where there are fewer KV heads than ranks, or
where a group of query heads lies across two ranks, the ranges of two ranks overlap.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from .plan import even_splits


@dataclass(frozen=True)
class HeadShare:
    """Heads of every rank.

    Attributes:
        q_splits: Query heads of each rank; their sum is H.
        kv_splits: KV heads that each rank is sent.
        kv_starts: First of them.
        queries_per_kv: For each rank, how many of its query heads read each of its KV heads.
    """

    q_splits: tuple[int, ...]
    kv_splits: tuple[int, ...]
    kv_starts: tuple[int, ...]
    queries_per_kv: tuple[tuple[int, ...], ...]

    @property
    def is_even(self) -> bool:
        """Whether every rank has as many heads as any other, and each head goes to one rank."""
        kv_starts = accumulate(self.kv_splits[:-1], initial=0)
        return (
            len(set(self.q_splits)) == len(set(self.kv_splits)) == 1
            and tuple(kv_starts) == self.kv_starts
        )

    def expand(self, x: Tensor, rank: int) -> Tensor:
        """KV heads as a kernel with GQA takes them: each read by the same number of query heads.

        Args:
            x: ``(B, S, kv_splits[rank], D)``.
            rank: This rank.

        Returns:
            ``x`` itself, or a copy in which heads that more query heads read come more often.
        """
        counts = self.queries_per_kv[rank]
        if len(set(counts)) <= 1:
            return x
        unit = math.gcd(*counts)
        heads = [
            x.narrow(2, head, 1).expand(-1, -1, count // unit, -1)
            for head, count in enumerate(counts)
        ]
        return torch.cat(heads, dim=2)


def share_heads(
    num_heads: int,
    num_kv_heads: int,
    world_size: int,
    head_splits: tuple[int, ...] | None = None,
) -> HeadShare:
    """Divide query heads over the ranks, and find the KV heads that each rank needs.

    As evenly as it goes: no rank gets more than ``ceil(H / world_size)`` query heads. Where
    ``world_size`` is a multiple of ``H_kv``, rank ``r`` gets the one KV head
    ``r * H_kv // world_size`` and a share of the query heads that read it.

    Args:
        num_heads: H.
        num_kv_heads: ``H_kv``.
        world_size: Number of ranks.
        head_splits: Query heads of each rank, to have it otherwise; some may be 0.

    Raises:
        ValueError: H is no multiple of ``H_kv``, some rank would get no head, or ``head_splits`` do
            not add up to H.
    """
    # Asked at every eager call; a compiler traces what a cache would hide from it.
    share = _share if torch.compiler.is_compiling() else _cached_share
    return share(num_heads, num_kv_heads, world_size, head_splits)


def _share(
    num_heads: int, num_kv_heads: int, world_size: int, head_splits: tuple[int, ...] | None
) -> HeadShare:
    op = "ulysses_attention"
    if num_heads < 1 or num_kv_heads < 1 or num_heads % num_kv_heads != 0:
        message = (
            f"{op}: H={num_heads} must be a multiple of H_kv={num_kv_heads}, whatever world_size "
            f"is (it is {world_size}); repeat or pad heads until each KV head serves as many "
            f"query heads as any other"
        )
        raise ValueError(message)
    if head_splits is None:
        q_splits = _even_heads(op, num_heads, num_kv_heads, world_size)
    else:
        q_splits = head_splits
        if len(q_splits) != world_size or min(q_splits) < 0 or sum(q_splits) != num_heads:
            message = (
                f"{op}: head_splits={list(q_splits)} must be {world_size} sizes >= 0, one for each "
                f"rank, that add up to H={num_heads}"
            )
            raise ValueError(message)
    group = num_heads // num_kv_heads
    kv_splits, kv_starts, queries_per_kv = [], [], []
    first = 0
    for count in q_splits:
        end = first + count
        needed = range(first // group, -(-end // group)) if count > 0 else range(0)
        reads = (min(end, (head + 1) * group) - max(first, head * group) for head in needed)
        kv_starts.append(needed.start)
        kv_splits.append(len(needed))
        queries_per_kv.append(tuple(reads))
        first = end
    return HeadShare(q_splits, tuple(kv_splits), tuple(kv_starts), tuple(queries_per_kv))


_cached_share = lru_cache(maxsize=256)(_share)


def _even_heads(op: str, num_heads: int, num_kv_heads: int, world_size: int) -> tuple[int, ...]:
    if num_heads < world_size:
        message = (
            f"{op}: H={num_heads} cannot give each of world_size={world_size} ranks a head; use "
            f"one of {list(range(1, num_heads + 1))} ranks, or give head_splits with zeros"
        )
        raise ValueError(message)
    if world_size % num_kv_heads == 0:
        # Shares that keep to one KV head are no larger than those that do not.
        ranks_per_kv = world_size // num_kv_heads
        return even_splits(num_heads // num_kv_heads, ranks_per_kv) * num_kv_heads
    return even_splits(num_heads, world_size)
