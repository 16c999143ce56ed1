"""Uneven shards, shared heads, joint text and strides over the copy engines, eager and replayed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from on_gpu import communicator, settle
from rank_pool import RankPool
from torch import Tensor
from whole_tensors import layout_of, numbered, same_bytes

from ulysses_ops import (
    Exchange,
    JointSequence,
    WindowSpec,
    even_splits,
    gather,
    reserve,
    scatter,
    sdpa,
    ulysses_attention,
    ulysses_joint_attention,
)
from ulysses_ops.graphs import capture_step
from ulysses_ops.reference import shard_of, window_of

Ranks = Callable[[int], RankPool]

DTYPES = (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int64)


def split_cases(world_size: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Rows and heads of each rank."""
    heads = even_splits(2 * world_size + 1, world_size)
    last_alone = (0,) * (world_size - 1)
    return [
        (even_splits(1001, world_size), heads),
        (even_splits(world_size - 1, world_size), heads),  # the last rank holds no row
        ((*last_alone, 5), heads),
        (even_splits(29, world_size), (3, *last_alone)),  # and here no heads
        ((*last_alone, 7), (5, *last_alone)),
    ]


def uneven_round_trips(rank: int, world_size: int) -> None:
    """There and back, thrice without a barrier between, with other values each time."""
    with communicator(max_windows=80) as comm:
        for seq_splits, head_splits in split_cases(world_size):
            for dtype in DTYPES:
                shape = (2, sum(seq_splits), sum(head_splits), 16)
                for round_number in range(3):
                    whole = numbered(*shape, dtype=dtype).roll(round_number, dims=1)
                    splits = {"seq_splits": seq_splits, "head_splits": head_splits}
                    layout = layout_of("scatter", whole, world_size, **splits)
                    source = shard_of(whole, layout, rank).cuda()
                    got = scatter(source, comm, **splits)
                    assert same_bytes(got.cpu(), window_of(whole, layout, rank)), (layout, dtype)
                    assert same_bytes(gather(got, comm, **splits).cpu(), source.cpu()), layout


def test_uneven_round_trips(pair: RankPool) -> None:
    pair.run(uneven_round_trips, timeout_s=120)


def test_uneven_round_trips_of_more_ranks(crowd: Ranks) -> None:
    crowd(4).run(uneven_round_trips, timeout_s=150)


def empty_windows_are_told_apart(rank: int, world_size: int) -> None:
    """Two windows of one channel that are empty here, by parts and whole, and then evicted."""
    rows = (6, *(0,) * (world_size - 1))
    specs = [
        WindowSpec(name, "gather", (1, 6, world_size, 8), torch.float32, "both", rows)
        for name in ("a", "b")
    ]
    with communicator(max_windows=2) as comm:
        windows = reserve(comm, specs)
        assert (windows[0].tensor.numel() == 0) == (rank > 0)
        assert windows[0].address != windows[1].address
        for round_number in range(3):
            x = torch.full(windows[0].source_shape, rank + 10.0 * round_number, device="cuda")
            with Exchange(comm) as exchange:
                exchange.send(x, windows[0])
                for peer, part in enumerate(x.split(list(rows), dim=1)):
                    exchange.send(part, windows[1], peer=peer)
            for window in windows:
                if rank == 0:
                    expected = torch.arange(world_size, device="cuda") + 10.0 * round_number
                    assert torch.equal(window.tensor[0, 0, :, 0], expected)
        (other,) = reserve(comm, [WindowSpec("c", "scatter", (1, 6, world_size, 8), torch.int8)])
        assert other.tensor.numel() > 0
        settle()


def test_empty_windows_are_told_apart(pair: RankPool, crowd: Ranks) -> None:
    pair.run(empty_windows_are_told_apart)
    crowd(3).run(empty_windows_are_told_apart)


def whole_qkv(rows: int, heads: int, kv_heads: int, salt: int = 0) -> list[Tensor]:
    """The same on every rank."""
    generator = torch.Generator().manual_seed(salt)
    sizes = (heads, kv_heads, kv_heads)
    return [torch.randn(2, rows, size, 32, generator=generator).cuda() for size in sizes]


ATTENTION = [(28, 7), (6, 3), (8, 1), (16, 2), (12, 12)]


def uneven_attention(rank: int, world_size: int) -> None:
    """Attention of one rank, with KV heads that several ranks need; a wrong one is noticed."""
    with communicator(max_windows=40) as comm:
        for heads, kv_heads in ATTENTION:
            for total in (61, world_size - 1):
                splits = even_splits(total, world_size)
                wholes = whole_qkv(total, heads, kv_heads)
                expected = sdpa(*wholes).split(list(splits), dim=1)[rank]
                q, k, v = (x.split(list(splits), dim=1)[rank] for x in wholes)
                got = ulysses_attention(q, k, v, comm, seq_splits=splits)
                torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
                turned = ulysses_attention(q, -k, v, comm, seq_splits=splits)
                assert got.numel() == 0 or total == 1 or not torch.allclose(turned, expected)


def test_uneven_attention(pair: RankPool) -> None:
    pair.run(uneven_attention, timeout_s=120)


def test_uneven_attention_of_more_ranks(crowd: Ranks) -> None:
    crowd(4).run(uneven_attention, timeout_s=150)


def replayed(rank: int, world_size: int) -> int:
    """A captured step over uneven shards and shared heads, with new data at each replay."""
    splits = even_splits(61, world_size)
    with communicator() as comm:

        def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return ulysses_attention(q, k, v, comm, seq_splits=splits)

        def local(salt: int) -> list[Tensor]:
            wholes = whole_qkv(61, 6, 3, salt)
            return [x.split(list(splits), dim=1)[rank].contiguous() for x in wholes]

        captured = capture_step(comm, step, local(0))
        wrong = 0
        for salt in range(1, 21):
            got = captured.replay(*local(salt))
            expected = sdpa(*whole_qkv(61, 6, 3, salt)).split(list(splits), dim=1)[rank]
            wrong += int(not torch.allclose(got, expected, rtol=1e-4, atol=1e-5))
        return wrong


def test_a_captured_step_over_uneven_shards(pair: RankPool, crowd: Ranks) -> None:
    assert pair.run(replayed) == [0] * 2
    assert crowd(4).run(replayed, timeout_s=120) == [0] * 4


def joint_text(rank: int, world_size: int) -> None:
    """Padded text before or after an image, sharded or held by all."""
    texts: tuple[Any, ...] = ("sharded", "replicated")
    with communicator(max_windows=40) as comm:
        for text in texts:
            for text_first in (True, False):
                joint = JointSequence.divided(8, 13, world_size, text=text, text_first=text_first)
                wholes = whole_qkv(21, 6, 2)
                is_real = torch.ones(21, dtype=torch.bool, device="cuda")
                is_real[joint.text_start + 2 : joint.text_start + 8] = False
                mask = is_real.view(1, 1, 1, 21)
                expected = joint.shard(sdpa(*wholes, mask=mask), rank)
                q, k, v = (joint.shard(x, rank) for x in wholes)
                for _ in range(3):
                    got = ulysses_joint_attention(q, k, v, comm, joint, mask=mask)
                    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
                assert not torch.allclose(ulysses_joint_attention(q, k, v, comm, joint), expected)


def test_joint_text(pair: RankPool, crowd: Ranks) -> None:
    pair.run(joint_text)
    crowd(4).run(joint_text, timeout_s=120)


def any_order_in_memory(rank: int, world_size: int) -> None:
    """(B, H, S, D) and (S, B, H, D) are read where they are, in both directions."""
    whole = numbered(3, 10 * world_size, 3 * world_size, 16, dtype=torch.bfloat16)
    with communicator() as comm:
        for direction, exchange in (("scatter", scatter), ("gather", gather)):
            layout = layout_of(direction, whole, world_size)  # type: ignore[arg-type]
            source = shard_of(whole, layout, rank).cuda()
            for a, b in ((1, 2), (0, 1), (0, 2)):
                view = source.transpose(a, b).contiguous().transpose(a, b)
                before = torch.cuda.memory_stats()["allocation.all.allocated"]
                exchange(view, comm)
                dense = torch.cuda.memory_stats()["allocation.all.allocated"]
                got = exchange(view, comm)
                again = torch.cuda.memory_stats()["allocation.all.allocated"]
                assert same_bytes(got.cpu(), window_of(whole, layout, rank).contiguous())
                assert again - dense == 1, (dense - before, "the result, and no copy of the source")
            wide = torch.zeros((*source.shape[:3], 32), dtype=source.dtype, device="cuda")[..., ::2]
            wide.copy_(source)
            before = torch.cuda.memory_stats()["allocation.all.allocated"]
            got = exchange(wide, comm)
            assert torch.cuda.memory_stats()["allocation.all.allocated"] - before == 2  # a copy
            assert same_bytes(got.cpu(), window_of(whole, layout, rank).contiguous())


def test_any_order_in_memory(pair: RankPool, crowd: Ranks) -> None:
    pair.run(any_order_in_memory)
    crowd(4).run(any_order_in_memory, timeout_s=120)


def mixed_dtypes(rank: int, world_size: int) -> None:
    """Q and K in fp32, V in bf16, completed together: right for each."""
    dtypes = {"v": torch.bfloat16, "k": torch.float32, "q": torch.float32}
    with communicator() as comm:
        shape = (1, 13, 4, 16)
        specs = [
            WindowSpec(name, "scatter", shape, dtype, "vkq", (7, 6))
            for name, dtype in dtypes.items()
        ]
        windows = reserve(comm, specs)
        wholes = [numbered(*shape, dtype=dtype) for dtype in dtypes.values()]
        layout = windows[0].layout
        with Exchange(comm) as exchange:
            for whole, window in zip(wholes, windows, strict=True):
                exchange.send(shard_of(whole, layout, rank).cuda(), window)
        for whole, window in zip(wholes, windows, strict=True):
            assert same_bytes(window.tensor.cpu(), window_of(whole, layout, rank).contiguous())


def test_mixed_dtypes_in_one_channel(pair: RankPool) -> None:
    pair.run(mixed_dtypes)


def wrong_rows(rank: int, world_size: int) -> list[str]:
    """One rank holds other rows than declared: all say so, and go on."""
    x = torch.zeros(1, (4, 7)[rank], 4, 8, device="cuda")
    good = torch.ones(1, (4, 3)[rank], 4, 8, device="cuda")
    texts = []
    with communicator(timeout_s=5) as comm:
        calls = (
            partial(scatter, x, comm, seq_splits=(4, 3)),
            partial(ulysses_attention, x, x, x, comm, seq_splits=(4, 3)),
        )
        for call in calls:
            with pytest.raises(ValueError, match="rank 1 holds") as error:
                call()
            texts.append(str(error.value))
        assert scatter(good, comm, seq_splits=(4, 3)).sum() == 7 * 2 * 8
    return texts


def test_rows_that_are_not_as_declared_are_refused_by_all(pair: RankPool) -> None:
    first, second = pair.run(wrong_rows)
    assert first == second
