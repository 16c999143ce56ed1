"""A cache of sharded rows refuses what does not fit, and takes no slot for it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from rank_pool import RankPool
from torch import Tensor

from ulysses_ops import UlyssesCommunicator, sequence_cache
from ulysses_ops.cached_attention import attend_cached, attend_cached_rows
from ulysses_ops.latent import LatentHeads
from ulysses_ops.sequence_cache import SequenceCache

Ranks = Callable[[int], RankPool]


def test_what_is_refused() -> None:
    with UlyssesCommunicator(device="cpu") as comm:
        cache = SequenceCache(comm, batch=1, capacity=4, heads=2, head_dim=8, dtype=torch.float32)
        with pytest.raises(ValueError, match=r"new rows are \[1, 3, 1, 8\]"):
            cache.append(torch.zeros(1, 3, 1, 8))
        with pytest.raises(
            ValueError, match=r"and \[1, 2, 2, 8\], torch.float32, on cpu have a pl"
        ):
            cache.append(torch.zeros(1, 3, 2, 8), [2])
        cache.append(torch.zeros(1, 3, 2, 8))
        with pytest.raises(ValueError, match="has 1 of 4 slots free"):
            cache.append(torch.zeros(1, 2, 2, 8))
        with pytest.raises(ValueError, match="slots=5 must be from 1 to 4"):
            cache.read(slots=5)
        for slots in (0, 2.0, True, "2"):
            with pytest.raises(ValueError, match="must be from 1 to 4"):
                cache.positions(slots)  # type: ignore[arg-type]
        for read in (cache.read, cache.positions):
            with pytest.raises(
                ValueError, match="slots=2 would leave out 1 rows of rank 0, that at"
            ):
                read(slots=2)
        assert cache.positions(3).tolist() == [0, 1, 2]
        assert cache.read(slots=3).shape == (1, 3, 2, 8)
        placement = cache.place(1)
        with pytest.raises(ValueError, match="new rows are"):
            cache.write(torch.zeros(1, 1, 2, 8, dtype=torch.float64), cache.slots(placement))
        cache.truncate(2)
        assert cache.read(slots=2).shape == (1, 2, 2, 8)


def test_refused_rows_take_no_slots() -> None:
    good = torch.ones(1, 3, 2, 8)
    wrong = [good.double(), good[:, :, :1], good.squeeze(0), good[..., :4], torch.ones(3)]
    with UlyssesCommunicator(device="cpu") as comm:
        cache = SequenceCache(comm, batch=1, capacity=4, heads=2, head_dim=8, dtype=torch.float32)
        for x in wrong:
            for append in (cache.append, cache.append_replicated):
                with pytest.raises(ValueError, match="new rows are"):
                    append(x)
        with pytest.raises(ValueError, match="must be 1 sizes"):
            cache.append(good, [3, 3])
        slots = torch.zeros(3, dtype=torch.int32)
        with pytest.raises(ValueError, match=r"must be \(n,\), torch.int64"):
            cache.write(good, slots)
        assert cache.account.used() == (0,)
        assert cache.account.length == 0
        assert cache.append(good).first == 0
        assert cache.account.used() == (3,)


def test_a_write_that_fails_takes_no_slots() -> None:
    good = torch.ones(1, 2, 2, 8)
    with UlyssesCommunicator(device="cpu") as comm:
        for keep in ("all", "latest"):
            cache = SequenceCache(
                comm, batch=1, capacity=2, heads=2, head_dim=8, dtype=good.dtype, keep=keep
            )
            cache.append(good[:, :1])
            before = cache.positions().tolist()
            for append in (cache.append, cache.append_replicated):
                with pytest.raises(ValueError, match=r"x is torch\.sparse_coo"):
                    append(good[:, :1].to_sparse())
                with pytest.raises(ValueError, match="x is a meta tensor"):
                    append(good[:, :1].to("meta"))
                broken = mock.patch.object(cache, "write", side_effect=RuntimeError("broken"))
                with broken, pytest.raises(RuntimeError, match="broken"):
                    append(good[:, :1])
            assert cache.positions().tolist() == before
            assert (cache.account.length, cache.append(good[:, :1]).first) == (1, 1)


def test_rows_of_a_byte_are_written() -> None:
    x = torch.tensor([1.5, -2.0, 0.25, 3.0]).view(1, 2, 1, 2)
    with UlyssesCommunicator(device="cpu") as comm:
        for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8):
            cache = SequenceCache(comm, batch=1, capacity=3, heads=1, head_dim=2, dtype=dtype)
            cache.append(x.to(dtype))
            assert torch.equal(cache.rows[:, :2].float(), x.to(dtype).float())
            assert torch.equal(cache.read(slots=2).float(), x.to(dtype).float())


def test_a_slot_that_is_not_there_is_refused() -> None:
    x = torch.ones(1, 2, 1, 2)
    with UlyssesCommunicator(device="cpu") as comm:
        cache = SequenceCache(comm, batch=1, capacity=4, heads=1, head_dim=2, dtype=x.dtype)
        for wrong in (5, -1):
            with pytest.raises(ValueError, match=f"slots hold {wrong}, and a slot is from 0 to 4"):
                cache.write(x, torch.tensor([0, wrong]))
        assert cache.rows.count_nonzero() == 0
        cache.write(x, torch.tensor([0, 4]))  # the last one is spare
        assert cache.rows.count_nonzero() == 2
        placement = cache.place(1)
        for text in ("no", 1, None):
            with pytest.raises(ValueError, match=r"replicated=.* must be True or False"):
                cache.slots(placement, replicated=text)  # type: ignore[arg-type]


def appended(rank: int, world_size: int) -> tuple[str, list[int]]:
    """Rank 1 has a row more, and nobody says so; then all say so."""
    x = torch.ones(1, 2 + rank, 1, 2)
    with UlyssesCommunicator(device="cpu", timeout_s=20.0) as comm:
        cache = SequenceCache(comm, batch=1, capacity=4, heads=1, head_dim=2, dtype=torch.float32)
        with pytest.raises(ValueError, match="ranks ask for different exchanges") as refused:
            cache.append(x)
        assert cache.account.length == 0
        cache.append(x, (2, 3))
        return str(refused.value), cache.positions().tolist()


def test_ranks_that_hold_different_numbers_of_rows_say_so(ranks: Ranks) -> None:
    one, other = ranks(2).run(appended, timeout_s=30)
    assert one == other
    assert "seq [2, 2]" in one[0]
    assert "seq [3, 3]" in one[0]
    assert one[1] == [0, 1, -1, -1, 2, 3, 4, -1]


def told(cache: SequenceCache, x: Tensor, splits: list[int] | None) -> str:
    """What an append is told."""
    try:
        cache.append(x, splits)
    except ValueError as error:
        return str(error)
    return "appended"


def declared(rank: int, world_size: int, is_shared: bool) -> tuple[list[str], int]:
    """Splits that are not what rank 1 holds, splits that differ, a dtype of one rank, no row."""
    x = torch.ones(1, 4, 1, 2)
    texts = []
    with contextlib.ExitStack() as stack:
        comm = stack.enter_context(UlyssesCommunicator(device="cpu", timeout_s=20.0))
        cache = SequenceCache(comm, batch=1, capacity=9, heads=1, head_dim=2, dtype=x.dtype)
        if not is_shared:
            stack.enter_context(mock.patch.object(sequence_cache, "agree"))
            alone = mock.patch.object(sequence_cache, "refuse", side_effect=ValueError("alone"))
            stack.enter_context(alone)
        own = x.double() if rank else x
        given = [(x, [4, 5]), (x, [4 - rank, 4]), (own, [4, 4]), (x[:, : 4 * rank], None)]
        for rows, splits in given:
            texts.append(told(cache, rows, splits))
        if is_shared:
            assert cache.account.length == 0
            cache.append(x, [4, 4])
        return texts, cache.account.length


def test_ranks_whose_splits_are_wrong_say_so_together(ranks: Ranks) -> None:
    one, other = ranks(2).run(declared, True, timeout_s=40)
    assert one == other
    assert one[1] == 8
    said = ["[1, 5, 1, 2], torch.float32, on cpu have a place on rank 1", "different exchanges"]
    said += ["new rows are [1, 4, 1, 2], torch.float64", "seq [0, 0]"]
    for text, sentence in zip(said, one[0], strict=True):
        assert text in sentence


def test_control_without_the_meeting_accounts_differ(ranks: Ranks) -> None:
    one, other = ranks(2).run(declared, False, timeout_s=40)
    assert one[1] != other[1]


def test_a_cache_keeps_no_graph_of_gradients() -> None:
    x = torch.ones(1, 1, 1, 2, requires_grad=True)
    with UlyssesCommunicator(device="cpu") as comm:
        cache = SequenceCache(comm, batch=1, capacity=4, heads=1, head_dim=2, dtype=torch.float32)
        with pytest.raises(ValueError, match="x requires grad, and a cache has no gradient"):
            cache.append(x)
        assert cache.account.length == 0
        with torch.no_grad():
            cache.append(x)
        assert not cache.rows.requires_grad


def attended(
    comm: UlyssesCommunicator, cached: UlyssesCommunicator, cache_heads: int, counts: Tensor
) -> Tensor:
    """Three queries of two heads with a cache of three slots."""
    heads = LatentHeads(torch.ones(2, 5, 4), 2, 1.0)
    cache = SequenceCache(
        cached, batch=1, capacity=3, heads=cache_heads, head_dim=6, dtype=torch.float32
    )
    return attend_cached(torch.ones(1, 3, 2, 4), cache, comm, heads, counts)


def test_what_a_cache_cannot_be_attended_with() -> None:
    counts = torch.ones(3, 3, dtype=torch.bool)
    q, selected = torch.ones(1, 3, 2, 4), torch.zeros(1, 3, 2, dtype=torch.int64)
    with (
        UlyssesCommunicator(device="cpu") as comm,
        UlyssesCommunicator(device="cpu", name="other") as other,
    ):
        assert attended(comm, comm, 1, counts).shape == (1, 3, 2, 3)
        # As many heads as queries: each query would have met the rows of one head.
        with pytest.raises(ValueError, match="attend_cached: rows of the cache are"):
            attended(comm, comm, 3, counts)
        with pytest.raises(ValueError, match="the cache is of communicator 'other'"):
            attended(comm, other, 1, counts)
        for wrong in (counts.int(), counts[:1], counts[:, :1], counts[0]):
            with pytest.raises(ValueError, match="attend_cached: counts are"):
                attended(comm, comm, 1, wrong)
        cache = SequenceCache(comm, batch=1, capacity=3, heads=1, head_dim=6, dtype=torch.float32)
        heads = LatentHeads(torch.ones(2, 5, 4), 2, 1.0)
        assert attend_cached_rows(q, cache, comm, heads, selected).shape == (1, 3, 2, 3)
        for rows in (selected.bool(), selected.float(), selected[:, :1], selected[0]):
            with pytest.raises(ValueError, match="attend_cached_rows: selected is"):
                attend_cached_rows(q, cache, comm, heads, rows)
        last = cache.capacity - 1
        cache.rows.fill_(1.0)
        assert attend_cached_rows(q, cache, comm, heads, selected - 1).count_nonzero() == 0
        assert attend_cached_rows(q, cache, comm, heads, (selected + last).to(torch.uint8)).any()
        for number in (-2, 3):
            with pytest.raises(ValueError, match=f"selected holds {number}, and rows of the cache"):
                attend_cached_rows(q, cache, comm, heads, selected.fill_(number))


def test_attention_with_a_cache_has_no_gradient_and_says_so() -> None:
    counts = torch.ones(3, 3, dtype=torch.bool)
    q, selected = torch.ones(1, 3, 2, 4), torch.zeros(1, 3, 2, dtype=torch.int64)
    up = torch.ones(2, 5, 4)
    with UlyssesCommunicator(device="cpu") as comm:
        cache = SequenceCache(comm, batch=1, capacity=3, heads=1, head_dim=6, dtype=q.dtype)
        for which in ("q", "heads.up"):
            q_in = q.clone().requires_grad_(which == "q")
            heads = LatentHeads(up.clone().requires_grad_(which == "heads.up"), 2, 1.0)
            with pytest.raises(ValueError, match=f"attend_cached: {which} requires grad, and a ca"):
                attend_cached(q_in, cache, comm, heads, counts)
            with pytest.raises(ValueError, match=f"attend_cached_rows: {which} requires grad"):
                attend_cached_rows(q_in, cache, comm, heads, selected)
            with torch.no_grad():
                assert not attend_cached(q_in, cache, comm, heads, counts).requires_grad


def test_attention_with_a_cache_takes_dense_tensors_alone() -> None:
    counts = torch.ones(3, 3, dtype=torch.bool)
    q, selected = torch.ones(1, 3, 2, 4), torch.zeros(1, 3, 2, dtype=torch.int64)
    heads = LatentHeads(torch.ones(2, 5, 4), 2, 1.0)
    with UlyssesCommunicator(device="cpu") as comm:
        cache = SequenceCache(comm, batch=1, capacity=3, heads=1, head_dim=6, dtype=q.dtype)
        for message, bad in (
            ("x is torch.sparse_coo, and must be a dense", Tensor.to_sparse),
            ("x is a meta tensor", lambda x: x.to("meta")),
        ):
            with pytest.raises(ValueError, match=f"attend_cached: {message}"):
                attend_cached(bad(q), cache, comm, heads, counts)
            with pytest.raises(ValueError, match=f"attend_cached: {message}"):
                attend_cached(q, cache, comm, heads, bad(counts))
            with pytest.raises(ValueError, match=f"attend_cached_rows: {message}"):
                attend_cached_rows(bad(q), cache, comm, heads, selected)
            with pytest.raises(ValueError, match=f"attend_cached_rows: {message}"):
                attend_cached_rows(q, cache, comm, heads, bad(selected))
