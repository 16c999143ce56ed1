"""Compiled code on GPUs, where Inductor would reuse buffers that are still being sent."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from on_gpu import communicator, expected, filled, one_window, sent_value
from rank_pool import RankPool
from torch import Tensor

from ulysses_ops import gather, scatter, sdpa, ulysses_attention
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


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune"])
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


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune"])
def test_deferred_operators(pair: RankPool, mode: str) -> None:
    pair.run(deferred, mode, timeout_s=120)


# ---- reuse, breaks, other collectives, training --------------------------------------------------


def reused(rank: int, world_size: int, mode: str) -> None:
    """A product that would fit the memory of a source in flight, sent as well."""
    with communicator() as comm:
        shape = (1, ROWS * world_size, HEADS, DIM)
        v, k = (one_window(comm, shape, name=name, channel="vk") for name in "vk")
        weight = 2 * torch.eye(DIM, device="cuda")

        def block(x: Tensor, v: Tensor, k: Tensor, token: Tensor) -> Tensor:
            after = (token, world_size, comm.name)
            source = x + 1
            torch.ops.ulysses.scatter_into(source, v, *after)
            product = x @ weight
            torch.ops.ulysses.scatter_into(product, k, *after)
            torch.ops.ulysses.complete([v, k], [source, product], *after)
            return v + k

        compiled = torch.compile(block, fullgraph=True, mode=mode)
        for number in range(12):
            torch.compiler.cudagraph_mark_step_begin()
            got = compiled(filled(v, rank, number), v.tensor, k.tensor, comm.token)
            whole = expected(v, number)
            assert torch.equal(v.tensor, whole + 1)
            torch.testing.assert_close(k.tensor, whole * 2, rtol=1e-3, atol=1e-3)
            torch.testing.assert_close(got, whole * 3 + 1, rtol=1e-3, atol=1e-3)
        torch.cuda.synchronize()
        dist.barrier()


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_source_in_flight_is_not_reused(pair: RankPool, mode: str) -> None:
    pair.run(reused, mode, timeout_s=120)


def with_a_break(rank: int, world_size: int, mode: str) -> None:
    """The source is a result of one graph and an argument of the next."""
    with communicator() as comm:
        window = one_window(comm, (1, ROWS * world_size, HEADS, DIM))
        after = (comm.token, world_size, comm.name)

        def broken(x: Tensor) -> Tensor:
            source = x + 1
            torch.ops.ulysses.scatter_into(source, window.tensor, *after)
            torch._dynamo.graph_break()
            other = source.sin() * 0
            torch.ops.ulysses.complete([window.tensor], [source], *after)
            return window.tensor.clone() + other.sum()

        compiled = torch.compile(broken, mode=mode)
        for number in range(8):
            torch.compiler.cudagraph_mark_step_begin()
            got = compiled(filled(window, rank, number))
            assert torch.equal(got, expected(window, number) + 1)
        torch.cuda.synchronize()
        dist.barrier()


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_graph_break_between_send_and_completion(pair: RankPool, mode: str) -> None:
    pair.run(with_a_break, mode, timeout_s=120)


def beside_functional_collectives(rank: int, world_size: int) -> None:
    group = dist.group.WORLD
    assert group is not None
    with communicator() as comm:

        def step(x: Tensor) -> tuple[Tensor, Tensor]:
            y = scatter(x, comm)
            total = funcol.all_reduce(y.sum(), "sum", group)
            z = scatter(x * 2, comm) + total
            return gather(z, comm), total

        fast = torch.compile(step, fullgraph=True)
        for number in range(20):
            x = shards(world_size, number)[rank].cuda()
            torch.testing.assert_close(fast(x), step(x), rtol=1e-3, atol=1e-2)
        torch.cuda.synchronize()
        dist.barrier()


def test_functional_collectives_beside_ours(pair: RankPool) -> None:
    pair.run(beside_functional_collectives, timeout_s=120)


def trained(rank: int, world_size: int) -> None:
    """Gradients of compiled attention are those of one process."""
    with communicator() as comm:
        whole = [torch.cat(shards(world_size, number), dim=1).cuda() for number in range(3)]
        wholes = [x.requires_grad_() for x in whole]
        expected_grads = torch.autograd.grad(sdpa(*wholes).sin().sum(), wholes)
        local = [x.detach().chunk(world_size, dim=1)[rank].requires_grad_() for x in wholes]

        def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return ulysses_attention(q, k, v, comm).sin()

        compiled = torch.compile(step, fullgraph=True)
        for _ in range(3):
            found = torch.autograd.grad(compiled(*local).sum(), local)
            for mine, right in zip(found, expected_grads, strict=True):
                own = right.chunk(world_size, dim=1)[rank]
                torch.testing.assert_close(mine, own, rtol=1e-2, atol=1e-3)
        torch.cuda.synchronize()
        dist.barrier()


def test_training(pair: RankPool) -> None:
    pair.run(trained, timeout_s=120)
