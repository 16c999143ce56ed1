"""Bit-exact exchange over every mapping and signal, shape, dtype and stride."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from on_gpu import communicator, delay, one_window, settle, source_and_result
from rank_pool import RankPool
from whole_tensors import layout_of, numbered, same_bytes

from ulysses_ops import (
    Exchange,
    UlyssesCommunicator,
    UlyssesError,
    WindowSpec,
    gather,
    reserve,
    scatter,
    sdpa,
    ulysses_attention,
)
from ulysses_ops.plan import Layout
from ulysses_ops.reference import shard_of, window_of

DTYPES = (
    torch.bfloat16,
    torch.float32,
    torch.float8_e4m3fn,
    torch.bool,
    torch.complex64,
    torch.int64,
)
SHAPES = ((1, 32, 8, 64), (2, 16, 4, 16), (3, 40, 6, 40), (1, 8, 8, 3), (2, 2, 2, 1))


def round_trips(rank: int, world_size: int, options: dict[str, str]) -> str:
    """Scatter and gather every shape and dtype."""
    with communicator(**options) as comm:
        for dtype in DTYPES:
            for shape in SHAPES:
                whole = numbered(*shape, dtype=dtype)
                for direction, op in (("scatter", scatter), ("gather", gather)):
                    layout = layout_of(direction, whole, world_size)  # type: ignore[arg-type]
                    source, result = source_and_result(whole, layout, rank)
                    got = op(source, comm)
                    assert got.is_contiguous()
                    assert same_bytes(got.cpu(), result.contiguous()), (direction, shape, dtype)
        return f"{comm.transport} {comm.mapping} {comm.signal}"


@pytest.mark.parametrize("mapping", ["symm_mem", "ipc"])
@pytest.mark.parametrize("signal", ["write_value", "memcpy"])
def test_every_mapping_and_signal_is_bit_exact(pair: RankPool, mapping: str, signal: str) -> None:
    got = pair.run(round_trips, {"mapping": mapping, "signal": signal})
    assert got == [f"ce {mapping} {signal}"] * 2


@pytest.mark.two_gpus
def test_nccl_is_bit_exact(pair: RankPool) -> None:
    assert pair.run(round_trips, {"transport": "nccl"}) == ["nccl None None"] * 2


def strided_sources(rank: int, world_size: int) -> None:
    """Views readable by pitch, views that need a copy, and one of each on two ranks."""
    batch, rows, heads, dim = 2, 8, 4, 16
    whole = numbered(batch, rows * world_size, heads, dim)
    layout = layout_of("scatter", whole, world_size)
    shard = shard_of(whole, layout, rank).cuda()
    fused = torch.full((batch, rows, 3 * heads, dim), -1.0, device="cuda")
    fused[:, :, heads : 2 * heads] = shard
    padded = torch.full((7 + shard.numel(),), -1.0, device="cuda")
    padded[7:] = shard.flatten()
    wide = torch.full((*shard.shape[:3], 2 * dim), -1.0, device="cuda")
    wide[..., ::2] = shard
    views = {
        "dense": shard.contiguous(),
        "fused projection": fused[:, :, heads : 2 * heads],
        "heads outermost": shard.transpose(1, 2).contiguous().transpose(1, 2),
        "sequence outermost": shard.transpose(0, 1).contiguous().transpose(0, 1),
        "odd offset": padded[7:].view(shard.shape),
        "last stride 2": wide[..., ::2],
    }
    with communicator() as comm:
        for name, view in views.items():
            assert torch.equal(view, shard), name
            mixed = view if rank == 0 else shard.contiguous()
            for source in (view, mixed):
                got = scatter(source, comm)
                assert torch.equal(got.cpu(), window_of(whole, layout, rank)), name
        expanded = torch.arange(dim, device="cuda", dtype=torch.float32).expand(1, rows, heads, dim)
        got = scatter(expanded, comm)
        assert torch.equal(got, expanded[:, :1, :1].expand(got.shape))


def test_strides(pair: RankPool) -> None:
    pair.run(strided_sources)


def parts(rank: int, world_size: int) -> None:
    """Parts cut for single ranks, the own part written by its producer or sent as well."""
    with communicator() as comm:
        for direction in ("scatter", "gather"):
            window = one_window(comm, (2, 16, 8, 32), direction)
            whole = numbered(2, 16, 8, 32)
            layout: Layout = window.layout
            source, result = source_and_result(whole, layout, rank)
            dim, sizes = (
                (2, layout.head_splits) if direction == "scatter" else (1, layout.seq_splits)
            )
            cut = source.split(list(sizes), dim=dim)
            for own_is_sent in (False, True, False):
                window.tensor.fill_(-1.0)
                torch.cuda.synchronize()
                dist.barrier()
                with Exchange(comm) as exchange:
                    for peer in range(world_size):
                        if peer != rank or own_is_sent:
                            exchange.send(cut[peer], window, peer=peer)
                    if not own_is_sent:
                        window.own_view.copy_(cut[rank])
                assert torch.equal(window.tensor.cpu(), result)
                torch.cuda.synchronize()
                dist.barrier()


def test_parts_and_own_views(pair: RankPool) -> None:
    pair.run(parts)


def attention_equals_one_rank(rank: int, world_size: int, transport: str) -> None:
    """A sharded attention against the same kernel over all of it."""
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, 256, heads, 64, generator=generator) for heads in (8, 4, 4))
    with communicator(transport=transport) as comm:
        rows = slice(rank * 256 // world_size, (rank + 1) * 256 // world_size)
        got = ulysses_attention(q[:, rows].cuda(), k[:, rows].cuda(), v[:, rows].cuda(), comm)
        whole = sdpa(q.cuda(), k.cuda(), v.cuda())
        torch.testing.assert_close(got, whole[:, rows], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("transport", ["ce", pytest.param("nccl", marks=pytest.mark.two_gpus)])
def test_attention(pair: RankPool, transport: str) -> None:
    pair.run(attention_equals_one_rank, transport)


def two_groups_at_once(rank: int, world_size: int) -> None:
    """Ulysses over neighbours and over strangers at once, in one world of four."""
    neighbours = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    strangers = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    device = torch.device("cuda", torch.cuda.current_device())
    options = {"device": device, "allow_shared_devices": True, "transport": "ce"}
    with (
        UlyssesCommunicator(neighbours, **options) as near,  # type: ignore[arg-type]
        UlyssesCommunicator(strangers, **options) as far,  # type: ignore[arg-type]
    ):
        for round_number in range(20):
            for comm, salt in ((near, 0), (far, 10_000)):
                whole = numbered(1, 8, 4, 16) + salt + round_number
                layout = layout_of("scatter", whole, 2)
                source, result = source_and_result(whole, layout, comm.rank)
                assert torch.equal(scatter(source, comm).cpu(), result)


def test_two_groups_in_one_world(crowd: Callable[[int], RankPool]) -> None:
    crowd(4).run(two_groups_at_once, timeout_s=120)


@pytest.mark.parametrize("world_size", [4, 8])
def test_more_ranks_than_gpus(crowd: Callable[[int], RankPool], world_size: int) -> None:
    crowd(world_size).run(crowded_round_trips, timeout_s=150)


def crowded_round_trips(rank: int, world_size: int) -> None:
    """Even and uneven splits, many rounds, without a host barrier between them."""
    with communicator() as comm:
        splits = [3 + (peer % 2) for peer in range(world_size)]
        for round_number in range(30):
            whole = numbered(2, 4 * world_size, 2 * world_size, 16) + round_number
            layout = layout_of("scatter", whole, world_size)
            source, result = source_and_result(whole, layout, rank)
            got = scatter(source, comm)
            assert torch.equal(got.cpu(), result), round_number
            assert torch.equal(gather(got, comm), source), round_number
            uneven = numbered(1, sum(splits), world_size, 8) + round_number
            layout = layout_of("scatter", uneven, world_size, seq_splits=splits)
            source, result = source_and_result(uneven, layout, rank)
            got = scatter(source, comm, seq_splits=splits)
            assert torch.equal(got.cpu(), result), round_number


def opened_early(rank: int, world_size: int) -> list[str]:
    """Rounds that are opened before their first send, behind late readers; and misused."""
    refused = []
    with communicator() as comm:
        (window,) = reserve(comm, [WindowSpec("early", "scatter", (1, 8, 4, 16), torch.float32)])
        for number in range(20):
            x = torch.full(window.source_shape, 100.0 * rank + number, device=comm.device)
            with Exchange(comm) as exchange:
                exchange.open(window)
                if number % 2 == rank:
                    delay(2)
                exchange.send(x, window)
            if number % 2 != rank:
                delay(2)
            for sender, part in enumerate(window.tensor.clone().chunk(world_size, dim=1)):
                assert bool((part == 100.0 * sender + number).all()), (number, sender)
        with Exchange(comm) as exchange:
            exchange.open(window)
            try:
                exchange.open(window)
            except UlyssesError as error:
                refused.append(str(error))
            exchange.send(x, window)
        try:
            with Exchange(comm) as exchange:
                exchange.open(window)
        except UlyssesError as error:
            refused.append(str(error))
        with Exchange(comm) as exchange:  # the round is still open
            exchange.send(x, window)
        settle()
    return refused


def test_a_round_may_be_opened_before_its_first_send(pair: RankPool) -> None:
    for twice, nothing in pair.run(opened_early, timeout_s=60):
        assert "channel 'early' has an exchange in flight; complete it before opening" in twice
        assert "channel 'early' was opened and nothing was sent into its windows" in nothing
