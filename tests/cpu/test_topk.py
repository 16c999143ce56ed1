"""distributed_topk: equal to the top-k of the whole rows, ties, NaN and short ranks included."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_pool import RankError, RankPool
from torch import Tensor

from ulysses_ops import UlyssesCommunicator, UlyssesError
from ulysses_ops import topk as topk_module
from ulysses_ops.indexer import index_scores
from ulysses_ops.topk import distributed_topk, top_rows

Ranks = Callable[[int], RankPool]
NUMBERS = (0.0, -0.0, 1.0, 1.0, -1.0, 2.5, math.inf, -math.inf, math.nan, -math.nan, 1e-40, -3.0)


def by_definition(row: list[float], k: int) -> list[int]:
    """Columns by value, then column; NaN first; written without any tensor."""

    def place(column: int) -> tuple[bool, float, int]:
        value = row[column]
        is_number = not math.isnan(value)
        return (is_number, -value if is_number else 0.0, column)

    return sorted(range(len(row)), key=place)[:k]


@given(
    st.lists(st.sampled_from(NUMBERS) | st.floats(width=16), min_size=1, max_size=30),
    st.data(),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
@settings(deadline=None, max_examples=200)
def test_top_rows_by_definition(row: list[float], data: st.DataObject, dtype: torch.dtype) -> None:
    scores = torch.tensor([row], dtype=dtype)
    k = data.draw(st.integers(1, len(row)))
    values, columns = top_rows(scores, k)
    assert columns[0].tolist() == by_definition(scores[0].tolist(), k)
    torch.testing.assert_close(values, scores.gather(1, columns), equal_nan=True, rtol=0, atol=0)
    assert values.dtype == dtype


def test_of_numbers_that_differ_it_is_the_topk_of_torch() -> None:
    scores = torch.randperm(4000, generator=torch.Generator().manual_seed(1)).float().view(4, 1000)
    values, columns = top_rows(scores, 100)
    expected = scores.topk(100)
    assert torch.equal(values, expected.values)
    assert torch.equal(columns, expected.indices)


def with_ties(batch: int, queries: int, columns: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    picked = torch.randint(len(NUMBERS), (batch, queries, columns), generator=generator)
    return torch.tensor(NUMBERS)[picked]


def over_ranks(rank: int, world_size: int, splits_of: list[list[int]]) -> None:
    with UlyssesCommunicator(timeout_s=10, max_windows=4) as comm:
        for seed, splits in enumerate(splits_of):
            whole = with_ties(2, 3, sum(splits), seed)
            for k in {1, min(3, sum(splits)), sum(splits)}:
                expected = top_rows(whole, k)
                own = whole.split(splits, dim=2)[rank]
                values, columns = distributed_topk(own, k, comm, seq_splits=splits)
                assert torch.equal(columns, expected[1]), (splits, k)
                assert torch.equal(values.view(torch.int32), expected[0].view(torch.int32))
        even = whole[..., : sum(splits) // world_size * world_size]
        if even.shape[2]:
            own = even.chunk(world_size, dim=2)[rank]
            assert torch.equal(distributed_topk(own, 1, comm)[1], top_rows(even, 1)[1])


SPLITS = st.lists(st.integers(0, 7), min_size=4, max_size=4).filter(lambda sizes: sum(sizes) > 0)


@given(st.lists(SPLITS, min_size=4, max_size=12))
@settings(deadline=None, max_examples=4)
def test_over_ranks_it_is_that_of_the_whole(ranks: Ranks, splits_of: list[list[int]]) -> None:
    ranks(4).run(over_ranks, splits_of, timeout_s=60)


def test_over_two_ranks_of_which_one_may_hold_fewer_than_k(ranks: Ranks) -> None:
    ranks(2).run(over_ranks, [[1, 6], [0, 5], [9, 2], [3, 3]], timeout_s=30)


def without_offset(rank: int, world_size: int, splits_of: list[list[int]]) -> None:
    """The same, with keys that forget where a rank's columns begin."""
    keys = topk_module._keys
    with mock.patch.object(topk_module, "_keys", lambda scores, first: keys(scores, 0)):
        over_ranks(rank, world_size, splits_of)


def test_the_comparison_sees_columns_of_the_wrong_rank(ranks: Ranks) -> None:
    with pytest.raises(RankError, match="AssertionError"):
        ranks(2).run(without_offset, [[4, 4]], timeout_s=30)


def uneven_without_splits(rank: int, world_size: int) -> list[str]:
    """As many candidates come from each rank, so that their exchange looks right."""
    whole = torch.arange(13.0).view(1, 1, 13)
    own = whole.split([6, 7], dim=2)[rank]
    texts = []
    with UlyssesCommunicator(device="cpu", timeout_s=20.0) as comm:
        for scores in (own, own[:, :, :6].to((torch.float32, torch.bfloat16)[rank])):
            with pytest.raises(ValueError, match="ranks ask for different exchanges") as refused:
                distributed_topk(scores, 2, comm)
            texts.append(str(refused.value))
        values, columns = distributed_topk(own, 2, comm, seq_splits=(6, 7))
        assert (values.tolist(), columns.tolist()) == ([[[12.0, 11.0]]], [[[12, 11]]])
    return texts


def test_ranks_that_hold_other_columns_than_they_say_are_refused(ranks: Ranks) -> None:
    one, other = ranks(2).run(uneven_without_splits, timeout_s=30)
    assert one == other
    assert "seq [6, 6]" in one[0]
    assert "seq [7, 7]" in one[0]
    assert "torch.bfloat16" in one[1]


def declared_wrongly(rank: int, world_size: int) -> list[str]:
    """Rank 1 lacks a column that the splits give it; then ranks differ in B, Q and k."""
    scores = torch.arange(16.0).view(2, 2, 4) + 100 * rank
    texts = []
    with UlyssesCommunicator(device="cpu", timeout_s=20.0) as comm:
        begun = time.monotonic()
        for own, k, splits in (
            (scores, 2, [4, 5]),
            (scores[: 1 + rank], 2, None),
            (scores[:, : 1 + rank], 2, None),
            (scores, 2 + rank, None),
        ):
            with pytest.raises(ValueError, match=r"distributed_topk|different") as refused:
                distributed_topk(own, k, comm, seq_splits=splits)
            texts.append(str(refused.value))
        assert time.monotonic() - begun < 10  # nobody waited for the limit
        assert distributed_topk(scores, 1, comm)[1].unique().tolist() == [7]
    return texts


def test_what_one_rank_has_wrong_all_ranks_say(ranks: Ranks) -> None:
    one, other = ranks(2).run(declared_wrongly, timeout_s=40)
    assert one == other
    assert "rank 1 holds 4 columns, seq_splits=[4, 5] say 5" in one[0]
    assert "[1, 8, 2, 1]" in one[1]
    assert "[2, 8, 2, 1]" in one[1]
    assert "[2, 8, 1, 1]" in one[2]
    assert "'distributed_topk, k=2'" in one[3]
    assert "'distributed_topk, k=3'" in one[3]


def refused_alone(rank: int, world_size: int) -> str:
    """Control: what is refused before the meeting leaves the other rank waiting for its limit."""
    with (
        mock.patch.object(topk_module, "refuse", side_effect=ValueError("alone")),
        UlyssesCommunicator(device="cpu", timeout_s=1.0) as comm,
    ):
        try:
            distributed_topk(torch.zeros(1, 1, 4), 2, comm, seq_splits=[4, 5])
        except (ValueError, UlyssesError) as error:
            return str(error)
        return "served"


def test_control_a_refusal_that_is_not_shared_costs_the_limit(ranks: Ranks) -> None:
    one, other = ranks(2).run(refused_alone, timeout_s=30)
    assert other == "alone"
    assert "waited 1 s for ranks [1]" in one or "rank 1, which left" in one


def unseen(rank: int, world_size: int) -> list[int]:
    """Control: without the meeting columns are counted from another place."""
    own = torch.arange(13.0).view(1, 1, 13).split([6, 7], dim=2)[rank]
    with (
        mock.patch.object(topk_module, "agree"),
        UlyssesCommunicator(device="cpu", timeout_s=20.0) as comm,
    ):
        columns: list[int] = distributed_topk(own, 1, comm)[1].flatten().tolist()
    return columns


def test_control_without_the_meeting_columns_are_wrong(ranks: Ranks) -> None:
    assert ranks(2).run(unseen, timeout_s=30) == [[13], [13]]


@pytest.mark.parametrize(
    ("scores", "k", "message"),
    [
        (torch.zeros(1, 2, 4), 5, "k=5 must be from 1 to the 4 columns"),
        (torch.zeros(1, 2, 4), 0, "k=0 must be from 1"),
        (torch.zeros(1, 2, 4, dtype=torch.float64), 1, "scores are torch.float64"),
        (torch.zeros(2, 4), 1, r"must have shape \(B, Q, S_local\)"),
        (torch.zeros(1, 2, 4).to_sparse(), 1, "distributed_topk: x is torch.sparse_coo, and must"),
        (torch.zeros(1, 2, 4, device="meta"), 1, "distributed_topk: x is a meta tensor"),
    ],
)
def test_what_is_refused(scores: Tensor, k: int, message: str) -> None:
    with (
        UlyssesCommunicator(device="cpu") as comm,
        pytest.raises(ValueError, match=message),
    ):
        distributed_topk(scores, k, comm)
    with (
        UlyssesCommunicator(device="cpu") as comm,
        pytest.raises(ValueError, match="rank 0 holds 4 columns"),
    ):
        distributed_topk(torch.zeros(1, 1, 4), 1, comm, seq_splits=[3])


def test_rows_that_are_not_there_or_not_dense_have_no_top() -> None:
    with pytest.raises(ValueError, match=r"top_rows: x is torch\.sparse_coo"):
        top_rows(torch.zeros(2, 4).to_sparse(), 1)
    with pytest.raises(ValueError, match="top_rows: x is a meta tensor"):
        top_rows(torch.zeros(2, 4, device="meta"), 1)


def test_a_scale_of_scores_is_a_number() -> None:
    q, weights, keys = torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3), torch.ones(1, 5, 1, 4)
    for scale in ("x", None, True, math.nan):
        with pytest.raises(ValueError, match=r"index_scores: scale=.* must be a finite number"):
            index_scores(q, weights, keys, scale)  # type: ignore[arg-type]
    assert index_scores(q, weights, keys, 2).unique().tolist() == [24.0]
