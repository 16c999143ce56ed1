"""Denoising steps through a graph cache: the same bits as eager calls, bounded, agreed."""

from __future__ import annotations

import pytest
import torch
from denoiser import Denoiser, batched_step_of, denoise, latents_of, prompt_of, step_of
from on_gpu import communicator, delay, settle
from rank_pool import RankPool
from torch import Tensor

from ulysses_ops.graphs import Bucket, GraphCache

STEPS = 50


def whole_loop(rank: int, world_size: int, batched: bool, transport: str) -> dict[str, int]:
    """50 steps with guidance and Euler's update; the graph gives the bits of eager calls."""
    with communicator(transport=transport) as comm:
        make = batched_step_of if batched else step_of
        step = make(Denoiser(comm))
        prompts = [prompt_of(16, 1), prompt_of(16, 2)]
        latents = latents_of(rank, 32)
        with torch.no_grad():
            eager = denoise(step, latents, prompts, STEPS)
        cache = GraphCache(comm, step)
        replayed = denoise(cache, latents, prompts, STEPS)
        assert torch.equal(replayed, eager)
        # The control: other latents give other results through the same graph.
        assert not torch.equal(denoise(cache, latents_of(rank, 32, 7), prompts, STEPS), eager)
        settle()
        cache.clear()
        return {"captures": cache.stats.captures, "hits": cache.stats.hits}


@pytest.mark.parametrize("transport", ["ce", pytest.param("nccl", marks=pytest.mark.two_gpus)])
@pytest.mark.parametrize("batched", [False, True])
def test_fifty_steps_are_the_bits_of_eager_ones(
    pair: RankPool, batched: bool, transport: str
) -> None:
    for stats in pair.run(whole_loop, batched, transport, timeout_s=80):
        assert stats == {"captures": 1, "hits": 2 * STEPS - 1}


def compiled_loop(rank: int, world_size: int) -> None:
    with communicator() as comm:
        model = Denoiser(comm)
        compiled = torch.compile(model, fullgraph=True)
        step = step_of(compiled)
        prompts = [prompt_of(16, 1), prompt_of(16, 2)]
        latents = latents_of(rank, 32)
        with torch.no_grad():
            eager = denoise(step, latents, prompts, 4)
            plain = denoise(step_of(model), latents, prompts, 4)
        cache = GraphCache(comm, step)
        assert torch.equal(denoise(cache, latents, prompts, 4), eager)
        torch.testing.assert_close(eager, plain, atol=1e-3, rtol=1e-3)
        settle()


def test_a_compiled_model(pair: RankPool) -> None:
    pair.run(compiled_loop, timeout_s=100)


def two_branches(rank: int, world_size: int) -> None:
    """Two calls of one signature: results are the caller's own unless that is declined."""
    with communicator() as comm:
        model = Denoiser(comm)
        time = torch.tensor(0.5, device="cuda")
        latents = latents_of(rank, 16)
        prompts = [prompt_of(8, seed) for seed in (1, 2)]
        for copy_out in (True, False):
            cache = GraphCache(comm, model, copy_out=copy_out)
            one, other = (cache(latents, time, prompt) for prompt in prompts)
            assert torch.equal(one, other) is not copy_out
            with torch.no_grad():
                assert torch.equal(other, model(latents, time, prompts[1]))
            settle()
            cache.clear()


def test_results_do_not_change_under_the_caller(pair: RankPool) -> None:
    pair.run(two_branches)


def forty_lengths(rank: int, world_size: int) -> list[tuple[int, int, int]]:
    """Prompts of 40 lengths: padded to three, or captured when they come again."""
    counts = []
    with communicator() as comm:
        model = Denoiser(comm)
        time = torch.tensor(0.5, device="cuda")
        latents = latents_of(rank, 16)
        bucket = Bucket(("prompt", "mask"), 1, (16, 32, 64))
        padded = GraphCache(comm, model, buckets=[bucket])
        seldom = GraphCache(comm, model, capture_after=2)
        for length in range(30, 70):
            prompt = prompt_of(length, length)
            mask = torch.ones(1, length, dtype=torch.bool, device="cuda")
            with torch.no_grad():
                right = model(latents, time, prompt, mask)
            got = padded(latents, time, prompt=prompt, mask=mask)
            torch.testing.assert_close(got, right, atol=1e-4, rtol=1e-4)
            assert torch.equal(seldom(latents, time, prompt=prompt, mask=mask), right)
        settle()
        for cache in (padded, seldom):
            counts.append((cache.stats.captures, cache.stats.hits, cache.stats.eager))
            cache.clear()
    return counts


def test_forty_prompt_lengths(pair: RankPool) -> None:
    for padded, seldom in pair.run(forty_lengths, timeout_s=80):
        assert padded == (2, 33, 5)  # 30 to 32 and 33 to 64; 65 to 69 are longer than all
        assert seldom == (0, 0, 40)


def evictions(rank: int, world_size: int) -> tuple[int, int, int]:
    """More shapes than graphs, in turn and with skew: right, and windows given back."""
    with communicator(max_windows=8) as comm:  # two graphs pin all of them
        model = Denoiser(comm)
        time = torch.tensor(0.5, device="cuda")
        cache = GraphCache(comm, model, max_graphs=1)
        for number in range(12):
            latents = latents_of(rank, (8, 16, 24)[number % 3], number)
            delay(3.0 * ((number + rank) % 2))
            got = cache(latents, time, prompt_of(8))
            with torch.no_grad():
                assert torch.equal(got, model(latents, time, prompt_of(8)))
        settle()
        stats = cache.stats
        return stats.captures, stats.evictions, stats.graphs


def test_graphs_are_evicted_and_captured_again(pair: RankPool) -> None:
    assert pair.run(evictions, timeout_s=80) == [(12, 11, 1)] * 2


def bounded_bytes(rank: int, world_size: int) -> list[tuple[int, int, int]]:
    with communicator(max_windows=60) as comm:
        model = Denoiser(comm)
        time = torch.tensor(0.5, device="cuda")
        counts = []
        for bound in (1, 1 << 40):
            cache = GraphCache(comm, model, max_bytes=bound)
            for _ in range(3):
                got = cache(latents_of(rank, 16), time, prompt_of(8))
                with torch.no_grad():
                    assert torch.equal(got, model(latents_of(rank, 16), time, prompt_of(8)))
            counts.append((cache.stats.captures, cache.stats.eager, cache.stats.graphs))
            settle()
            cache.clear()
        return counts


def test_a_graph_above_the_bound_is_not_kept(pair: RankPool) -> None:
    for tiny, ample in pair.run(bounded_bytes):
        assert tiny == (1, 3, 0)
        assert ample == (1, 0, 1)


def ten_shapes(rank: int, world_size: int) -> tuple[int, int]:
    """Bytes that ten graphs add with a pool of their own each, and with one for all."""
    added = []
    with communicator(max_windows=64) as comm:
        model = Denoiser(comm)
        time = torch.tensor(0.5, device="cuda")
        shapes = [2048 - 128 * number for number in range(10)]  # the largest first

        def run(caches: list[GraphCache]) -> int:
            torch.cuda.empty_cache()
            before = torch.cuda.memory_reserved()
            for rows, cache in zip(shapes, caches, strict=True):
                cache(latents_of(rank, rows), time, prompt_of(8))
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            return torch.cuda.memory_reserved() - before

        run([GraphCache(comm, model, capture_after=99)] * 10)  # windows and kernels
        alone = [GraphCache(comm, model) for _ in shapes]
        added.append(run(alone))
        settle()
        for cache in alone:
            cache.clear()
        added.append(run([GraphCache(comm, model, max_graphs=10)] * 10))
        settle()
    return added[0], added[1]


def test_graphs_of_a_cache_share_memory(pair: RankPool) -> None:
    for alone, shared in pair.run(ten_shapes, timeout_s=80):
        assert shared < 0.6 * alone


def disagreeing(rank: int, world_size: int) -> str:
    """One rank replays a graph that the other has given up: all hear of it at the next capture."""
    with communicator() as comm:
        cache = GraphCache(comm, Denoiser(comm))
        time = torch.tensor(0.5, device="cuda")
        cache(latents_of(rank, 16), time, prompt_of(8))
        settle()
        if rank == 1:
            cache.clear()
        with pytest.raises(RuntimeError) as refused:
            cache(latents_of(rank, 24), time, prompt_of(8))
        return str(refused.value)


def test_ranks_with_different_graphs_are_told(pair: RankPool) -> None:
    messages = pair.run(disagreeing)
    assert messages[0] == messages[1]
    assert "the ranks hold different graphs" in messages[0]


def random_steps(rank: int, world_size: int) -> None:
    """Random numbers go on from replay to replay, as in eager calls, for any known generator."""
    with communicator() as comm:
        own = torch.Generator(device="cuda")

        def noisy(x: Tensor) -> tuple[Tensor, Tensor]:
            return torch.rand_like(x), torch.rand(x.shape, device="cuda", generator=own)

        x = torch.zeros(64, device="cuda")
        cache = GraphCache(comm, noisy, generators=[own])
        cache(x)
        torch.manual_seed(5)
        own.manual_seed(6)
        eager = [value for _ in range(3) for value in noisy(x)]
        torch.manual_seed(5)
        own.manual_seed(6)
        replayed = [value for _ in range(3) for value in cache(x)]
        for one, other in zip(eager, replayed, strict=True):
            assert torch.equal(one, other)
        assert not torch.equal(replayed[0], replayed[2])


def test_random_state_goes_on(pair: RankPool) -> None:
    pair.run(random_steps)
