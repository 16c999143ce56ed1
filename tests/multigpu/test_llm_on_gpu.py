"""All-gather, mixed sharding, caches, top-k and weights over the copy engines, replayed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from latent_problem import CHOSEN, RANK, ROPE, SCALE, inputs, layer, sharded, whole
from on_gpu import NO_WAIT, communicator, delay, fault, settle
from rank_pool import RankPool
from torch import Tensor
from whole_tensors import numbered, same_bytes

from ulysses_ops import Exchange, WindowSpec, all_gather, even_splits, reserve
from ulysses_ops.cached_attention import attend_cached, attend_cached_rows
from ulysses_ops.debug_exchange import debug_exchange
from ulysses_ops.graphs import capture_step
from ulysses_ops.indexer import index_scores, select_sharded_rows
from ulysses_ops.latent import attend_latent
from ulysses_ops.sequence_cache import SequenceCache
from ulysses_ops.topk import distributed_topk, top_rows
from ulysses_ops.weight_shards import WeightShards

Ranks = Callable[[int], RankPool]
SPLITS = {2: (13, 8), 4: (5, 0, 9, 7)}


def gathered(rank: int, world_size: int) -> None:
    """Exact for any split and dtype, whole, grouped with a scatter, and by parts."""
    cases = [SPLITS[world_size], (8,) * world_size, (*(0,) * (world_size - 1), 5)]
    with communicator(max_windows=40) as comm:
        for splits in cases:
            for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.int64):
                whole_x = numbered(2, sum(splits), 1, 72, dtype=dtype).cuda()
                shard = whole_x.split(list(splits), dim=1)[rank]
                for _ in range(3):
                    assert same_bytes(all_gather(shard, comm, seq_splits=splits), whole_x)
        splits = SPLITS[world_size]
        rows = sum(splits)
        q_window, window = reserve(
            comm,
            [
                WindowSpec("q", "scatter", (1, rows, 4, 16), torch.float32, "mixed", splits),
                WindowSpec.all_gather(
                    "c",
                    (1, rows, 1, 40),
                    torch.bfloat16,
                    world_size,
                    channel="mixed",
                    seq_splits=splits,
                ),
            ],
        )
        for round_number in range(6):
            q = (numbered(1, rows, 4, 16) + round_number).cuda()
            c = (numbered(1, rows, 1, 40, dtype=torch.bfloat16) + round_number).cuda()
            shard = c.split(list(splits), dim=1)[rank]
            if rank == round_number % world_size:
                delay(5)
            with Exchange(comm) as exchange:
                exchange.send(q.split(list(splits), dim=1)[rank], q_window)
                if round_number % 2:
                    exchange.send(shard, window)
                else:
                    window.own_view.copy_(shard)
                    for peer in range(world_size):
                        if peer != rank:
                            exchange.send(shard, window, peer=peer)
            heads = q_window.layout
            mine = q.narrow(2, heads.head_offset(rank), heads.head_splits[rank])
            assert torch.equal(q_window.tensor, mine)
            assert same_bytes(window.tensor, c)
        group = (comm.token, world_size, comm.name)
        torch.ops.ulysses.scatter_into(q.split(list(splits), dim=1)[rank], q_window.tensor, *group)
        torch.ops.ulysses.all_gather_into(shard, window.tensor, *group)
        sources = [q.split(list(splits), dim=1)[rank], shard]
        torch.ops.ulysses.complete([q_window.tensor, window.tensor], sources, *group)
        assert same_bytes(window.tensor, c)
        with pytest.raises(ValueError, match="reserve it by WindowSpec"):
            torch.ops.ulysses.all_gather_into(shard, q_window.tensor, *group)


def test_all_gather(pair: RankPool, crowd: Ranks) -> None:
    pair.run(gathered, timeout_s=90)
    crowd(4).run(gathered, timeout_s=120)


def replayed_gather(rank: int, world_size: int) -> int:
    splits = SPLITS[world_size]
    with communicator() as comm:

        def step(x: Tensor) -> Tensor:
            return all_gather(x, comm, seq_splits=splits) * 2

        def wholes(salt: int) -> Tensor:
            return (numbered(1, sum(splits), 1, 64) + 1000 * salt).cuda()

        captured = capture_step(comm, step, [wholes(0).split(list(splits), dim=1)[rank]])
        wrong = 0
        for salt in range(1, 31):
            if rank == salt % world_size:
                delay(2)
            got = captured.replay(wholes(salt).split(list(splits), dim=1)[rank].contiguous())
            wrong += int(not torch.equal(got, wholes(salt) * 2))
        stale = captured.replay()
        assert not torch.equal(stale, wholes(1) * 2), "BLIND"
        return wrong


def test_a_captured_all_gather(pair: RankPool, crowd: Ranks) -> None:
    assert pair.run(replayed_gather, timeout_s=60) == [0] * 2
    assert crowd(4).run(replayed_gather, timeout_s=120) == [0] * 4


def mixed_layer(rank: int, world_size: int) -> int:
    """Q, latents and the indexer on streams of their own, in one graph; new data each time."""
    splits = SPLITS[world_size]
    weights = layer(8, 64, "cuda")
    total = sum(splits)
    with communicator(max_windows=30) as comm:

        def step(x: Tensor) -> tuple[Tensor, Tensor]:
            dense = sharded(weights, x, comm, splits, sparse=False)
            return dense, sharded(weights, x, comm, splits, sparse=True)

        def own(salt: int) -> Tensor:
            x = inputs(total, 64, salt, "cuda")
            shard: Tensor = x.split(list(splits), dim=1)[rank]
            return shard.contiguous()

        captured = capture_step(comm, step, [own(0)])
        wrong = 0
        for salt in range(1, 11):
            if rank == salt % world_size:
                delay(2)
            for run in (step, captured.replay) if salt == 1 else (captured.replay,):
                for got, sparse in zip(run(own(salt)), (False, True), strict=True):
                    expected = whole(weights, inputs(total, 64, salt, "cuda"), sparse=sparse)
                    expected = expected.split(list(splits), dim=1)[rank]
                    wrong += int(not torch.allclose(got, expected, rtol=2e-3, atol=2e-4))
        other = whole(weights, inputs(total, 64, 99, "cuda"), sparse=True)
        is_told = not torch.allclose(got, other.split(list(splits), dim=1)[rank], rtol=1e-2)
        assert got.numel() == 0 or is_told, "BLIND"
        return wrong


def test_independent_branches_in_one_graph(pair: RankPool, crowd: Ranks) -> None:
    assert pair.run(mixed_layer, timeout_s=90) == [0] * 2
    assert crowd(4).run(mixed_layer, timeout_s=150) == [0] * 4


def replayed_decode(rank: int, world_size: int) -> int:
    """One graph for all steps of a decode: the cache grows between replays."""
    weights = layer(8, 64, "cuda")
    every = weights.heads(0, 8)
    steps, capacity = 12, 8
    x = inputs(steps, 64, 3, "cuda")
    rows = weights.rows(x)
    options: dict[str, Any] = {
        "batch": 2,
        "capacity": capacity,
        "heads": 1,
        "dtype": torch.float32,
    }
    with communicator(max_windows=30) as comm:
        latents = SequenceCache(comm, head_dim=RANK + ROPE, name="latents", **options)
        keys = SequenceCache(comm, head_dim=weights.index_k.shape[1], name="keys", **options)

        def step(now: Tensor, share: Tensor, slots: Tensor, positions: Tensor) -> Any:
            # `share` and `slots` have one row on every rank: those without write to a spare slot.
            index_q, weight, _ = weights.index(now)
            latents.write(weights.rows(share), slots)
            keys.write(weights.index(share)[2], slots)
            counts = (positions >= 0).view(1, -1)
            q = weights.queries(now)
            scores = index_scores(index_q, weight, keys.rows, SCALE)
            scores = scores.masked_fill(~counts, -torch.inf)
            selected = select_sharded_rows(scores, CHOSEN, comm)
            sparse = attend_cached_rows(q, latents, comm, every, selected)
            everything = latents.read()
            return attend_cached(q, latents, comm, every, counts), sparse, everything

        spare = torch.tensor([latents.capacity], device="cuda")
        example = (x[:, :1], x[:, :1], spare, latents.own_positions())
        captured = capture_step(comm, step, example)
        wrong = 0
        for number in range(steps):
            now = x[:, number : number + 1]
            placement = latents.place(1)
            keys.place(1)
            slots = latents.slots(placement, replicated=True)
            got, sparse, everything = captured.replay(now, now, slots, latents.own_positions())
            expected = attend_latent(weights.queries(now), rows[:, : number + 1], every)
            wrong += int(not torch.allclose(got, expected, rtol=2e-3, atol=2e-4))
            there = latents.positions()
            order = there[there >= 0]
            wrong += int(not torch.allclose(everything[:, there >= 0], rows[:, order], atol=1e-5))
            if number >= CHOSEN:
                assert not torch.allclose(sparse, got, rtol=1e-3), "BLIND"
            else:
                wrong += int(not torch.allclose(sparse, got, rtol=2e-3, atol=2e-4))
        return wrong


def test_a_cache_that_grows_between_replays(pair: RankPool, crowd: Ranks) -> None:
    assert pair.run(replayed_decode, timeout_s=90) == [0] * 2
    assert crowd(4).run(replayed_decode, timeout_s=150) == [0] * 4


def sharded_topk(rank: int, world_size: int) -> int:
    splits = SPLITS[world_size]
    with communicator() as comm:

        def step(scores: Tensor) -> tuple[Tensor, Tensor]:
            return distributed_topk(scores, 9, comm, seq_splits=splits)

        def wholes(salt: int) -> Tensor:
            generator = torch.Generator().manual_seed(salt)
            numbers = torch.tensor([0.0, -0.0, 1.0, torch.nan, torch.inf, -torch.inf, 2.5, -3.0])
            picked = torch.randint(8, (2, 3, sum(splits)), generator=generator)
            return numbers[picked].cuda()

        captured = capture_step(comm, step, [wholes(0).split(list(splits), dim=2)[rank]])
        wrong = 0
        for salt in range(1, 11):
            own = wholes(salt).split(list(splits), dim=2)[rank]
            best, places = top_rows(wholes(salt).cpu(), 9)
            for run in (step, captured.replay):
                values, columns = run(own)
                wrong += int(not torch.equal(columns.cpu(), places))
                wrong += int(not torch.equal(values.cpu().nan_to_num(7.0), best.nan_to_num(7.0)))
        assert not torch.equal(columns.cpu(), top_rows(wholes(99).cpu(), 9)[1]), "BLIND"
        return wrong


def test_topk_of_sharded_columns(pair: RankPool, crowd: Ranks) -> None:
    assert pair.run(sharded_topk, timeout_s=60) == [0] * 2
    assert crowd(4).run(sharded_topk, timeout_s=120) == [0] * 4


def prefetched(rank: int, world_size: int) -> int:
    """Four layers whose output projections are brought together one layer ahead."""
    generator = torch.Generator().manual_seed(1)
    wholes = [torch.randn(96, 96, generator=generator).cuda() / 10 for _ in range(4)]
    with communicator() as comm:
        weights = WeightShards(comm, [WeightShards.cut(w, comm) for w in wholes])
        own_bytes = 4 * even_splits(96, world_size)[rank] * 96 * 4
        assert weights.saved_bytes == (4 - 2) * 96 * 96 * 4 - own_bytes

        def step(x: Tensor) -> Tensor:
            weights.prefetch(0)
            for number in range(4):
                x = torch.tanh(x @ x.T / 50) @ x  # the layer's own work
                if number < 3:
                    weights.prefetch(number + 1)
                x = x @ weights.whole(number).T
            return x

        def on_one_rank(x: Tensor, weights: list[Tensor]) -> Tensor:
            for weight in weights:
                x = (torch.tanh(x @ x.T / 50) @ x) @ weight.T
            return x

        captured = capture_step(comm, step, [torch.ones(32, 96, device="cuda")])
        wrong = 0
        for salt in range(20):
            x = torch.randn(32, 96, generator=generator).cuda()
            if rank == salt % world_size:
                delay(2)
            got = captured.replay(x)
            wrong += int(not torch.allclose(got, on_one_rank(x, wholes), rtol=2e-3, atol=1e-3))
        swapped = on_one_rank(x, [wholes[i] for i in (2, 1, 0, 3)])  # two that share a window
        assert not torch.allclose(got, swapped, rtol=2e-3, atol=1e-3), "BLIND"
        return wrong


def test_weights_are_prefetched_in_a_graph(pair: RankPool, crowd: Ranks) -> None:
    assert pair.run(prefetched, timeout_s=60) == [0] * 2
    assert crowd(4).run(prefetched, timeout_s=120) == [0] * 4


def marks(rank: int, world_size: int) -> None:
    """Right over the copy engines."""
    with communicator(max_windows=30) as comm:
        x = torch.zeros(1, 512, 8, 64, dtype=torch.bfloat16, device="cuda")
        for op in ("scatter", "gather", "all_gather"):
            debug_exchange(comm, x, op=op).raise_if_wrong()
        turned = x.transpose(1, 2).contiguous().transpose(1, 2)
        debug_exchange(comm, turned).raise_if_wrong()


def marks_without_a_wait(rank: int, world_size: int) -> None:
    """Found wrong when the wait is taken away."""
    with communicator(max_windows=30) as comm:
        # Rank 0 sends 32 MB and gets 8 KB: the other, done with its own at once, must wait for it.
        splits = (1 << 16, *[16] * (world_size - 1))
        long = torch.zeros(1, splits[rank], 8, 64, dtype=torch.bfloat16, device="cuda")
        assert debug_exchange(comm, long, seq_splits=splits).is_right
        settle()
        found = False
        with fault(comm, NO_WAIT):
            for _ in range(5):
                found |= not debug_exchange(comm, long, seq_splits=splits).is_right
                settle()
        assert found, "BLIND: a missing wait was not noticed"


def test_debug_exchange(pair: RankPool, crowd: Ranks) -> None:
    pair.run(marks, timeout_s=60)
    crowd(4).run(marks, timeout_s=120)


@pytest.mark.two_gpus
def test_debug_exchange_finds_a_missing_wait(pair: RankPool) -> None:
    pair.run(marks_without_a_wait, timeout_s=60)
