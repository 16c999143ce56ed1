"""A cache of sharded rows refuses what does not fit, and takes no slot for it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from rank_pool import RankPool
from torch import Tensor

from ulysses_ops import UlyssesCommunicator
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
