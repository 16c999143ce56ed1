"""Compiled code on GPUs, where Inductor would reuse buffers that are still being sent."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from on_gpu import communicator, expected, filled, one_window, sent_value
from rank_pool import RankPool
from torch import Tensor

from ulysses_ops.reference import scatter_reference

ROWS, HEADS, DIM = 32, 8, 64


def shards(world_size: int, number: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(number)
    return [torch.randn(1, ROWS, HEADS, DIM, generator=generator) for _ in range(world_size)]


def functional(rank: int, world_size: int, mode: str) -> None:
    """Two scatters and a gather: equal to the reference, and results stay what they were."""
    with communicator() as comm:

        def block(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            y = torch.ops.ulysses.scatter(x, world_size, comm.name)
            y2 = torch.ops.ulysses.scatter(x + 1, world_size, comm.name)
            back = torch.ops.ulysses.gather(y2 * 2, world_size, comm.name)
            return y * 1.0, y2, back

        compiled = torch.compile(block, fullgraph=True, mode=mode)
        kept: list[tuple[Tensor, Tensor]] = []
        for number in range(6):
            whole = shards(world_size, number)
            torch.compiler.cudagraph_mark_step_begin()
            y, y2, back = compiled(whole[rank].cuda())
            right = scatter_reference(whole)[rank]
            assert torch.equal(y.cpu(), right)
            assert torch.equal(y2.cpu(), scatter_reference([x + 1 for x in whole])[rank])
            torch.testing.assert_close(back.cpu(), (whole[rank] + 1) * 2)
            kept.append((y.clone(), right))
        for got, right in kept:
            assert torch.equal(got.cpu(), right)
        torch.cuda.synchronize()
        dist.barrier()


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_functional_operators(pair: RankPool, mode: str) -> None:
    pair.run(functional, mode, timeout_s=120)


def deferred(rank: int, world_size: int, mode: str) -> None:
    """A source that Inductor computes, other work in between that wants its memory, one window."""
    with communicator() as comm:
        window = one_window(comm, (1, ROWS * world_size, HEADS, DIM))
        ops = torch.ops.ulysses

        def block(x: Tensor, window_tensor: Tensor, token: Tensor) -> Tensor:
            source = x + 1
            ops.scatter_into(source, window_tensor, token, world_size, comm.name)
            other = (x * 3).sin().cos() * 0 + x
            ops.complete([window_tensor], [source], token, world_size, comm.name)
            return window_tensor.flatten(1).sum(1) + other.sum() * 0

        compiled = torch.compile(block, fullgraph=True, mode=mode)
        for number in range(12):
            torch.compiler.cudagraph_mark_step_begin()
            got = compiled(filled(window, rank, number), window.tensor, comm.token)
            assert torch.equal(window.tensor, expected(window, number) + 1)
            part = window.tensor.numel() / world_size
            total = sum((sent_value(peer, number) + 1) * part for peer in range(world_size))
            torch.testing.assert_close(float(got), total, rtol=1e-5, atol=0.0)
        torch.cuda.synchronize()
        dist.barrier()


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_deferred_operators(pair: RankPool, mode: str) -> None:
    pair.run(deferred, mode, timeout_s=120)
