"""UlyssesAttention between gloo ranks against the same layer in one process, in every schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from exact_layer import Attention, Layer, all_schedules, layer_of
from rank_pool import RankPool
from torch import Tensor, nn

from ulysses_ops import (
    PEERS_FIRST,
    PLAIN,
    Exchange,
    NormRope,
    Schedule,
    UlyssesAttention,
    UlyssesCommunicator,
    sdpa,
)
from ulysses_ops.peers_first import Output, Projected
from ulysses_ops.tools.layer_variants import SendsNothing
from ulysses_ops.windows import Window

Ranks = Callable[[int], RankPool]
KINDS = [
    NormRope(),
    NormRope("per_head", "interleaved"),
    NormRope("per_head", "none"),
    NormRope("across_heads", "half_split"),
    NormRope("across_heads", "none", 0.5),
    NormRope("none", "interleaved"),
]


def rows_of(x: Tensor, comm: UlyssesCommunicator) -> Tensor:
    return x.chunk(comm.world_size, dim=1)[comm.rank]


def compare(rank: int, world_size: int, batch: int, kv_heads: int, with_bias: bool) -> None:
    """Twice each, with other inputs: what an earlier call left in a window does not pass."""
    layers = [
        layer_of(
            world_size, batch=batch, heads=4, kv_heads=kv_heads, with_bias=with_bias, seed=seed
        )
        for seed in (1, 2)
    ]
    with UlyssesCommunicator(timeout_s=20) as comm:
        for schedule in all_schedules():
            for layer in layers:
                module = layer.sharded(comm, schedule=schedule)
                got = module(*layer.inputs(rank, world_size))
                assert torch.equal(got, rows_of(layer.expected(), comm)), schedule


@pytest.mark.parametrize(
    ("world_size", "batch", "kv_heads", "with_bias"),
    [(1, 2, 4, True), (2, 1, 4, False), (2, 2, 2, True), (4, 1, 2, True), (4, 2, 4, False)],
)
def test_every_schedule_equals_one_process(
    ranks: Ranks, world_size: int, batch: int, kv_heads: int, with_bias: bool
) -> None:
    ranks(world_size).run(compare, batch, kv_heads, with_bias, timeout_s=60)


def transformed(rank: int, world_size: int, batch: int) -> None:
    """Projections are exact, norm and RoPE element by element: the same bits by every way."""
    with UlyssesCommunicator(timeout_s=20) as comm:
        for number, kind in enumerate(KINDS):
            layer = layer_of(world_size, batch=batch, norm_rope=kind, seed=number)
            x, cos, sin = layer.inputs(rank, world_size)
            q, k, v = layer.projected()
            for projection in ("whole", "peers", "destinations"):
                schedule = Schedule(projection, "peers", "slabs")
                module = layer.sharded(comm, schedule=schedule)
                for needs_grad in (False, True):  # windows, and operators without them
                    found = module.project(x.clone().requires_grad_(needs_grad), cos, sin)
                    for part, whole in zip(found, (q, k, v), strict=True):
                        own = whole.chunk(world_size, dim=2)[rank]
                        assert torch.equal(part, own), (kind, projection)
                        assert part.requires_grad is needs_grad
                got = module(x, cos, sin)
                torch.testing.assert_close(
                    got, rows_of(layer.expected(), comm), rtol=1e-12, atol=1e-9
                )


@pytest.mark.parametrize(("world_size", "batch"), [(1, 2), (2, 1), (2, 2), (4, 1)])
def test_norm_and_rope_give_the_same_bits_by_every_way(
    ranks: Ranks, world_size: int, batch: int
) -> None:
    ranks(world_size).run(transformed, batch, timeout_s=60)


# ---- controls: what is broken on purpose must be seen --------------------------------------------


@contextmanager
def swapped_weights(comm: UlyssesCommunicator) -> Iterator[None]:
    """The weights for the first two peers of rank 0 change places."""
    right = Projected._rows
    a, b = 1, 2 % comm.world_size

    def wrong(self: Projected, ranks: range) -> tuple[Tensor, Tensor | None]:
        other = {a: b, b: a}.get(ranks.start, ranks.start) if len(ranks) == 1 else ranks.start
        return right(self, range(other, other + len(ranks)))

    with mock.patch.object(Projected, "_rows", wrong):
        yield


@contextmanager
def own_heads_not_stored(comm: UlyssesCommunicator) -> Iterator[None]:
    with mock.patch.object(Projected, "store", return_value=None):
        yield


@contextmanager
def slabs_of_another_rank(comm: UlyssesCommunicator) -> Iterator[None]:
    """The output weight's columns are those of the next rank."""
    right = Output.of_heads

    def wrong(self: Output, window: Window, ranks: range) -> tuple[Tensor, Tensor]:
        received, columns = right(self, window, ranks)
        return received, columns.flip(-1)

    with mock.patch.object(Output, "of_heads", wrong):
        yield


@contextmanager
def nothing_sent(comm: UlyssesCommunicator) -> Iterator[None]:
    def begin(self: UlyssesAttention) -> Exchange:
        return SendsNothing(self.comm)

    with mock.patch.object(UlyssesAttention, "begin_exchange", begin):
        yield


FAULTS = {
    "swapped weights": swapped_weights,
    "own heads not stored": own_heads_not_stored,
    "slabs of another rank": slabs_of_another_rank,
    "nothing sent": nothing_sent,
}


def broken(rank: int, world_size: int, fault: str) -> bool:
    """Whether this rank's result is still right with the fault; it is right before and after."""
    schedule = Schedule("destinations", "destinations", "slabs")
    with UlyssesCommunicator(timeout_s=20) as comm:

        def is_right(seed: int) -> bool:
            layer = layer_of(world_size, with_bias=True, seed=seed)
            got = layer.sharded(comm, schedule=schedule)(*layer.inputs(rank, world_size))
            return torch.equal(got, rows_of(layer.expected(), comm))

        assert is_right(1)
        with FAULTS[fault](comm):
            seen = is_right(2)
        assert is_right(3)
        return seen


@pytest.mark.parametrize("fault", FAULTS)
def test_control_faults_are_seen(ranks: Ranks, fault: str) -> None:
    assert not all(ranks(4).run(broken, fault, timeout_s=60)), "BLIND"


# ---- rounding ------------------------------------------------------------------------------------


def rounded_slabs(rank: int, world_size: int, extra_roundings: float) -> bool:
    """bf16 against float64: slabs add one rounding each, of the sum so far, and no more."""
    unit = 2.0**-8
    generator = torch.Generator().manual_seed(5)
    heads, dim, width = 2 * world_size, 16, 64
    weights = {
        name: torch.randn(heads * dim, width, generator=generator).bfloat16() / 8
        for name in ("q", "k", "v")
    }
    weights["out"] = torch.randn(width, heads * dim, generator=generator).bfloat16() / 8
    x = torch.randn(1, 8 * world_size, width, generator=generator).bfloat16()
    attended: list[Tensor] = []

    def kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        attended.append(sdpa(q, k, v))
        return attended[-1]

    with UlyssesCommunicator(timeout_s=20) as comm:
        schedule = Schedule("whole", "whole", "slabs")
        module = UlyssesAttention.from_weights(
            comm, **weights, num_heads=heads, attention=kernel, schedule=schedule
        )
        got = module(rows_of(x, comm)).double()
        (received,) = module._reserve(rows_of(x, comm), schedule)[1]
        parts = list(received.tensor.flatten(2).double().chunk(world_size, dim=-1))
        own = attended[0][:, rank * 8 : (rank + 1) * 8].flatten(2).double()
        slabs = [(own, rank), *((part, p) for p, part in enumerate(parts) if p != rank)]
        columns = weights["out"].double().chunk(world_size, dim=-1)
        total = torch.zeros_like(got)
        bound = torch.zeros_like(got)
        for part, p in slabs:
            total += part @ columns[p].T
            bound += unit * (total.abs() + 0.02)  # of the sum so far; float32 sums inside a slab
        return bool(((got - total).abs() <= extra_roundings * bound).all())


@pytest.mark.parametrize("world_size", [2, 4])
def test_slabs_round_once_each(ranks: Ranks, world_size: int) -> None:
    assert all(ranks(world_size).run(rounded_slabs, 1.0, timeout_s=60))


def test_control_the_bound_of_slabs_is_not_loose(ranks: Ranks) -> None:
    assert not any(ranks(2).run(rounded_slabs, 0.25, timeout_s=60))


# ---- the module ----------------------------------------------------------------------------------


def planned(rank: int, world_size: int) -> None:
    """The planner's choice is what runs; a hint of it can be had without running."""
    layer = layer_of(world_size, norm_rope=NormRope("per_head", "interleaved"))
    x, cos, sin = layer.inputs(rank, world_size)
    with UlyssesCommunicator(timeout_s=20) as comm:
        module = layer.sharded(comm)
        plan = module.plan((1, *x.shape[1:]))
        assert "->" in plan.explanation
        assert module._schedule_for(x) == plan.schedule
        torch.testing.assert_close(module(x, cos, sin), rows_of(layer.expected(), comm))


def test_the_planner_chooses_by_default(ranks: Ranks) -> None:
    ranks(2).run(planned, timeout_s=30)


def differentiated(rank: int, world_size: int) -> None:
    """Where a gradient is needed the functional operators are used, and windows are left alone."""
    layer = layer_of(world_size, norm_rope=NormRope("across_heads", "half_split"))
    x, cos, sin = layer.inputs(rank, world_size)
    whole = layer.x.clone().requires_grad_()
    changed = Layer(**{**vars(layer), "x": whole})
    (expected,) = torch.autograd.grad(changed.expected().sin().sum(), whole)
    with UlyssesCommunicator(timeout_s=20) as comm:
        module = layer.sharded(comm, schedule=PEERS_FIRST)
        local = x.clone().requires_grad_()
        (found,) = torch.autograd.grad(module(local, cos, sin).sin().sum(), local)
    torch.testing.assert_close(found, rows_of(expected, comm))


def test_gradients_are_those_of_one_process(ranks: Ranks) -> None:
    ranks(2).run(differentiated, timeout_s=30)


def from_modules(rank: int, world_size: int) -> None:
    torch.manual_seed(3)
    x = torch.randn(1, 8, 6)
    with UlyssesCommunicator(timeout_s=20) as comm:
        for names, norm, kind in (
            (("to_q", "to_k", "to_v", "to_out"), nn.RMSNorm(4, eps=1e-5), "per_head"),
            (("q_proj", "k_proj", "v_proj", "o_proj"), None, "none"),
            (("q", "k", "v", "o"), nn.RMSNorm(16, eps=1e-5), "across_heads"),
        ):
            module = Attention(names, norm)
            layer = UlyssesAttention.from_module(comm, module, num_heads=4, schedule=PEERS_FIRST)
            assert layer.norm_rope.norm == kind
            assert layer.q.weight is getattr(module, names[0]).weight
            q, k, v = (getattr(module, name)(x) for name in names[:3])
            if kind == "across_heads":
                q, k = (getattr(module, name)(t) for name, t in (("norm_q", q), ("norm_k", k)))
            q, k, v = (t.unflatten(-1, (4, 4)) for t in (q, k, v))
            if kind == "per_head":
                q, k = (getattr(module, name)(t) for name, t in (("norm_q", q), ("norm_k", k)))
            expected = layer.out(sdpa(q, k, v).flatten(2))
            with torch.no_grad():
                got = layer(rows_of(x, comm))
            torch.testing.assert_close(got, rows_of(expected, comm))


def test_a_layer_made_of_an_existing_module(ranks: Ranks) -> None:
    ranks(2).run(from_modules, timeout_s=30)


def changed_weights(rank: int, world_size: int) -> None:
    """Weights changed in place are seen, also where their columns are copied for head chunks."""
    layer = layer_of(world_size)
    schedule = Schedule("peers", "heads", "slabs", 2)
    with UlyssesCommunicator(timeout_s=20) as comm:
        module = layer.sharded(comm, schedule=schedule)
        inputs = layer.inputs(rank, world_size)
        before = module(*inputs)
        with torch.no_grad():
            module.out.weight.mul_(2)
        assert torch.equal(module(*inputs), 2 * before)
        module.out.weight.data += module.out.weight.data  # what no version of a tensor counts
        assert torch.equal(module(*inputs), 4 * before)


def test_changed_weights_are_seen(ranks: Ranks) -> None:
    ranks(2).run(changed_weights, timeout_s=30)


def failing_kernel(rank: int, world_size: int) -> None:
    """A kernel that raises at any of its calls leaves nothing in flight."""
    layer = layer_of(world_size)
    inputs = layer.inputs(rank, world_size)
    with UlyssesCommunicator(timeout_s=20) as comm:
        for schedule in (PLAIN, PEERS_FIRST, Schedule("peers", "heads", "slabs", 2)):
            for number in range(1 if schedule == PLAIN else 2):
                calls = iter(range(9))

                def kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                    if next(calls) == number:  # noqa: B023
                        raise KeyError("ours")
                    return sdpa(q, k, v)

                module = layer.sharded(comm, schedule=schedule, attention=kernel)
                with pytest.raises(KeyError, match="ours"):
                    module(*inputs)
                good = layer.sharded(comm, schedule=schedule)
                assert torch.equal(good(*inputs), rows_of(layer.expected(), comm))


def test_a_kernel_that_raises_leaves_nothing_in_flight(ranks: Ranks) -> None:
    ranks(2).run(failing_kernel, timeout_s=30)


class Normed(torch.nn.Module):
    """An attention module with norms per head."""

    def __init__(self) -> None:
        super().__init__()
        self.to_q, self.to_k, self.to_v, self.to_out = (torch.nn.Linear(32, 32) for _ in range(4))
        self.norm_q, self.norm_k = torch.nn.RMSNorm(8, eps=1e-6), torch.nn.RMSNorm(8, eps=1e-6)


def norms_that_change(rank: int, world_size: int) -> list[float]:
    """Norm weights that are loaded, cast or replaced after construction, and their gradients."""
    torch.manual_seed(0)
    module = Normed()
    x = torch.randn(1, 4, 32)
    far = []
    with UlyssesCommunicator(timeout_s=20) as comm:
        layer = UlyssesAttention.from_module(comm, module, num_heads=4)
        with torch.no_grad():
            before = layer(x)
            loaded = {name: 3 * tensor.clone() for name, tensor in module.state_dict().items()}
            module.load_state_dict(loaded, assign=True)
            module.norm_k.weight = torch.nn.Parameter(torch.full((8,), 0.5))
            fresh = UlyssesAttention.from_module(comm, module, num_heads=4)(x)
            far.append(float((layer(x) - fresh).abs().max()))
            far.append(float((before - fresh).abs().max()))
        layer(x).square().sum().backward()
        for norm in (module.norm_q, module.norm_k):
            assert norm.weight.grad is not None
            far.append(float(norm.weight.grad.abs().max()))
    return far


def test_norms_of_a_module_are_followed(ranks: Ranks) -> None:
    for stale, changed, *gradients in ranks(2).run(norms_that_change, timeout_s=30):
        assert stale == 0
        assert changed > 0.1  # control: another layer's result is another
        assert min(gradients) > 0
