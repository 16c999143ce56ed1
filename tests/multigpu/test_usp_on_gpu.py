"""A ring between GPUs, alone and around Ulysses: attention of one process; both captured."""

from __future__ import annotations

import pytest
import torch
from rank_pool import RankPool
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from ulysses_ops import sdpa
from ulysses_ops.graphs import capture_step
from ulysses_ops.ring import attend_with_lse
from ulysses_ops.usp import UspAttention, host_mesh

ROWS, HEADS, DIM = 512, 8, 64
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


def relative(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


def wholes(dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    shape = (1, ROWS, HEADS, DIM)
    return [torch.randn(shape, generator=generator, device="cuda", dtype=dtype) for _ in range(3)]


def kernels(rank: int, world_size: int) -> list[float]:
    """Each fused kernel and its log-sum-exp; rows that are no multiple of 32 too."""
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        for rows in (ROWS, 45):
            q, k, v = (x[:, :rows] for x in wholes(dtype))
            k, v = k[:, :, ::2], v[:, :, ::2]
            out, lse = attend_with_lse(q, k, v)
            right, right_lse = attend_with_lse(*(x.double() for x in (q, k, v)))
            found += [
                relative(out, right) / TOLERANCE[dtype],
                relative(lse, right_lse) / TOLERANCE[dtype],
            ]
    return found


def test_kernels_and_their_log_sum_exp(pair: RankPool) -> None:
    for found in pair.run(kernels, timeout_s=60):
        assert max(found) < 1, found


def ring_of_two(rank: int, world_size: int, dtype: torch.dtype) -> list[float]:
    mesh = init_device_mesh("cuda", (world_size, 1), mesh_dim_names=("ring", "ulysses"))
    found = []
    with UspAttention(mesh, timeout_s=20) as attention, torch.no_grad():
        for seed in range(4):
            whole = wholes(dtype, seed)
            expected = sdpa(*whole).chunk(world_size, dim=1)[rank]
            local = [x.chunk(world_size, dim=1)[rank] for x in whole]
            alone = sdpa(*local)
            found.append(relative(attention(*local), expected))
            assert relative(alone, expected) > 0.1, "BLIND: the own keys alone are as good"
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ring_of_two(pair: RankPool, dtype: torch.dtype) -> None:
    for found in pair.run(ring_of_two, dtype, timeout_s=120):
        assert max(found) < TOLERANCE[dtype], found


def one_host(rank: int, world_size: int) -> str:
    mesh = host_mesh("cuda", timeout_s=20)
    assert list(mesh.mesh.shape) == [1, world_size]
    with UspAttention(mesh, timeout_s=20) as attention, torch.no_grad():
        whole = wholes(torch.bfloat16)
        local = [x.chunk(world_size, dim=1)[rank] for x in whole]
        expected = sdpa(*whole).chunk(world_size, dim=1)[rank]
        assert relative(attention(*local), expected) < TOLERANCE[torch.bfloat16]
        return attention.comm.transport


def test_one_host_is_a_ring_of_one_on_copy_engines(pair: RankPool) -> None:
    assert pair.run(one_host, timeout_s=60) == ["ce"] * 2


def two_by_two(rank: int, world_size: int) -> str:
    mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("ring", "ulysses"))
    with UspAttention(mesh, timeout_s=20) as attention, torch.no_grad():

        def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attention(q, k, v)

        first = [x.chunk(world_size, dim=1)[rank] for x in wholes(torch.bfloat16)]
        captured = capture_step(attention.comm, step, first)
        for seed in range(20):
            whole = wholes(torch.bfloat16, seed)
            local = [x.chunk(world_size, dim=1)[rank] for x in whole]
            expected = sdpa(*whole).chunk(world_size, dim=1)[rank]
            assert relative(step(*local), expected) < TOLERANCE[torch.bfloat16]
            assert relative(captured.replay(*local), expected) < TOLERANCE[torch.bfloat16]
        attention.comm.synchronize()
        return attention.comm.transport


@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs 4 GPUs")
def test_two_rings_across_two_rows() -> None:
    with RankPool(4, backend="cpu:gloo,cuda:nccl", devices=[0, 1, 2, 3]) as pool:
        assert pool.run(two_by_two, timeout_s=120) == ["ce"] * 4
