"""A cache sharded by sequence, over the steps of a loop: equal to one rank that keeps all rows."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from latent_problem import RANK, ROPE, SCALE, inputs, layer
from rank_pool import RankError, RankPool
from torch import Tensor

from ulysses_ops import UlyssesCommunicator, even_splits, gather, scatter, sdpa
from ulysses_ops.cached_attention import attend_cached, attend_cached_rows
from ulysses_ops.heads import share_heads
from ulysses_ops.indexer import index_scores, select_sharded_rows
from ulysses_ops.latent import LatentHeads, attend_latent, attend_selected
from ulysses_ops.row_slots import Placement, RowSlots
from ulysses_ops.sequence_cache import SequenceCache

Ranks = Callable[[int], RankPool]


# ---- the account ---------------------------------------------------------------------------------


@given(st.integers(1, 5), st.lists(st.integers(0, 9), min_size=1, max_size=8))
def test_ranks_fill_up_evenly_and_no_row_is_lost(world_size: int, steps: list[int]) -> None:
    slots = RowSlots(72, world_size)
    for rows in steps:
        before = slots.used()
        shares = slots.divide(rows)
        assert sum(shares) == rows
        assert min(shares) >= 0
        slots.place(shares)
        after = slots.used()
        assert after == tuple(b + s for b, s in zip(before, shares, strict=True))
        assert max(after) - min(after) <= 1
    held = [p for rank in range(world_size) for p in slots.positions(rank) if p >= 0]
    assert sorted(held) == list(range(sum(steps)))


def test_single_rows_go_round() -> None:
    slots = RowSlots(3, 3)
    assert [slots.divide(1) for _ in range(4) if slots.place(slots.divide(1))] == [
        (0, 1, 0),
        (0, 0, 1),
        (1, 0, 0),
        (0, 1, 0),
    ]


def test_uneven_shards_are_levelled_by_later_rows() -> None:
    slots = RowSlots(20, 3)
    slots.place((7, 0, 1))
    assert slots.divide(4) == (0, 3, 1)
    slots.place(slots.divide(13))
    assert slots.used() == (7, 7, 7)


def test_the_latest_rows_are_kept() -> None:
    slots = RowSlots(4, 2, "latest")
    for _ in range(3):
        placed = slots.place((2, 2))
    assert placed.first == 8
    assert sorted(slots.positions(0)) == [4, 5, 8, 9]
    assert sorted(slots.positions(1)) == [6, 7, 10, 11]
    slots.truncate(9)
    assert sorted(slots.positions(0)) == [-1, 4, 5, 8]
    assert slots.place((1, 0)).slots[0] == (slots.positions(0).index(9),)


@given(st.integers(1, 5), st.integers(1, 4), st.lists(st.integers(0, 9), max_size=20))
def test_divided_rows_leave_the_latest_of_all(
    world_size: int, capacity: int, steps: list[int]
) -> None:
    slots, total = RowSlots(capacity, world_size, "latest"), world_size * capacity
    for rows in [1] * (total + 2) + [min(rows, total) for rows in steps]:
        slots.place(slots.divide(rows))
        held = [p for rank in range(world_size) for p in slots.positions(rank) if p >= 0]
        assert sorted(held) == list(range(max(0, slots.length - total), slots.length))
    with pytest.raises(ValueError, match="slots free and is given"):
        slots.place(slots.divide(total + 1))


def test_the_oldest_row_is_overwritten_wherever_it_is() -> None:
    slots = RowSlots(2, 2, "latest")
    slots.place((2, 1))
    shares = [slots.divide(1) for _ in range(4) if slots.place(slots.divide(1))]
    assert [slots.positions(rank) for rank in (0, 1)] == [(4, 5), (6, 3)]
    assert shares == [(1, 0), (1, 0), (0, 1), (0, 1)]  # whose turn it is after each row
    always_the_first = RowSlots(2, 2, "latest")
    for shares_of_one in [(2, 1), (0, 1), (1, 0), (1, 0), (1, 0)]:
        always_the_first.place(shares_of_one)
    assert 2 in always_the_first.positions(1)  # older than what rank 0 lost


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        ((5, 0), "rank 0 has 4 of 4 slots free and is given 5 rows"),
        ((1, 1, 1), "must be 2 sizes"),
        ((-1, 1), "must be 2 sizes >= 0"),
    ],
)
def test_what_does_not_fit_is_refused_and_takes_nothing(
    splits: tuple[int, ...], message: str
) -> None:
    slots = RowSlots(4, 2)
    with pytest.raises(ValueError, match=message):
        slots.place(splits)
    assert slots.used() == (0, 0)
    assert slots.length == 0
    with pytest.raises(ValueError, match="capacity=0"):
        RowSlots(0, 2)
    with pytest.raises(ValueError, match="length=1 must be from 0 to the 0"):
        slots.truncate(1)


# ---- chunked prefill, and chunks of a video ------------------------------------------------------


def mask_of(positions: Tensor, first: int, queries: int) -> Tensor:
    """Which rows each query may see: itself and those before it."""
    rows = torch.arange(first, first + queries).view(-1, 1)
    return (positions >= 0) & (positions <= rows)


def chunked_prefill(rank: int, world_size: int, lost: bool = False) -> None:
    """Latents of chunk after chunk, read by all; queries by heads."""
    weights = layer(4, 40)
    chunks = [3 * world_size, world_size + 1, 1, 5]
    x = inputs(sum(chunks), 40)
    rows = weights.rows(x)
    shares = even_splits(4, world_size)
    mine = weights.heads(sum(shares[:rank]), shares[rank])
    first = 0
    with UlyssesCommunicator(timeout_s=10, max_windows=30) as comm:
        cache = SequenceCache(
            comm, batch=2, capacity=9, heads=1, head_dim=RANK + ROPE, dtype=torch.float32
        )
        for rows_of_chunk in chunks:
            splits = even_splits(rows_of_chunk, world_size)
            chunk = slice(first, first + rows_of_chunk)
            own_x = x[:, chunk].split(list(splits), dim=1)[rank]
            if not lost:
                cache.append(weights.rows(own_x), splits)
            else:  # as if the rows were never written
                cache.place(splits)
            q = scatter(weights.queries(own_x), comm, seq_splits=splits, head_splits=shares)
            everything = cache.read()
            assert everything.shape == (2, 9 * world_size, 1, RANK + ROPE)
            mask = mask_of(cache.positions(), first, rows_of_chunk)
            out = attend_latent(q, everything, mine, mask=mask)
            got = gather(out, comm, seq_splits=splits, head_splits=shares)
            every = weights.heads(0, 4)
            seen = torch.ones(sum(chunks), sum(chunks), dtype=torch.bool).tril()
            expected = attend_latent(
                weights.queries(x[:, chunk]), rows, every, mask=seen[chunk]
            ).split(list(splits), dim=1)[rank]
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
            first += rows_of_chunk


@pytest.mark.parametrize("world_size", [2, 4])
def test_chunked_prefill(ranks: Ranks, world_size: int) -> None:
    ranks(world_size).run(chunked_prefill, timeout_s=40)


def test_the_comparison_sees_rows_that_were_not_written(ranks: Ranks) -> None:
    with pytest.raises(RankError, match="AssertionError"):
        ranks(2).run(chunked_prefill, True, timeout_s=40)


def video_chunks(rank: int, world_size: int, heads: int, seen: int) -> None:
    """Chunk after chunk attends to the latest chunks and itself; keys of all heads are cached."""
    rows, chunks = 4 * world_size, 5
    generator = torch.Generator().manual_seed(2)
    wholes = [torch.randn(3, 1, rows * chunks, heads, 8, generator=generator)]
    q, k, v = wholes[0]
    splits = even_splits(rows, world_size)
    shares = even_splits(heads, world_size)
    options = {"batch": 1, "heads": heads, "head_dim": 8, "dtype": torch.float32}
    with UlyssesCommunicator(timeout_s=10, max_windows=30) as comm:
        keys, values = (
            SequenceCache(comm, capacity=4 * seen, keep="latest", name=name, **options)  # type: ignore[arg-type]
            for name in ("k", "v")
        )
        for chunk in range(chunks):
            there = slice(chunk * rows, (chunk + 1) * rows)
            own = [x[:, there].split(list(splits), dim=1)[rank] for x in (q, k, v)]
            keys.append(own[1])
            values.append(own[2])
            queries = scatter(own[0], comm, seq_splits=splits, head_splits=shares)
            mask = keys.positions() >= 0
            windows = (keys.read(heads="split"), values.read(heads="split"))
            out = sdpa(queries, *windows, mask=mask.view(1, 1, 1, -1))
            got = gather(out, comm, seq_splits=splits, head_splits=shares)
            past = slice(max(0, chunk + 1 - seen) * rows, (chunk + 1) * rows)
            expected = sdpa(q[:, there], k[:, past], v[:, past])
            torch.testing.assert_close(got, expected.split(list(splits), dim=1)[rank])


@pytest.mark.parametrize(("world_size", "heads"), [(2, 4), (4, 6)])
def test_chunks_of_a_video_with_a_sliding_window(ranks: Ranks, world_size: int, heads: int) -> None:
    ranks(world_size).run(video_chunks, heads, 3, timeout_s=40)


def groups_across_ranks(rank: int, world_size: int) -> None:
    """6 query heads read 3 KV heads: at W = 2 the middle one is read on both ranks."""
    rows, q_heads, kv_heads = 4, 6, 3
    generator = torch.Generator().manual_seed(3)
    q, k, v = (
        torch.randn(1, rows * world_size, heads, 8, generator=generator)
        for heads in (q_heads, kv_heads, kv_heads)
    )
    share = share_heads(q_heads, kv_heads, world_size)
    own = slice(rank * rows, (rank + 1) * rows)
    options = {"batch": 1, "capacity": rows, "heads": kv_heads, "head_dim": 8}
    with UlyssesCommunicator(timeout_s=10) as comm:
        caches = [
            SequenceCache(comm, name=name, dtype=torch.float32, **options)  # type: ignore[arg-type]
            for name in ("k", "v")
        ]
        for cache, x in zip(caches, (k, v), strict=True):
            cache.append(x[:, own])
        queries = scatter(q[:, own].contiguous(), comm, head_splits=share.q_splits)
        k_read, v_read = (
            share.expand(cache.read(heads="split", query_heads=q_heads), rank) for cache in caches
        )
        out = sdpa(queries, k_read, v_read)
        got = gather(out, comm, head_splits=share.q_splits)
        expected = sdpa(q, k, v)
        torch.testing.assert_close(got, expected[:, own])
        even = caches[0].read(heads="split").shape[2]
        assert (even == share.kv_splits[rank]) is (rank == 0)  # an even share has one too few
        for wrong in ({"heads": "all", "query_heads": 6}, {"heads": "split", "query_heads": 1.5}):
            with pytest.raises(ValueError, match="query_heads="):
                caches[0].read(**wrong)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"H=7 must be a multiple of H_kv=3"):
            caches[0].read(heads="split", query_heads=7)


def test_a_rank_reads_the_kv_heads_that_its_query_heads_need(ranks: Ranks) -> None:
    ranks(2).run(groups_across_ranks, timeout_s=30)


# ---- decoding ------------------------------------------------------------------------------------


def decode(rank: int, world_size: int) -> None:
    """One row a step: latents and indexer keys stay where they are, dense and selected."""
    weights = layer(4, 40)
    steps, k = 9, 3
    x = inputs(steps, 40)
    rows = weights.rows(x)
    every = weights.heads(0, 4)
    capacity = 9 if world_size == 1 else 5
    options = {"batch": 2, "capacity": capacity, "heads": 1, "dtype": torch.float32}
    with UlyssesCommunicator(timeout_s=10, max_windows=30) as comm:
        latents = SequenceCache(comm, head_dim=RANK + ROPE, name="latents", **options)  # type: ignore[arg-type]
        keys = SequenceCache(comm, head_dim=weights.index_k.shape[1], name="keys", **options)  # type: ignore[arg-type]
        for step in range(steps):
            now = x[:, step : step + 1]
            index_q, weight, key = weights.index(now)
            latents.append_replicated(weights.rows(now))
            keys.append_replicated(key)
            q = weights.queries(now)
            counts = latents.own_positions().view(1, -1) >= 0
            got = attend_cached(q, latents, comm, every, counts)
            expected = attend_latent(q, rows[:, : step + 1], every)
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)

            scores = index_scores(index_q, weight, keys.rows, SCALE)
            scores = scores.masked_fill(~counts, -torch.inf)
            selected = select_sharded_rows(scores, k, comm)
            sparse = attend_cached_rows(q, latents, comm, every, selected)
            # The same choice by positions, over rows in the order of the sequence.
            positions = latents.positions()
            by_position = torch.where(selected < 0, -1, positions[selected.clamp(min=0).long()])
            assert torch.equal((by_position >= 0).sum(-1), torch.full((2, 1), min(k, step + 1)))
            alone = index_scores(index_q, weight, weights.index(x[:, : step + 1])[2], SCALE)
            best = alone.topk(min(k, step + 1)).values
            # Keys alike in all but rounding give sums alike, whichever of equal rows was taken.
            taken = alone.gather(2, by_position.clamp(min=0)).masked_fill(by_position < 0, 0)
            torch.testing.assert_close(taken.sum(-1), best.sum(-1))
            expected = attend_selected(q, rows, every, by_position)
            torch.testing.assert_close(sparse, expected, rtol=1e-4, atol=1e-5)
            if step >= k:
                assert not torch.allclose(sparse, got)
        latents.truncate(4)  # drafts that were refused
        counts = latents.own_positions().view(1, -1) >= 0
        got = attend_cached(q, latents, comm, every, counts)
        torch.testing.assert_close(got, attend_latent(q, rows[:, :4], every), rtol=1e-4, atol=1e-5)
        with mock.patch("ulysses_ops.cached_attention.merge_partials", lambda a, t: a.mean(0)):
            wrong = attend_cached(q, latents, comm, every, counts)
        assert world_size == 1 or not torch.allclose(wrong, got, rtol=1e-3)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_decoding_over_caches_that_stay_where_they_are(ranks: Ranks, world_size: int) -> None:
    ranks(world_size).run(decode, timeout_s=60)


def replicated_rows(rank: int, world_size: int, padded: bool) -> None:
    """The example of the page, step by step: rows that every rank has, in one fixed shape."""
    page = (Path(__file__).parents[2] / "docs" / "llm.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(latents = SequenceCache.*?)```", page, re.DOTALL)
    assert "replicated=True" in example
    if not padded:
        example = example.replace(", replicated=True", "")
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    every = LatentHeads(draw(2, 24, 512) / 8, 16, 0.1)
    rows, to_q = draw(5, 1, 1, 1, 576).unbind(0), draw(576, 2 * 80) / 24
    outs = []

    def project_q(now: Tensor) -> Tensor:
        return (now.flatten(2) @ to_q).view(1, 1, 2, 80)

    def capture_step(comm: object, step: Callable[..., Tensor], given: Sequence[Tensor]) -> object:
        shapes = [x.shape for x in given]
        step(*given)  # as a warm-up does

        def replay(*inputs: Tensor) -> Tensor:
            assert [x.shape for x in inputs] == shapes
            outs.append(step(*inputs))
            return outs[-1]

        return SimpleNamespace(replay=replay)

    with UlyssesCommunicator(timeout_s=10) as comm:
        names = {"torch": torch, "SequenceCache": SequenceCache, "attend_cached": attend_cached}
        names |= {"comm": comm, "heads": every, "x": rows[0], "rows": rows}
        names |= {"project_q": project_q, "project_latent": lambda now: now}
        exec(example, {**names, "capture_step": capture_step})
    whole = torch.cat(rows, dim=1)
    for number, (now, out) in enumerate(zip(rows, outs, strict=True), start=1):
        expected = attend_latent(project_q(now), whole[:, :number], every)
        torch.testing.assert_close(out, expected, rtol=0.05, atol=0.05)


def test_the_example_of_the_page(ranks: Ranks) -> None:
    ranks(2).run(replicated_rows, True, timeout_s=60)
    with pytest.raises(RankError, match="AssertionError"):
        ranks(2).run(replicated_rows, False, timeout_s=60)


def test_rows_of_other_ranks_go_to_the_spare_slot() -> None:
    with UlyssesCommunicator(device="cpu") as comm:
        cache = SequenceCache(comm, batch=1, capacity=4, heads=1, head_dim=2, dtype=torch.float32)
        placement = Placement(0, (1, 2, 1), ((1,), (0, 3), (2,)))
        with mock.patch.object(cache, "_comm", SimpleNamespace(rank=1, device=comm.device)):
            slots = cache.slots(placement, replicated=True)
            assert slots.tolist() == [4, 0, 3, 4]
            assert cache.slots(placement).tolist() == [0, 3]
            cache.write(torch.arange(8.0).view(1, 4, 1, 2) + 1, slots)
        assert cache.rows.flatten().tolist() == [3, 4, 0, 0, 0, 0, 5, 6]
