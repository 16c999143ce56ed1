"""Windows of all-gathers in captured steps: operators, caches that wrap, weights, gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from on_gpu import NO_WAIT, communicator, delay, fault, is_seen, settle
from rank_pool import RankPool
from torch import Tensor
from whole_tensors import numbered, same_bytes

from ulysses_ops import UlyssesCommunicator, WindowSpec, all_gather, even_splits, reserve
from ulysses_ops.graphs import CapturedStep, capture_step
from ulysses_ops.sequence_cache import SequenceCache
from ulysses_ops.weight_shards import WeightShards

Ranks = Callable[[int], RankPool]
Splits = tuple[int, ...]


def split_cases(world_size: int) -> list[Splits]:
    """Even, a row more than divides, and all rows on the last rank."""
    return [
        (6,) * world_size,
        even_splits(6 * world_size + 1, world_size),
        (*(0,) * (world_size - 1), 5),
    ]


def parts(whole: Tensor, splits: Splits) -> list[Tensor]:
    return [part.contiguous() for part in whole.split(list(splits), dim=1)]


# ---- the operators -------------------------------------------------------------------------------


def captured_operators(
    comm: UlyssesCommunicator, splits: Splits, q: Tensor, latents: Tensor
) -> CapturedStep:
    """Queries by heads and latents to every rank, completed together; what arrived, copied."""
    name = "-".join(map(str, splits))
    q_spec = WindowSpec(f"q {name}", "scatter", tuple(q.shape), q.dtype, name, splits)  # type: ignore[arg-type]
    latent_spec = WindowSpec.all_gather(
        f"latents {name}",
        tuple(latents.shape),  # type: ignore[arg-type]
        latents.dtype,
        comm.world_size,
        channel=name,
        seq_splits=splits,
    )
    q_window, window = (reserved.tensor for reserved in reserve(comm, [q_spec, latent_spec]))
    group = (comm.token, comm.world_size, comm.name)

    def step(own_q: Tensor, own_latents: Tensor) -> tuple[Tensor, Tensor]:
        torch.ops.ulysses.scatter_into(own_q, q_window, *group)
        torch.ops.ulysses.all_gather_into(own_latents, window, *group)
        torch.ops.ulysses.complete([q_window, window], [own_q, own_latents], *group)
        return q_window.clone(), window.clone()

    own = (parts(q, splits)[comm.rank], parts(latents, splits)[comm.rank])
    return capture_step(comm, step, own)


def replayed_operators(
    rank: int, world_size: int, scale: int, is_faulty: bool, late_ms: float
) -> int:
    """Wrong elements of many replays with new data; in each a rank comes late.

    Where one rank has all rows, the others have nothing to send: without a wait they read at once.
    """
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    with communicator(max_windows=20) as comm:
        for case in split_cases(world_size):
            splits = tuple(scale * rows for rows in case)
            q = numbered(1, sum(splits), 4, 16).cuda()
            # As wide as bf16, and no element is that of the row before.
            latents = numbered(1, sum(splits), 1, 40, dtype=torch.int16).cuda()
            with fault(comm, NO_WAIT if is_faulty else 0):
                captured = captured_operators(comm, splits, q, latents)
            settle()
            heads = q.shape[2] // world_size
            for number in range(1, 21):
                now = [x.roll(number, dims=1) for x in (q, latents)]
                if rank == number % world_size:
                    delay(late_ms)
                got_q, got_latents = captured.replay(*(parts(x, splits)[rank] for x in now))
                wrong += (got_q != now[0].narrow(2, rank * heads, heads)).sum()
                wrong += (got_latents != now[1]).sum()
            settle()
            captured.close()
    return int(wrong)


def test_captured_operators(pair: RankPool, crowd: Ranks) -> None:
    assert pair.run(replayed_operators, 4096, False, 5.0, timeout_s=90) == [0] * 2
    assert crowd(4).run(replayed_operators, 1, False, 1.0, timeout_s=150) == [0] * 4


@pytest.mark.two_gpus
def test_control_without_a_wait_stale_rows_are_seen(pair: RankPool) -> None:
    assert is_seen(pair, replayed_operators, 4096, True, 20.0, timeout_s=90)


def large_rows(rank: int, world_size: int) -> None:
    """Shares of more than 8 MiB, which are copied in halves of rows, and what is left over."""
    for rows in ((8 << 20) + 4096 + 13, 9 << 20):
        whole = torch.arange(rows * world_size).mul(31).bitwise_right_shift(3).to(torch.uint8)
        with communicator() as comm:
            own = whole.view(world_size, 1, rows, 1, 1)[rank].cuda()
            assert torch.equal(all_gather(own, comm).flatten().cpu(), whole)


def test_large_own_shares(pair: RankPool) -> None:
    pair.run(large_rows, timeout_s=60)


# ---- a cache that wraps --------------------------------------------------------------------------


def replayed_window_of_chunks(rank: int, world_size: int) -> int:
    """Chunk after chunk by one graph; the latest three are kept, read by heads and whole."""
    rows, kept, chunks = 2, 3, 8
    heads = 2 * world_size
    wholes = numbered(1, chunks * rows * world_size, heads, 8).cuda()
    wrong = 0
    with communicator(max_windows=20) as comm:

        def new_cache(name: str) -> SequenceCache:
            return SequenceCache(
                comm,
                batch=1,
                capacity=kept * rows,
                heads=heads,
                head_dim=8,
                dtype=torch.float32,
                keep="latest",
                name=name,
            )

        cache, eager = new_cache("captured"), new_cache("eager")

        def step(x: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
            cache.write(x, slots)
            return cache.read(heads="split").clone(), cache.read().clone()

        def own(chunk: int) -> Tensor:
            first = (chunk * world_size + rank) * rows
            return wholes[:, first : first + rows].contiguous()

        # Warm-up and capture write into slots that the first replay overwrites.
        captured = capture_step(comm, step, (own(1), torch.arange(rows, device="cuda")))
        for chunk in range(chunks):
            slots = cache.slots(cache.place((rows,) * world_size))
            if rank == chunk % world_size:
                delay(2)
            by_heads, every = captured.replay(own(chunk), slots)
            positions = cache.positions()
            there = positions >= 0
            assert int(there.sum()) == min(chunk + 1, kept) * rows * world_size
            right = wholes[:, positions[there]]
            wrong += int(not torch.equal(every[:, there], right))
            wrong += int(not torch.equal(by_heads[:, there], right.narrow(2, 2 * rank, 2)))
            eager.append(own(chunk))
            assert torch.equal(eager.positions(), positions)
            wrong += int(not torch.equal(eager.read()[:, there], right))
            wrong += int(not torch.equal(eager.read(heads="split")[:, there], by_heads[:, there]))
        cache.place((rows,) * world_size)
        _, stale = captured.replay(own(0), slots)  # where the last ones were, not the new ones
        wholes = torch.cat([wholes, wholes[:, : rows * world_size]], dim=1)
        assert not torch.equal(stale, wholes[:, cache.positions()]), "BLIND"
    return wrong


def test_a_cache_of_the_latest_chunks(pair: RankPool, crowd: Ranks) -> None:
    assert pair.run(replayed_window_of_chunks, timeout_s=60) == [0] * 2
    assert crowd(4).run(replayed_window_of_chunks, timeout_s=120) == [0] * 4


# ---- weights -------------------------------------------------------------------------------------


def replayed_weights(rank: int, world_size: int) -> int:
    """Shards that are not alike, and change between replays: each whole weight is the new one."""
    width, layers = 97, 4
    wholes = [numbered(width, width).cuda() + 1 + number for number in range(layers)]
    with communicator() as comm:
        shards = [WeightShards.cut(weight, comm) for weight in wholes]
        assert len(set(even_splits(width, world_size))) == 2
        weights = WeightShards(comm, shards)

        def step() -> list[Tensor]:
            found = []
            weights.prefetch(0)
            for number in range(layers):
                if number + 1 < layers:
                    weights.prefetch(number + 1)
                found.append(weights.whole(number).clone())
            return found

        wrong = sum(not same_bytes(*both) for both in zip(step(), wholes, strict=True))
        captured = capture_step(comm, step)
        for number in range(10):
            for weight in (*wholes, *shards):
                weight.neg_()
            if rank == number % world_size:
                delay(2)
            found = captured.replay()
            wrong += sum(not same_bytes(*both) for both in zip(found, wholes, strict=True))
        assert not same_bytes(found[0], wholes[2]), "BLIND"  # of the same window
        return wrong


def test_weights_of_uneven_shards_that_change(pair: RankPool, crowd: Ranks) -> None:
    assert pair.run(replayed_weights, timeout_s=60) == [0] * 2
    assert crowd(4).run(replayed_weights, timeout_s=120) == [0] * 4


# ---- gradients -----------------------------------------------------------------------------------


def gradients(rank: int, world_size: int) -> None:
    """The gradient of a row is the sum of what every rank wants of it."""
    with communicator(max_windows=20) as comm:
        for splits in split_cases(world_size):
            whole = numbered(2, sum(splits), 1, 24).cuda()
            own = parts(whole, splits)[rank].requires_grad_()
            (all_gather(own, comm, seq_splits=splits) * (whole + rank)).sum().backward()
            wanted = world_size * whole + sum(range(world_size))
            assert own.grad is not None
            assert torch.equal(own.grad, parts(wanted, splits)[rank])
            blind = torch.equal(own.grad, parts(whole, splits)[rank])
            assert own.numel() == 0 or not blind, "BLIND"


def test_gradients(pair: RankPool, crowd: Ranks) -> None:
    pair.run(gradients, timeout_s=60)
    crowd(4).run(gradients, timeout_s=120)
