"""Under torch.compile the functional operators are what they are without it; groups may change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankPool
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from whole_tensors import layout_of, numbered

from ulysses_ops import (
    UlyssesCommunicator,
    UlyssesError,
    even_splits,
    gather,
    scatter,
    sdpa,
    ulysses_attention,
)
from ulysses_ops.agreement import Agreement
from ulysses_ops.reference import shard_of, window_of

Ranks = Callable[[int], RankPool]


def compiled(fn: Callable[..., Any], backend: Any = "inductor", **options: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(fn, fullgraph=True, backend=backend, **options)


def functional(rank: int, world_size: int) -> None:
    with UlyssesCommunicator(timeout_s=20) as comm:

        def step(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            y = scatter(x, comm)
            z = y.sum()
            y2 = scatter(x + 1, comm)
            return y, z, gather(y2 * 2, comm)

        fast = compiled(step)
        x = numbered(1, 4, 4, 8) + rank
        first = fast(x)
        before = [value.clone() for value in first]
        for value, expected in zip(first, step(x), strict=True):
            assert torch.equal(value, expected)
        second = fast(-x)
        for value, expected in zip(second, step(-x), strict=True):
            assert torch.equal(value, expected)
        for value, kept, other in zip(first, before, second, strict=True):
            assert torch.equal(value, kept), "the second call changed a result of the first"
            assert not torch.equal(value, other)


def test_functional_operators_equal_eager_ones(compiling_ranks: RankPool) -> None:
    compiling_ranks.run(functional, timeout_s=100)


def uneven(rank: int, world_size: int) -> None:
    whole = numbered(2, 13, 5, 3)
    splits = {"seq_splits": (7, 6), "head_splits": (2, 3)}
    layout = layout_of("scatter", whole, world_size, **splits)
    with UlyssesCommunicator(timeout_s=20) as comm:

        def there_and_back(x: Tensor) -> tuple[Tensor, Tensor]:
            y = scatter(x, comm, **splits)
            return y, gather(y + 1, comm, **splits)

        x = shard_of(whole, layout, rank)
        y, back = compiled(there_and_back, "aot_eager")(x)
        assert torch.equal(y, window_of(whole, layout, rank))
        assert torch.equal(back, x + 1)


def test_uneven_splits(compiling_ranks: RankPool) -> None:
    compiling_ranks.run(uneven, timeout_s=60)


def attention_with_gradients(rank: int, world_size: int) -> None:
    generator = torch.Generator().manual_seed(rank)
    inputs = [torch.randn(1, 4, 4, 8, generator=generator, requires_grad=True) for _ in range(3)]
    with UlyssesCommunicator(timeout_s=20) as comm:

        def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return ulysses_attention(q, k, v, comm).sin()

        out = compiled(step)(*inputs)
        found = torch.autograd.grad(out.sum(), inputs)
        with torch.no_grad():
            torch.testing.assert_close(out, step(*inputs))

        def functional_step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return gather(sdpa(scatter(q, comm), scatter(k, comm), scatter(v, comm)), comm).sin()

        expected = torch.autograd.grad(functional_step(*inputs).sum(), inputs)
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other)


def test_attention_and_its_gradients(compiling_ranks: RankPool) -> None:
    compiling_ranks.run(attention_with_gradients, timeout_s=100)


# ---- modules, groups and shapes that change ------------------------------------------------------


class ThereAndBack(nn.Module):
    """Holds its communicator, as a model would."""

    def __init__(self, comm: UlyssesCommunicator) -> None:
        super().__init__()
        self.comm = comm

    def forward(self, x: Tensor) -> Tensor:
        return gather(scatter(x, self.comm).sin(), self.comm)


def rebuilt_groups(rank: int, world_size: int, folder: str) -> None:
    torch._dynamo.reset()
    x = numbered(1, 4, 4, 8) + rank
    first = UlyssesCommunicator(timeout_s=20)
    module = ThereAndBack(first)
    fast = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert torch.equal(fast(x), x.sin())

    first.close()
    with pytest.raises(UlyssesError, match="is closed; construct a new one"):
        fast(x)  # not the communicator that was traced

    module.comm = UlyssesCommunicator(timeout_s=20)  # the same name
    assert module.comm.name == first.name
    assert torch.equal(fast(x), x.sin())
    module.comm.close()

    with UlyssesCommunicator(dist.new_group([0, 1]), timeout_s=20) as another:
        module.comm = another
        assert torch.equal(fast(x + 1), (x + 1).sin())

    dist.destroy_process_group()
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/next", rank=rank, world_size=world_size
    )
    with UlyssesCommunicator(timeout_s=20) as anew:
        assert anew.name == first.name
        module.comm = anew
        assert torch.equal(fast(x), x.sin())


def test_a_module_outlives_its_groups(compiling_ranks: RankPool, tmp_path: Path) -> None:
    compiling_ranks.run(rebuilt_groups, str(tmp_path), timeout_s=100)


def changing_lengths(rank: int, world_size: int) -> tuple[int, int]:
    meetings: list[str] = []
    while_compiling: list[int] = []
    exchange = Agreement.exchange
    counter = CompileCounterWithBackend("aot_eager")

    def backend(graph: Any, inputs: Any) -> Any:
        before = len(meetings)
        result = counter(graph, inputs)
        while_compiling.append(len(meetings) - before)
        return result

    def recorded(agreement: Agreement, topic: str, record: dict[str, Any]) -> Any:
        meetings.append(topic)
        return exchange(agreement, topic, record)

    with UlyssesCommunicator(timeout_s=20) as comm:
        fast = compiled(ThereAndBack(comm), backend)
        with mock.patch.object(Agreement, "exchange", recorded):
            for rows in range(2, 22):
                x = numbered(1, rows, 4, 8) + rank
                assert torch.equal(fast(x), x.sin())
    assert while_compiling == [0] * len(while_compiling)
    return len(meetings), counter.frame_count


def test_changing_lengths_recompile_once_and_never_meet_while_tracing(
    compiling_ranks: RankPool,
) -> None:
    by_rank = compiling_ranks.run(changing_lengths, timeout_s=100)
    assert by_rank == [(40, 2)] * 2  # each length meets once for each direction


class UnevenAttention(nn.Module):
    """Requests of any length: the total comes in, the splits are derived from it."""

    def __init__(self, comm: UlyssesCommunicator) -> None:
        super().__init__()
        self.comm = comm

    def forward(self, x: Tensor, total: int) -> Tensor:
        splits = even_splits(total, self.comm.world_size)
        q, kv = x, x[:, :, :2]
        return ulysses_attention(q * 2, kv, kv, self.comm, seq_splits=splits)


def uneven_lengths(rank: int, world_size: int, compiler: str | None) -> tuple[int, int]:
    """30 lengths, most of them uneven; what is compiled equals one process, and never meets."""
    while_compiling: list[int] = []
    meetings: list[str] = []
    exchange = Agreement.exchange
    counter = CompileCounterWithBackend(compiler or "eager")

    def backend(graph: Any, inputs: Any) -> Any:
        before = len(meetings)
        result = counter(graph, inputs)
        while_compiling.append(len(meetings) - before)
        return result

    def recorded(agreement: Agreement, topic: str, record: dict[str, Any]) -> Any:
        meetings.append(topic)
        return exchange(agreement, topic, record)

    lengths = [1001, *range(21, 80, 3), 1001, 83, 84, 85, 86, 87, 88, 89, 90]
    assert len(lengths) == 30
    with UlyssesCommunicator(timeout_s=20) as comm:
        module = UnevenAttention(comm)
        fast = module if compiler is None else compiled(module, backend)
        with mock.patch.object(Agreement, "exchange", recorded), torch.no_grad():
            for total in lengths:
                generator = torch.Generator().manual_seed(total)
                whole = torch.randn(1, total, 6, 4, generator=generator)
                splits = list(even_splits(total, world_size))
                kv = whole[:, :, :2]
                expected = sdpa(whole * 2, kv, kv).split(splits, dim=1)[rank]
                x = whole.split(splits, dim=1)[rank]
                torch.testing.assert_close(fast(x, total), expected, rtol=1e-4, atol=1e-5)
    assert while_compiling == [0] * len(while_compiling)
    return len(set(lengths)), counter.frame_count


@pytest.mark.long
@pytest.mark.parametrize(("world_size", "compiler"), [(4, "aot_eager"), (2, "inductor")])
def test_requests_of_uneven_lengths_recompile_a_few_times_at_most(
    ranks: Ranks, world_size: int, compiler: str
) -> None:
    by_rank = ranks(world_size).run(uneven_lengths, compiler, timeout_s=200)
    lengths, compilations = zip(*by_rank, strict=True)
    assert set(lengths) == {29}
    assert max(compilations) <= 3
    if compiler == "aot_eager":
        assert ranks(world_size).run(uneven_lengths, None, timeout_s=60) == [(29, 0)] * 4


def trace_alone(rank: int, world_size: int) -> None:
    """Rank 0 traces, rank 1 does not: a fake asks nobody."""
    with UlyssesCommunicator(timeout_s=1) as comm:
        if rank == 0:
            with FakeTensorMode() as mode:
                fake = mode.from_tensor(numbered(2, 3, 4, 5))
                y = scatter(fake, comm)
                assert (y.shape, y.stride()) == ((2, 6, 2, 5), (60, 10, 5, 1))
                y = scatter(fake, comm, seq_splits=(3, 5), head_splits=(1, 3))
                assert y.shape == (2, 8, 1, 5)
                assert gather(y, comm, seq_splits=(3, 5), head_splits=(1, 3)).shape == fake.shape
        x = numbered(1, 2, 2, 2)
        assert torch.equal(gather(scatter(x, comm), comm), x)


def test_fakes_ask_no_other_rank(compiling_ranks: RankPool) -> None:
    compiling_ranks.run(trace_alone, timeout_s=30)
