"""Queries by heads, latents and indexer keys by sequence: equal to one rank."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from latent_problem import CHOSEN, inputs, layer, sharded, whole
from rank_pool import RankPool

from ulysses_ops import UlyssesCommunicator, all_gather
from ulysses_ops.indexer import index_scores, select_rows, select_sharded_rows
from ulysses_ops.mixed_attention import mixed_attention

Ranks = Callable[[int], RankPool]


def equal_to_one_rank(rank: int, world_size: int, splits: tuple[int, ...], num_heads: int) -> None:
    weights = layer(num_heads, 40)
    with UlyssesCommunicator(timeout_s=10, max_windows=24) as comm:
        for sparse in (False, True):
            for salt in range(2):
                x = inputs(sum(splits), 40, salt)
                expected = whole(weights, x, sparse=sparse).split(list(splits), dim=1)[rank]
                own = x.split(list(splits), dim=1)[rank]
                got = sharded(weights, own, comm, splits, sparse=sparse)
                torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
        dense = sharded(weights, own, comm, splits, sparse=False)
        first_few = sum(splits[: rank + 1]) <= CHOSEN  # these rows choose all that they may see
        assert own.numel() == 0 or first_few or not torch.allclose(dense, got)
        wrong = sharded(weights, own, comm, splits, sparse=True, shift=int(rank > 0))
        assert own.numel() == 0 or not torch.allclose(wrong, expected, rtol=1e-2)


@pytest.mark.parametrize(
    ("splits", "num_heads"),
    [((6, 6), 4), ((9, 4), 5), ((0, 3), 2), ((4, 3, 3, 3), 8), ((1, 0, 9, 2), 6)],
)
def test_equal_to_one_rank(ranks: Ranks, splits: tuple[int, ...], num_heads: int) -> None:
    ranks(len(splits)).run(equal_to_one_rank, splits, num_heads, timeout_s=40)


def both_choices(rank: int, world_size: int, splits: tuple[int, ...]) -> None:
    """Keys gathered, or left where they are: the same rows, in the same order."""
    weights = layer(2, 40)
    total = sum(splits)
    with UlyssesCommunicator(timeout_s=10) as comm:
        x = inputs(total, 40)
        own = x.split(list(splits), dim=1)[rank]
        q, weight, keys = weights.index(own)
        scores = index_scores(q, weight, all_gather(keys, comm, seq_splits=splits), 0.5)
        gathered = select_rows(scores, 4, comm, seq_splits=splits)
        every_q, every_weight, every_key = weights.index(x)
        columns = every_key.split(list(splits), dim=1)[rank]
        left = index_scores(every_q, every_weight, columns, 0.5)
        assert torch.equal(select_sharded_rows(left, 4, comm, seq_splits=splits), gathered)
        worst = select_sharded_rows(-left, 4, comm, seq_splits=splits)
        assert not torch.equal(worst, gathered)
        nothing = torch.full((2, splits[rank], total), -torch.inf)
        nothing[..., 0] = 1.0
        assert select_rows(nothing, 3, comm, seq_splits=splits)[0, 0].tolist() == [0, -1, -1]


def test_both_ways_to_choose_rows_agree(ranks: Ranks) -> None:
    ranks(2).run(both_choices, (7, 5), timeout_s=20)
    ranks(4).run(both_choices, (2, 0, 6, 3), timeout_s=20)


def wrong_rows(rank: int, world_size: int) -> str:
    """Rows of one rank that are not as declared: refused by all, with nothing in flight."""
    with UlyssesCommunicator(timeout_s=5) as comm:
        q, c = torch.ones(1, 3, 2, 4), torch.ones(1, 3 + rank, 1, 4)
        call = partial(
            mixed_attention, comm=comm, attend=lambda q, c: q, value_dim=4, seq_splits=(3, 3)
        )
        with pytest.raises(ValueError, match=r"rank 1 holds \[3, 4\] rows") as error:
            call(q, [c])
        good = call(q, [c[:, :3]])
        assert torch.equal(good, q)
    return str(error.value)


def test_wrong_rows_are_refused_by_all(ranks: Ranks) -> None:
    assert len(set(ranks(2).run(wrong_rows, timeout_s=20))) == 1


def wrong_batch(rank: int, world_size: int) -> str:
    """A shared source of one rank has another batch: refused by all, with nothing in flight."""
    with UlyssesCommunicator(timeout_s=5) as comm:
        q, c = torch.ones(1, 3, 2, 4), torch.ones(1 + rank, 3, 1, 4)
        call = partial(mixed_attention, comm=comm, attend=lambda q, c: q, value_dim=4)
        with pytest.raises(ValueError, match=r"are \[1, 2\] on rank 1; give all of one") as error:
            call(q, [c])
        assert torch.equal(call(q, [c[:1]]), q)
    return str(error.value)


def test_a_wrong_batch_is_refused_by_all(ranks: Ranks) -> None:
    assert len(set(ranks(2).run(wrong_batch, timeout_s=20))) == 1


def test_sources_of_other_dimensions_are_refused() -> None:
    with (
        UlyssesCommunicator(device="cpu") as comm,
        pytest.raises(ValueError, match=r"must have shape \(B, S_local, H, D\)"),
    ):
        mixed_attention(torch.ones(1, 2, 3), [], comm, attend=lambda q: q, value_dim=3)
