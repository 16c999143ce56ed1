"""Signatures of other packages: equal to those packages where they are installed, and to SDPA."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankPool
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from whole_tensors import numbered

from ulysses_ops import UlyssesCommunicator, sdpa
from ulysses_ops.from_deepspeed import DistributedAttention
from ulysses_ops.from_xdit import xFuserLongContextAttention
from ulysses_ops.from_yunchang import SeqAllToAll4D, UlyssesAttention
from ulysses_ops.names import open_communicator, shared_communicator
from ulysses_ops.usp import UspAttention

Ranks = Callable[[int], RankPool]


def needs(package: str) -> pytest.MarkDecorator:
    there = importlib.util.find_spec(package) is not None
    return pytest.mark.skipif(not there, reason=f"{package} is not installed")


def qkv(rows: int = 12, heads: int = 4, kv_heads: int = 4, grad: bool = False) -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    return [
        torch.randn(2, rows, count, 8, generator=generator).requires_grad_(grad)
        for count in (heads, kv_heads, kv_heads)
    ]


def shard(x: Tensor, rank: int, world_size: int) -> Tensor:
    return x.chunk(world_size, dim=1)[rank]


def repeated(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Local attention as callers write it: as many KV heads as query heads are made first."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
    return sdpa(q, k, v, **options)


def rows_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Local attention of (S, B, H, D)."""
    out = repeated(q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1))
    return out.transpose(0, 1).contiguous()


# ---- DeepSpeed -----------------------------------------------------------------------------------

CASES = [(4, 4, 0), (4, 2, 0), (6, 3, 0), (3, 3, 0), (4, 4, 1), (4, 2, 1), (6, 3, 1)]


def deepspeed_form(rank: int, world_size: int, heads: int, kv_heads: int, batch_dim: int) -> None:
    wholes = qkv(heads=heads, kv_heads=kv_heads)
    expected = shard(repeated(*wholes), rank, world_size)
    local = [shard(x, rank, world_size) for x in wholes]
    if batch_dim == 1:
        local, expected = [x.transpose(0, 1) for x in local], expected.transpose(0, 1)
    kernel = rows_first if batch_dim == 1 else repeated
    with UlyssesCommunicator(timeout_s=10) as comm:
        attention = DistributedAttention(kernel, dist.group.WORLD, 2, 1)
        assert attention.comm is comm
        torch.testing.assert_close(attention(*local, batch_dim_idx=batch_dim), expected)


@pytest.mark.parametrize(("heads", "kv_heads", "batch_dim"), CASES)
def test_distributed_attention(ranks: Ranks, heads: int, kv_heads: int, batch_dim: int) -> None:
    ranks(2).run(deepspeed_form, heads, kv_heads, batch_dim, timeout_s=30)


def beside_deepspeed(rank: int, world_size: int, heads: int, kv_heads: int, batch_dim: int) -> None:
    """Values and gradients, with keywords for the kernel and rotation of 6 of 8 entries."""
    import deepspeed
    from deepspeed.sequence.layer import DistributedAttention as Theirs
    from deepspeed.utils import groups

    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    groups._get_sequence_parallel_rank = dist.get_rank
    generator = torch.Generator().manual_seed(1)
    shape = (1, 12, 1, 6) if batch_dim == 1 else (12, 1, 1, 6)
    angles = torch.randn(shape, generator=generator)
    rotary = (angles.cos(), angles.sin())
    outs, grads = [], []
    with UlyssesCommunicator(timeout_s=10):
        for kind in (Theirs, DistributedAttention):
            wholes = qkv(heads=heads, kv_heads=kv_heads, grad=True)
            local = [shard(x, rank, world_size) for x in wholes]
            if batch_dim == 1:
                local = [x.transpose(0, 1) for x in local]
            kernel = rows_first if batch_dim == 1 else repeated
            attention = kind(kernel, dist.group.WORLD, 2, 1 - batch_dim)
            out = attention(*local, batch_dim, rotary)
            grads.append(torch.autograd.grad(out.sin().sum(), wholes))
            outs.append(out.detach())
            plain = attention(*local, batch_dim)
            assert not torch.allclose(plain, out), "BLIND: rotation makes no difference"
    torch.testing.assert_close(outs[1], outs[0])
    for ours, theirs in zip(grads[1], grads[0], strict=True):
        torch.testing.assert_close(ours, theirs)


@needs("deepspeed")
@pytest.mark.parametrize(("heads", "kv_heads", "batch_dim"), CASES)
def test_distributed_attention_is_deepspeed_s(
    ranks: Ranks, heads: int, kv_heads: int, batch_dim: int
) -> None:
    ranks(2).run(beside_deepspeed, heads, kv_heads, batch_dim, timeout_s=60)


# ---- yunchang ------------------------------------------------------------------------------------


def yunchang_form(rank: int, world_size: int) -> None:
    whole = numbered(2, 12, 4, 8)
    wholes = qkv()
    local = [shard(x, rank, world_size) for x in wholes]
    with pytest.raises(ValueError, match="no communicator is open over this group"):
        SeqAllToAll4D.apply(dist.group.WORLD, shard(whole, rank, world_size), 2, 1)
    with UlyssesCommunicator(timeout_s=10) as comm:
        for group in (dist.group.WORLD, None, comm, init_device_mesh("cpu", (world_size,))):
            x = shard(whole, rank, world_size)
            y = SeqAllToAll4D.apply(group, x, 2, 1)
            assert torch.equal(y, whole.chunk(world_size, dim=2)[rank])
            assert torch.equal(SeqAllToAll4D.apply(group, y, 1, 2, use_sync=True), x)
        with pytest.raises(ValueError, match="scatter_idx=3 and gather_idx=1 must be 2 and 1"):
            SeqAllToAll4D.apply(comm, whole, 3, 1)

        attention = UlyssesAttention(dist.group.WORLD, attn_type="TORCH_MATH")
        assert attention.comm is comm
        expected = shard(sdpa(*wholes), rank, world_size)
        torch.testing.assert_close(attention(*local), expected)
        scaled = attention(*local, softmax_scale=0.5, causal=True)
        later = torch.ones(12, 12).tril().bool()
        right = sdpa(wholes[0] * 0.5 * 8**0.5, wholes[1], wholes[2], mask=later)
        torch.testing.assert_close(scaled, shard(right, rank, world_size))
        for option in ({"window_size": (4, 4)}, {"softcap": 3.0}, {"alibi_slopes": whole}):
            with pytest.raises(ValueError, match=f"{next(iter(option))} is not known to"):
                attention(*local, **option)
        with pytest.raises(ValueError, match="attn_type=SAGE_FP8 is none of"):
            UlyssesAttention(comm, attn_type="SAGE_FP8")
        told: list[dict[str, Any]] = []

        def kernel(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, None]:
            told.append(options)
            return sdpa(q, k, v), None

        given = UlyssesAttention(comm, attn_type="SAGE_FP8", attention=kernel)
        torch.testing.assert_close(given(*local, softcap=3.0), expected)
        assert told[0]["softcap"] == 3.0


def test_exchange_and_attention_of_yunchang(ranks: Ranks) -> None:
    ranks(2).run(yunchang_form, timeout_s=30)


def beside_yunchang(rank: int, world_size: int) -> None:
    from yunchang.comm.all_to_all import SeqAllToAll4D as Theirs

    with UlyssesCommunicator(timeout_s=10):
        found = []
        for kind in (Theirs, SeqAllToAll4D):
            x = (numbered(2, 6, 4, 8) + rank).requires_grad_()
            y = kind.apply(dist.group.WORLD, x, 2, 1)
            back = kind.apply(dist.group.WORLD, y.sin(), 1, 2)
            (grad,) = torch.autograd.grad((back * back).sum(), [x])
            found.append((y.detach(), back.detach(), grad))
        for theirs, ours in zip(*found, strict=True):
            assert torch.equal(ours, theirs)


@needs("yunchang")
@pytest.mark.parametrize("world_size", [2, 4])
def test_exchange_is_yunchang_s(ranks: Ranks, world_size: int) -> None:
    ranks(world_size).run(beside_yunchang, timeout_s=60)


# ---- xDiT ----------------------------------------------------------------------------------------


def xdit_form(rank: int, world_size: int, strategy: str) -> None:
    image, text = qkv(), qkv(rows=5)[::-1]
    parts = [(t, i) if strategy == "front" else (i, t) for t, i in zip(text, image, strict=True)]
    whole = sdpa(*(torch.cat(pair, dim=1) for pair in parts))
    first = strategy == "front"
    text_out, image_out = (whole[:, :5], whole[:, 5:]) if first else (whole[:, 12:], whole[:, :12])
    mine = shard(image_out, rank, world_size)
    expected = torch.cat((text_out, mine) if first else (mine, text_out), dim=1)
    local = [shard(x, rank, world_size) for x in image]
    names = ("joint_tensor_query", "joint_tensor_key", "joint_tensor_value")
    joint = dict(zip(names, text, strict=True))
    with UlyssesCommunicator(timeout_s=10):
        attention = xFuserLongContextAttention(use_pack_qkv=True, attn_type="FA")
        out = attention(None, *local, **joint, joint_strategy=strategy)
        torch.testing.assert_close(out, expected)
        alone = attention(None, *local)
        torch.testing.assert_close(alone, shard(sdpa(*image), rank, world_size))
        with pytest.raises(ValueError, match="joint_strategy='none' must be one of"):
            attention(None, *local, **joint)
        with pytest.raises(ValueError, match="with joint_tensor_query, joint_tensor_key and"):
            attention(None, *local, joint_tensor_query=text[0], joint_strategy="front")
        with pytest.raises(ValueError, match="use_kv_cache=True must be False"):
            xFuserLongContextAttention(use_kv_cache=True)


@pytest.mark.parametrize("strategy", ["front", "rear"])
def test_long_context_attention_of_xdit(ranks: Ranks, strategy: str) -> None:
    ranks(2).run(xdit_form, strategy, timeout_s=30)


def xdit_over_a_ring(rank: int, world_size: int) -> None:
    wholes = qkv()
    local = [shard(x, rank, world_size) for x in wholes]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "ulysses"))
    with UspAttention(mesh, timeout_s=10) as usp:
        attention = xFuserLongContextAttention(ranks=usp)
        expected = shard(sdpa(*wholes), rank, world_size)
        torch.testing.assert_close(attention(None, *local), expected)
        for option in ({"causal": True}, {"joint_tensor_query": local[0]}):
            with pytest.raises(ValueError, match=f"{next(iter(option))} is not served over a"):
                attention(None, *local, **option)
        with pytest.raises(ValueError, match="give it to UspAttention as kernel="):
            xFuserLongContextAttention(attn_processor=sdpa, ranks=usp)


def test_long_context_attention_over_a_ring(ranks: Ranks) -> None:
    ranks(4).run(xdit_over_a_ring, timeout_s=40)


# ---- the communicator that they find -------------------------------------------------------------


def found_and_made(rank: int, world_size: int) -> None:
    assert open_communicator(None) is None
    first = DistributedAttention(sdpa, None)  # no communicator yet: it makes one
    second = UlyssesAttention(None)
    assert first.comm is second.comm is open_communicator(dist.group.WORLD)
    first.comm.close()
    assert open_communicator(None) is None
    other = dist.new_group([0, 1])
    with UlyssesCommunicator(other, timeout_s=10) as comm:
        assert shared_communicator(other) is shared_communicator(comm) is comm
        assert open_communicator(None) is None


def test_layers_share_the_communicator_of_their_group(ranks: Ranks) -> None:
    ranks(2).run(found_and_made, timeout_s=40)


def refused() -> list[tuple[Callable[[], Any], str]]:
    alone = UlyssesCommunicator(device="cpu", name="refused")
    x = torch.zeros(1, 2, 2, 4)
    attention = DistributedAttention(sdpa, alone, num_kv_heads=3)
    return [
        (lambda: DistributedAttention(sdpa, alone, 1), "scatter_idx=1 must be 2"),
        (lambda: attention(x, x, x, 2), "batch_dim_idx=2 must be 0 or 1"),
        (lambda: attention(x, x, x, 0), "key has 2 heads, not num_kv_heads=3"),
        (lambda: UlyssesAttention(alone, 1, 2), "scatter_idx=1 and gather_idx=2 must be 2 and 1"),
        (lambda: UlyssesAttention(alone)(x, x, x, *[0.0] * 10), "2 arguments more than there are"),
    ]


def test_arguments_that_are_not_served_are_refused() -> None:
    for call, text in refused():
        with pytest.raises(ValueError, match=text):
            call()
