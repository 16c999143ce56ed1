"""Every mode of the compiler, training, functional collectives beside ours, and export."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from generated_code import calls_in, wrapper_of
from rank_pool import RankPool
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from whole_tensors import numbered

from ulysses_ops import (
    JointSequence,
    UlyssesCommunicator,
    gather,
    scatter,
    sdpa,
    ulysses_attention,
    ulysses_joint_attention,
)
from ulysses_ops.joint_attention import attend_as_computed

MODES = ["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]


def compiled(fn: Callable[..., Any], **options: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(fn, fullgraph=True, **options)


class Block(nn.Module):
    """Projections, attention between the ranks, output projection; the same on every rank."""

    def __init__(self, comm: UlyssesCommunicator, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.comm, self.heads = comm, heads
        generator = torch.Generator().manual_seed(7)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) / width**0.5

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(2)
        attended: Tensor = ulysses_attention(q, k, v, self.comm).flatten(2)
        projected: Tensor = self.out(attended)
        return x + projected


def whole_input(rows: int = 8) -> Tensor:
    return torch.randn(2, rows, 32, generator=torch.Generator().manual_seed(rows))


# ---- modes ---------------------------------------------------------------------------------------


def in_mode(rank: int, world_size: int, mode: str, dynamic: bool) -> None:
    """Static and dynamic; the results of one call outlive the next."""
    with UlyssesCommunicator(timeout_s=20) as comm, torch.no_grad():
        block = Block(comm)
        fast = compiled(block, mode=mode, dynamic=dynamic)
        kept: list[tuple[Tensor, Tensor]] = []
        for rows in (8, 12, 20) if dynamic else (8, 8):
            x = whole_input(rows).chunk(world_size, dim=1)[rank] + len(kept)
            found, expected = fast(x), block(x)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
            kept.append((found, expected))
        for found, expected in kept:
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_a_block_in_every_mode(compiling_ranks: RankPool, mode: str) -> None:
    compiling_ranks.run(in_mode, mode, False, timeout_s=200)


def test_a_block_of_dynamic_length(compiling_ranks: RankPool) -> None:
    compiling_ranks.run(in_mode, "default", True, timeout_s=200)


# ---- training ------------------------------------------------------------------------------------


def trained(rank: int, world_size: int, backend: str) -> tuple[list[str], list[str]]:
    """Gradients are those of one process; the exchanges of each direction, as they are compiled."""
    from torch._functorch.aot_autograd import aot_module_simplified

    directions: list[list[str]] = []

    def noted(gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
        called = [str(node.target) for node in gm.graph.nodes if node.op == "call_function"]
        directions.append([name for name in called if name.startswith("ulysses.")])
        return gm.forward

    def ahead_of_time(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        return aot_module_simplified(graph, inputs, fw_compiler=noted, bw_compiler=noted)

    with UlyssesCommunicator(timeout_s=20) as comm:
        block = Block(comm)
        whole = whole_input().requires_grad_()
        x = whole.detach().chunk(world_size, dim=1)[rank].requires_grad_()
        inputs = [x, *block.parameters()]
        fast = compiled(block, backend=ahead_of_time if backend == "noted" else backend)
        found = torch.autograd.grad(fast(x).sin().sum(), inputs)

        q, k, v = block.qkv(whole).unflatten(-1, (3, 4, -1)).unbind(2)
        out = whole + block.out(sdpa(q, k, v).flatten(2))
        expected = torch.autograd.grad(out.sin().sum(), [whole, *block.parameters()])
    torch.testing.assert_close(found[0], expected[0].chunk(world_size, dim=1)[rank])
    for mine, right in zip(found[1:], expected[1:], strict=True):
        total = mine.contiguous()
        assert not torch.allclose(total, right), "BLIND: one rank's rows have the whole gradient"
        dist.all_reduce(total)
        torch.testing.assert_close(total, right, rtol=1e-4, atol=1e-5)
    return (directions[0], directions[1]) if directions else ([], [])


def test_training_exchanges_once_in_each_direction(compiling_ranks: RankPool) -> None:
    """Nothing that was exchanged is exchanged again for the backward."""
    scatters, gathers = ["ulysses.scatter.default"], ["ulysses.gather.default"]
    for forward, backward in compiling_ranks.run(trained, "noted", timeout_s=100):
        assert forward == 3 * scatters + gathers
        assert backward == scatters + 3 * gathers


@pytest.mark.long
def test_training_by_inductor(compiling_ranks: RankPool) -> None:
    compiling_ranks.run(trained, "inductor", timeout_s=150)


# ---- beside other collectives --------------------------------------------------------------------


def beside_functional_collectives(rank: int, world_size: int) -> list[str]:
    from torch._inductor.utils import run_and_get_code

    group = dist.group.WORLD
    assert group is not None
    with UlyssesCommunicator(timeout_s=20) as comm:

        def step(x: Tensor) -> tuple[Tensor, Tensor]:
            y = scatter(x, comm)
            total = funcol.all_reduce(y.sum(), "sum", group)
            z = scatter(x * 2, comm) + total
            rows = funcol.all_gather_tensor(gather(z, comm).flatten(2), 0, group)
            return rows, total

        x = numbered(1, 4, 4, 8) / 64 + rank
        fast = compiled(step)
        found, (code,) = run_and_get_code(fast, x)
        torch.testing.assert_close(found, step(x))
        torch.testing.assert_close(fast(-x), step(-x))
    return [call.op for call in calls_in(wrapper_of([code], "ulysses"), "ulysses")]


def test_functional_collectives_beside_ours(compiling_ranks: RankPool) -> None:
    by_rank = compiling_ranks.run(beside_functional_collectives, timeout_s=150)
    assert by_rank == [["scatter", "scatter", "gather"]] * 2


# ---- text and image ------------------------------------------------------------------------------


class JointBlock(nn.Module):
    """Divides its rows itself, while it is traced."""

    def __init__(self, comm: UlyssesCommunicator, text: Any, as_computed: bool) -> None:
        super().__init__()
        self.comm, self.text, self.as_computed = comm, text, as_computed

    def forward(self, x: Tensor, image_rows: int, mask: Tensor) -> Tensor:
        joint = JointSequence.divided(5, image_rows, self.comm.world_size, text=self.text)
        if self.as_computed:
            return attend_as_computed(
                self.comm, lambda: x, lambda: x * 2, lambda: x + 1, joint=joint, mask=mask
            )
        return ulysses_joint_attention(x + 1, x * 2, x, self.comm, joint, mask=mask)


def joint(rank: int, world_size: int, text: Any, as_computed: bool) -> int:
    counter = CompileCounterWithBackend("aot_eager")
    with UlyssesCommunicator(timeout_s=20) as comm, torch.no_grad():
        fast = compiled(JointBlock(comm, text, as_computed), backend=counter)
        for image_rows in (7, 10, 13, 16):
            sequence = JointSequence.divided(5, image_rows, world_size, text=text)
            generator = torch.Generator().manual_seed(image_rows)
            whole = torch.randn(1, 5 + image_rows, 4, 8, generator=generator)
            mask = (torch.arange(5 + image_rows) != 3).view(1, 1, 1, -1)
            expected = sequence.shard(sdpa(whole + 1, whole * 2, whole, mask=mask), rank)
            found = fast(sequence.shard(whole, rank), image_rows, mask)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    return counter.frame_count


@pytest.mark.parametrize("as_computed", [False, True])
@pytest.mark.parametrize("text", ["replicated", "sharded"])
def test_joint_attention_of_changing_lengths(
    compiling_ranks: RankPool, text: str, as_computed: bool
) -> None:
    compilations = compiling_ranks.run(joint, text, as_computed, timeout_s=150)
    assert max(compilations) <= 3


# ---- export --------------------------------------------------------------------------------------


def exported(rank: int, world_size: int, folder: str, strict: bool) -> list[str]:
    """Of any length; kept in a file; run with a communicator that was constructed later."""
    path = Path(folder) / f"block-{rank}.pt2"
    with UlyssesCommunicator(timeout_s=20) as comm, torch.no_grad():
        block = Block(comm)
        x = whole_input().chunk(world_size, dim=1)[rank].contiguous()
        rows = torch.export.Dim("rows", min=2, max=512)
        program = torch.export.export(block, (x,), dynamic_shapes={"x": {1: rows}}, strict=strict)
        called = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
        torch.export.save(program, path)
        name = comm.name
    loaded = torch.export.load(path).module()
    with UlyssesCommunicator(timeout_s=20) as anew, torch.no_grad():
        assert anew.name == name
        for length in (8, 20):
            x = whole_input(length).chunk(world_size, dim=1)[rank]
            block.comm = anew
            torch.testing.assert_close(loaded(x), block(x))
    return [name for name in called if name.startswith("ulysses.")]


@pytest.mark.parametrize("strict", [False, True])
def test_a_block_is_exported(compiling_ranks: RankPool, tmp_path: Path, strict: bool) -> None:
    exchanges = compiling_ranks.run(exported, str(tmp_path), strict, timeout_s=100)
    assert exchanges == [["ulysses.scatter.default"] * 3 + ["ulysses.gather.default"]] * 2
