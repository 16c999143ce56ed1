"""UlyssesAttention over the copy engines: every schedule, eager and replayed, ranks skewed.

Sums are exact (whole numbers in float64), so equality means that each element is made of the right
ones, and of this round's.
"""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from exact_layer import Layer, all_schedules, layer_of, linear_attention
from fused_layer import KINDS, compare_all, fused_and_plain, inputs, spoil
from on_gpu import NO_OPEN, NO_WAIT, communicator, delay, fault, is_seen, settle
from rank_pool import RankPool
from torch import Tensor

from ulysses_ops import (
    PEERS_FIRST,
    PLAIN,
    Exchange,
    NormRope,
    Schedule,
    UlyssesAttention,
    UlyssesCommunicator,
    Window,
    sdpa,
)
from ulysses_ops.fused_projection import FusedKernel
from ulysses_ops.graphs import capture_step

HEAD_CHUNKS = Schedule("peers", "heads", "slabs", 2)
WHOLE_ATTENTION = Schedule("peers", "whole", "slabs")
REPLAYED = [PLAIN, PEERS_FIRST, WHOLE_ATTENTION, HEAD_CHUNKS]


def rows_of(x: Tensor, comm: UlyssesCommunicator) -> Tensor:
    return x.chunk(comm.world_size, dim=1)[comm.rank]


def every_schedule(rank: int, world_size: int) -> None:
    """Each twice, with other values, and without a host barrier between."""
    with communicator() as comm:
        for batch, kv_heads, with_bias in ((1, 4, True), (2, 2, False)):
            layers = [
                layer_of(
                    world_size,
                    batch=batch,
                    rows=16,
                    heads=4,
                    kv_heads=kv_heads,
                    with_bias=with_bias,
                    seed=seed,
                ).on("cuda")
                for seed in (1, 2)
            ]
            for schedule in all_schedules():
                for layer in layers:
                    got = layer.sharded(comm, schedule=schedule)(*layer.inputs(rank, world_size))
                    assert torch.equal(got, rows_of(layer.expected(), comm)), schedule
        settle()


def test_every_schedule_equals_one_process(pair: RankPool) -> None:
    pair.run(every_schedule, timeout_s=120)


def test_four_ranks_that_share_gpus(crowd: Callable[[int], RankPool]) -> None:
    crowd(4).run(every_schedule, timeout_s=150)


def with_norms(rank: int, world_size: int) -> None:
    """Norm and RoPE, in parts and whole, give Q, K and V of one process to the last digits."""
    with communicator() as comm:
        for kind in (
            NormRope("per_head", "interleaved"),
            NormRope("across_heads", "half_split"),
        ):
            layer = layer_of(world_size, rows=16, norm_rope=kind).on("cuda")
            for schedule in REPLAYED:
                got = layer.sharded(comm, schedule=schedule)(*layer.inputs(rank, world_size))
                torch.testing.assert_close(
                    got, rows_of(layer.expected(), comm), rtol=1e-11, atol=1e-8
                )
        settle()


def test_norm_and_rope(pair: RankPool) -> None:
    pair.run(with_norms)


def fused_stage(rank: int, world_size: int) -> int:
    """The fused kernel against PyTorch, eager; then captured, against itself."""
    with communicator() as comm:
        compare_all(comm, KINDS, 1)
        compare_all(comm, KINDS[:2], 2)
        kind = KINDS[0]
        fused, _ = fused_and_plain(comm, kind, Schedule("peers", "whole", "whole"))
        x, cos, sin = inputs(comm, kind, 1, 1)
        assert FusedKernel(kind, cos, sin).fits(x, fused.head_dim, (fused.q_norm, fused.k_norm))
        captured = capture_step(comm, lambda x: fused.project(x, cos, sin), [x])
        wrong = 0
        for seed in range(20):
            x = inputs(comm, kind, 1, seed)[0]
            expected = [part.clone() for part in fused.project(x, cos, sin)]
            spoil(fused, x)
            got = captured.replay(x)
            wrong += sum(not torch.equal(a, b) for a, b in zip(got, expected, strict=True))
        settle()
        captured.close()
        return wrong


def test_the_fused_first_stage(pair: RankPool) -> None:
    assert pair.run(fused_stage, timeout_s=60) == [0, 0]


def in_bf16(rank: int, world_size: int) -> dict[str, float]:
    """SDPA in bf16: how far each schedule is from float64, and from the plain one."""
    heads, dim, rows = 8, 64, 256
    width = heads * dim
    generator = torch.Generator().manual_seed(2)
    names = ("q", "k", "v", "out")
    weights = {
        name: (torch.randn(width, width, generator=generator) * width**-0.5).bfloat16()
        for name in names
    }
    x = torch.randn(1, rows * world_size, width, generator=generator).bfloat16().cuda()
    q, k, v = (
        (x.double() @ weights[name].double().cuda().T).unflatten(-1, (heads, dim))
        for name in names[:3]
    )
    whole = sdpa(q, k, v).flatten(2) @ weights["out"].double().cuda().T
    errors = {}
    with communicator() as comm:
        for schedule in REPLAYED:
            module = UlyssesAttention.from_weights(
                comm, **weights, num_heads=heads, schedule=schedule
            ).cuda()
            got = module(rows_of(x, comm))
            error = (got.double() - rows_of(whole, comm)).abs().max()
            errors[str(schedule)] = float(error / whole.abs().max())
        settle()
    return errors


def test_rounding_in_bf16(pair: RankPool) -> None:
    """Splitting adds at most a rounding: 2^-8 of the largest value, beside the plain way's own."""
    for errors in pair.run(in_bf16):
        print(errors)
        plain = errors[str(PLAIN)]
        assert plain < 2.0**-6
        assert all(error <= plain + 2.0**-8 for error in errors.values())


# ---- replays -------------------------------------------------------------------------------------


def wrong_elements(layer: Layer, comm: UlyssesCommunicator, got: Tensor, number: int) -> Tensor:
    """Elements of this rank's output that are not those of input ``layer.x + number``."""
    shifted = Layer(**{**vars(layer), "x": layer.x + number})
    return (got != rows_of(shifted.expected(), comm)).sum()


class HesitantExchange(Exchange):
    """On rank 1, all that it sends but the first leaves 5 ms late: with that, both have opened."""

    def send(self, x: Tensor, window: Window, *, peer: int | None = None) -> None:
        if self._comm.rank == 1 and self._sources:
            delay(5)
        super().send(x, window, peer=peer)


def replays(rank: int, world_size: int, schedule: Schedule, is_faulty: bool) -> int:
    """50 replays with changing inputs; each time the other rank comes late. No host barrier.

    And in each, rank 1 sends K and Q late, so that a rank that does not wait reads those of the
    replay before.
    """
    layer = layer_of(world_size, rows=64, with_bias=True).on("cuda")
    x = layer.inputs(rank, world_size)[0]
    hesitant = mock.patch.object(
        UlyssesAttention, "begin_exchange", lambda module: HesitantExchange(module.comm)
    )
    with communicator() as comm, hesitant:
        module = layer.sharded(comm, schedule=schedule)
        module(x)  # reserves windows, with both halves of the handshake
        settle()
        with fault(comm, NO_WAIT if is_faulty else 0):
            step = capture_step(comm, module, [x], warmup=1)
        settle()
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        for number in range(1, 51):
            if number % 2 != rank:
                delay(5)
            wrong += wrong_elements(layer, comm, step.replay(x + number), number)
        settle()
        step.close()
        return int(wrong)


@pytest.mark.parametrize("schedule", REPLAYED, ids=str)
def test_replays_with_skewed_ranks(pair: RankPool, schedule: Schedule) -> None:
    assert pair.run(replays, schedule, False) == [0, 0]


def test_control_a_replay_that_does_not_wait_is_seen(pair: RankPool) -> None:
    assert is_seen(pair, replays, PEERS_FIRST, True)


def late_own_rows(rank: int, world_size: int, mode: str, is_faulty: bool) -> int:
    """Rank 0 attends its own rows late, having sent its peer's: K and V are still being read.

    This is where an elided open is a race, and where the next layer must not overwrite.
    """
    layer = layer_of(world_size, rows=64).on("cuda")
    x = layer.inputs(rank, world_size)[0]
    calls = 0

    def kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if rank == 0 and calls % 2 == 0:
            delay(3)
        return linear_attention(q, k, v)

    with communicator() as comm:
        module = layer.sharded(comm, schedule=PEERS_FIRST, attention=kernel)
        module(x)
        settle()
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        with fault(comm, NO_OPEN if is_faulty else 0):
            step = capture_step(comm, module, [x], warmup=1) if mode == "graph" else None
            settle()
            for number in range(50):
                given = x + number
                got = module(given) if step is None else step.replay(given)
                wrong += wrong_elements(layer, comm, got, number)
            settle()
        if step is not None:
            step.close()
        return int(wrong)


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_the_next_round_waits_for_the_own_rows(pair: RankPool, mode: str) -> None:
    assert pair.run(late_own_rows, mode, False) == [0, 0]


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_control_without_open_the_own_rows_read_the_next_round(pair: RankPool, mode: str) -> None:
    assert max(pair.run(late_own_rows, mode, True)) > 0


def two_streams(rank: int, world_size: int) -> int:
    """Rounds from two streams in turn, with nothing between them but what the layer does."""
    layer = layer_of(world_size, rows=64).on("cuda")
    x = layer.inputs(rank, world_size)[0]

    def kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        delay(0.5)  # the next round is issued meanwhile
        return linear_attention(q, k, v)

    with communicator() as comm:
        module = layer.sharded(comm, schedule=PEERS_FIRST, attention=kernel)
        given = [x + number for number in range(40)]
        module(x)
        settle()
        streams = [torch.cuda.Stream(), torch.cuda.Stream()]
        outputs = []
        for number, value in enumerate(given):
            with torch.cuda.stream(streams[number % 2]):
                outputs.append(module(value))
        settle()
        counts = [wrong_elements(layer, comm, got, n) for n, got in enumerate(outputs)]
        return int(sum(counts))


def test_rounds_from_two_streams(pair: RankPool) -> None:
    assert pair.run(two_streams) == [0, 0]
