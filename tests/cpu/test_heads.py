"""Heads of every rank: together they attend as one rank does, and none gets heads in vain."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ulysses_ops import sdpa
from ulysses_ops.heads import HeadShare, share_heads

CASES = [
    (28, 7, 2),
    (40, 8, 16),
    (6, 3, 2),
    (8, 1, 4),
    (12, 12, 8),
    (16, 2, 4),
    (42, 7, 4),
    (40, 8, 4),
    (24, 6, 9),
    (4, 4, 4),
]


def qkv(heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    sizes = (heads, kv_heads, kv_heads)
    q, k, v = (torch.randn(1, 5, n, 4, dtype=torch.float64, generator=generator) for n in sizes)
    return q, k, v


def attended_in_shares(share: HeadShare, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What all ranks compute, side by side."""
    parts = []
    for rank, queries in enumerate(q.split(list(share.q_splits), dim=2)):
        if queries.shape[2] > 0:
            kv_range = (2, share.kv_starts[rank], share.kv_splits[rank])
            keys, values = (share.expand(x.narrow(*kv_range), rank) for x in (k, v))
            parts.append(sdpa(queries, keys, values))
    return torch.cat(parts, dim=2)


@pytest.mark.parametrize(("heads", "kv_heads", "world_size"), CASES)
def test_all_shares_together_are_the_attention_of_one_rank(
    heads: int, kv_heads: int, world_size: int
) -> None:
    share = share_heads(heads, kv_heads, world_size)
    whole = qkv(heads, kv_heads)
    torch.testing.assert_close(attended_in_shares(share, *whole), sdpa(*whole))
    assert sum(share.q_splits) == heads
    assert max(share.q_splits) == -(-heads // world_size)
    group = heads // kv_heads
    first = 0
    for rank, count in enumerate(share.q_splits):
        needed = {head // group for head in range(first, first + count)}
        start = share.kv_starts[rank]
        assert needed == set(range(start, start + share.kv_splits[rank]))  # and no other
        first += count


def test_the_comparison_sees_a_wrong_kv_head() -> None:
    share = share_heads(16, 2, 4)
    whole = qkv(16, 2)
    wrong = replace(share, kv_starts=(0, 1, 0, 1))
    assert not torch.allclose(attended_in_shares(wrong, *whole), sdpa(*whole))
    uneven = share_heads(28, 7, 2)
    blind = replace(uneven, queries_per_kv=((1, 1, 1, 1), (2, 4, 4, 4)))
    whole = qkv(28, 7)
    with pytest.raises(RuntimeError):  # 14 query heads over 4 KV heads
        attended_in_shares(blind, *whole)


@pytest.mark.parametrize(("kv_heads", "world_size"), [(2, 4), (1, 4), (8, 16), (4, 4)])
def test_with_fewer_kv_heads_than_ranks_each_rank_gets_the_one_of_its_place(
    kv_heads: int, world_size: int
) -> None:
    share = share_heads(40 * kv_heads, kv_heads, world_size)
    assert share.kv_starts == tuple(rank * kv_heads // world_size for rank in range(world_size))
    assert share.kv_splits == (1,) * world_size
    assert share.is_even == (kv_heads == world_size)


def test_nothing_is_copied_where_every_kv_head_is_read_as_often() -> None:
    k = torch.randn(1, 5, 4, 4)
    for share in (share_heads(16, 8, 2), share_heads(8, 4, 1), share_heads(16, 2, 4)):
        part = k[:, :, : share.kv_splits[0]]
        assert share.expand(part, 0) is part
    expanded = share_heads(28, 7, 2).expand(k, 0)  # read by 4, 4, 4 and 2 query heads
    assert torch.equal(expanded, k[:, :, [0, 0, 1, 1, 2, 2, 3]])


def test_heads_as_the_caller_divides_them() -> None:
    share = share_heads(8, 4, 3, (5, 0, 3))
    assert (share.kv_starts, share.kv_splits) == ((0, 0, 2), (3, 0, 2))
    whole = qkv(8, 4)
    torch.testing.assert_close(attended_in_shares(share, *whole), sdpa(*whole))
