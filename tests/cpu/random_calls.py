"""Calls of the public API with random arguments: how they are drawn, made, and checked.

A program is a list of calls that every rank makes in the same order on one communicator. What each
must give is computed by every rank for itself, from tensors that a seed determines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import strategies as st
from layout_equation import SENTINEL, Bytes, equation, layouts
from torch import Tensor

from ulysses_ops import (
    Exchange,
    JointSequence,
    UlyssesCommunicator,
    WindowSpec,
    gather,
    reserve,
    scatter,
    sdpa,
    ulysses_attention,
    ulysses_joint_attention,
)
from ulysses_ops.plan import Layout
from ulysses_ops.reference import shard_of

DTYPES = (
    torch.float32, torch.bfloat16, torch.float64, torch.int16, torch.uint8, torch.complex64,
    torch.bool, torch.float8_e4m3fn,
)  # fmt: skip
STRIDES = ("dense", "fused", "transposed", "offset", "stepped", "expanded")


@dataclass(frozen=True)
class Functional:
    """``scatter`` or ``gather``, perhaps with its gradient."""

    layout: Layout
    dtype: torch.dtype
    strides: str
    with_gradient: bool
    seed: int

    def check(self, comm: UlyssesCommunicator) -> None:
        layout, rank = self.layout, comm.rank
        wholes = whole_of(layout, self.dtype, self.seed, self.strides)
        x = strided(shard_of(wholes, layout, rank), self.strides)
        x.requires_grad_(self.with_gradient)
        y = called(layout, x, comm)
        assert_equal(y, layout, wholes, rank)
        if self.with_gradient:
            grads = [
                numbers(layout.window_shape(peer), self.dtype, self.seed + 1 + peer)
                for peer in range(comm.world_size)
            ]
            (found,) = torch.autograd.grad(y, x, grads[rank])
            assert torch.equal(found, expected_gradient(layout, grads, rank))


@dataclass(frozen=True)
class Grouped:
    """Windows of one channel, or of one each, sent whole or by parts, completed in some order."""

    layouts: tuple[Layout, ...]
    dtype: torch.dtype
    strides: str
    by_parts: bool
    in_place: bool
    shares_channel: bool
    completions: tuple[int, ...]
    seed: int

    def check(self, comm: UlyssesCommunicator) -> None:
        rank = comm.rank
        specs = [
            WindowSpec.of_layout(
                f"w{number}", layout, self.dtype, "all" if self.shares_channel else None
            )
            for number, layout in enumerate(self.layouts)
        ]
        windows = reserve(comm, specs)
        wholes = [
            whole_of(layout, self.dtype, self.seed + number, self.strides)
            for number, layout in enumerate(self.layouts)
        ]
        together = Exchange(comm)
        exchanges = [together if self.shares_channel else Exchange(comm) for _ in windows]
        for window, whole, exchange in zip(windows, wholes, exchanges, strict=True):
            window.tensor.view(-1).view(torch.uint8).fill_(
                0 if self.dtype == torch.bool else SENTINEL
            )
            x = strided(shard_of(whole, window.layout, rank), self.strides)
            if not self.by_parts:
                exchange.send(x, window)
                continue
            for peer in range(comm.world_size):
                part = part_for(window.layout, x, peer)
                if peer == rank and self.in_place:
                    window.own_view.copy_(part)
                else:
                    exchange.send(part, window, peer=peer)
        for number in [0] if self.shares_channel else self.completions:
            exchanges[number].complete()
        for window, whole in zip(windows, wholes, strict=True):
            assert_equal(window.tensor, window.layout, whole, rank)


@dataclass(frozen=True)
class Attention:
    """``ulysses_attention`` with uneven rows and shared heads."""

    rows: tuple[int, ...]
    kv_heads: int
    per_kv_head: int
    batch: int
    replicated: bool
    strides: str
    seed: int

    def check(self, comm: UlyssesCommunicator) -> None:
        rank, total = comm.rank, sum(self.rows)
        heads = (self.kv_heads * self.per_kv_head, self.kv_heads, self.kv_heads)
        wholes = [
            normal((self.batch, total, count, 8), self.seed + i) for i, count in enumerate(heads)
        ]
        expected = sdpa(*wholes).split(self.rows, dim=1)[rank]
        local = [strided(x.split(self.rows, dim=1)[rank], self.strides) for x in wholes]
        if self.replicated:
            out = ulysses_attention(local[0], wholes[1], wholes[2], comm, kv="replicated")
        else:
            out = ulysses_attention(local[0], local[1], local[2], comm, seq_splits=self.rows)
        torch.testing.assert_close(out, expected)


@dataclass(frozen=True)
class Joint:
    """``ulysses_joint_attention``, masked or not."""

    joint: JointSequence
    kv_heads: int
    per_kv_head: int
    masked: bool
    seed: int

    def check(self, comm: UlyssesCommunicator) -> None:
        rows = self.joint.total_rows
        heads = (self.kv_heads * self.per_kv_head, self.kv_heads, self.kv_heads)
        wholes = [normal((1, rows, count, 8), self.seed + i) for i, count in enumerate(heads)]
        mask = normal((1, 1, rows, rows), self.seed + 9) if self.masked else None
        q, k, v = (self.joint.shard(x, comm.rank) for x in wholes)
        out = ulysses_joint_attention(q, k, v, comm, self.joint, mask=mask)
        expected = self.joint.shard(sdpa(*wholes, mask=mask), comm.rank)
        torch.testing.assert_close(out, expected)


@dataclass(frozen=True)
class Refused:
    """A call that no rank can serve: all say so at once, and the next call is served."""

    layout: Layout
    how: str

    def check(self, comm: UlyssesCommunicator) -> None:
        with pytest.raises(ValueError, match=r"^(scatter|gather|reserve|WindowSpec): "):
            self._call(comm)

    def _call(self, comm: UlyssesCommunicator) -> None:
        x = torch.zeros(self.layout.source_shape(comm.rank))
        ranks = comm.world_size
        if self.how == "three dimensions":
            scatter(torch.zeros(2, 2, 2), comm)
        elif self.how == "splits of other ranks":
            scatter(x, comm, seq_splits=(1,) * (ranks + 1))
        elif self.how == "splits below 0":
            gather(x, comm, seq_splits=(-1,) * ranks)
        elif self.how == "shape":
            reserve(comm, [WindowSpec("w", "scatter", (1, 2, -ranks, 1), torch.float32)])
        else:
            WindowSpec("w", "scatter", (1, 1, 1, 1), "float32")  # type: ignore[arg-type]


HOW_REFUSED = (
    "three dimensions", "splits of other ranks", "splits below 0", "shape", "dtype",
)  # fmt: skip
Call = Functional | Grouped | Attention | Joint | Refused


# ---- drawn ---------------------------------------------------------------------------------------


@st.composite
def functional_calls(draw: st.DrawFn, world_size: int) -> Functional:
    layout = draw(layouts(world_size))
    # The functional pair puts ranges one behind the other where it puts them together.
    if layout.direction == "scatter":
        layout = replace(layout, seq_starts=None, seq_total=None)
    else:
        layout = replace(layout, head_starts=None, head_total=None)
    with_gradient = draw(st.booleans())
    dtype = torch.float64 if with_gradient else draw(st.sampled_from(DTYPES))
    strides = draw(st.sampled_from(STRIDES))
    return Functional(layout, dtype, strides, with_gradient, draw(seeds))


@st.composite
def grouped_calls(draw: st.DrawFn, world_size: int) -> Grouped:
    chosen = draw(st.lists(layouts(world_size), min_size=1, max_size=3))
    return Grouped(
        tuple(chosen),
        draw(st.sampled_from(DTYPES)),
        draw(st.sampled_from(STRIDES)),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.booleans()),
        tuple(draw(st.permutations(range(len(chosen))))),
        draw(seeds),
    )


seeds = st.integers(0, 1000)


def sizes(world_size: int, least: int = 0) -> st.SearchStrategy[tuple[int, ...]]:
    """Rows of each rank, some on at least one."""
    several = st.lists(st.integers(least, 5), min_size=world_size, max_size=world_size)
    return several.filter(any).map(tuple)


def has_head_for_each(call: Attention | Joint, world_size: int) -> bool:
    return call.kv_heads * call.per_kv_head >= world_size


def attention_calls(world_size: int) -> st.SearchStrategy[Attention]:
    calls = st.builds(
        Attention,
        sizes(world_size),
        st.integers(1, 4),
        st.integers(1, 3),
        st.integers(1, 2),
        st.booleans(),
        st.sampled_from(("dense", "fused", "transposed", "offset", "stepped")),
        seeds,
    )
    return calls.filter(lambda call: has_head_for_each(call, world_size))


@st.composite
def joint_calls(draw: st.DrawFn, world_size: int) -> Joint:
    text_rows = draw(st.integers(0, 5))
    image = draw(sizes(world_size))
    text: tuple[int, ...] | None = None
    if draw(st.booleans()):
        text = draw(sizes(world_size))
        text_rows = sum(text)
    joint = JointSequence(text_rows, image, text, text_first=draw(st.booleans()))
    heads = (draw(st.integers(1, 4)), draw(st.integers(1, 3)))
    return Joint(joint, *heads, draw(st.booleans()), draw(seeds))


def programs(world_size: int) -> st.SearchStrategy[list[Call]]:
    """Up to six calls."""
    refused = st.builds(Refused, layouts(world_size), st.sampled_from(HOW_REFUSED))
    calls = st.one_of(
        functional_calls(world_size),
        grouped_calls(world_size),
        attention_calls(world_size),
        joint_calls(world_size).filter(lambda call: has_head_for_each(call, world_size)),
        refused,
    )
    return st.lists(calls, min_size=2, max_size=6)


# ---- made and checked ----------------------------------------------------------------------------


def called(layout: Layout, x: Tensor, comm: UlyssesCommunicator) -> Tensor:
    if layout.direction == "scatter":
        return scatter(
            x,
            comm,
            seq_splits=layout.seq_splits,
            head_splits=layout.head_splits,
            head_starts=layout.head_starts,
        )
    return gather(
        x,
        comm,
        seq_splits=layout.seq_splits,
        head_splits=layout.head_splits,
        seq_starts=layout.seq_starts,
    )


def part_for(layout: Layout, x: Tensor, peer: int) -> Tensor:
    """What ``peer`` gets of a source."""
    if layout.direction == "scatter":
        return x.narrow(2, layout.head_offset(peer), layout.head_splits[peer])
    return x.narrow(1, layout.seq_offset(peer), layout.seq_splits[peer])


def numbers(shape: Sequence[int], dtype: torch.dtype, seed: int) -> Tensor:
    """Random bytes; small whole numbers where sums of them are to be exact."""
    generator = torch.Generator().manual_seed(seed)
    if dtype in (torch.bool, torch.float64):
        most = 2 if dtype == torch.bool else 1000
        return torch.randint(0, most, tuple(shape), generator=generator).to(dtype)
    *outer, last = shape
    raw = torch.randint(0, 256, (*outer, last * dtype.itemsize), generator=generator)
    return raw.to(torch.uint8).view(dtype)


def normal(shape: Sequence[int], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tuple(shape), dtype=torch.float64, generator=generator)


def whole_of(layout: Layout, dtype: torch.dtype, seed: int, strides: str) -> Tensor:
    whole = numbers(layout.global_shape, dtype, seed)
    return whole[:1].expand(layout.global_shape).clone() if strides == "expanded" else whole


def strided(x: Tensor, how: str) -> Tensor:
    """The values of ``x`` in memory of another kind."""
    batch, rows, heads, dim = x.shape
    view: Tensor
    if how == "fused":
        view = x.new_empty(batch, rows, 3 * heads, dim)[:, :, heads : 2 * heads]
    elif how == "transposed":
        view = x.new_empty(batch, heads, rows, dim).transpose(1, 2)
    elif how == "offset":
        view = x.new_empty(x.numel() + 1)[1:].view(x.shape)
    elif how == "stepped":
        view = x.new_empty(batch, rows, heads, 2 * dim)[..., ::2]
    elif how == "expanded" and batch > 1:
        return x[:1].clone().expand(x.shape)
    else:
        return x.clone()
    return view.copy_(x)


def bytes_of(x: Tensor) -> Bytes:
    flat = x.detach().resolve_conj().contiguous().view(-1).view(torch.uint8)
    array: Bytes = flat.view(*x.shape, x.element_size()).numpy()
    return array


def assert_equal(y: Tensor, layout: Layout, whole: Tensor, rank: int) -> None:
    """Bit for bit, by the equation; what nobody sends is still what was there."""
    shards = [bytes_of(shard_of(whole, layout, peer)) for peer in range(layout.world_size)]
    expected = torch.from_numpy(equation(layout, shards, rank))
    if y.dtype == torch.bool:  # a byte that is neither 0 nor 1 is no bool: there, gaps hold 0
        expected[expected == SENTINEL] = 0
    found = torch.from_numpy(bytes_of(y))
    assert found.shape == expected.shape
    assert torch.equal(found, expected)


def expected_gradient(layout: Layout, grads: Sequence[Tensor], rank: int) -> Tensor:
    """What each receiver's gradient says of the part that it got, added up."""
    total = grads[rank].new_zeros(layout.source_shape(rank))
    for peer, grad in enumerate(grads):
        if layout.direction == "scatter":
            mine = grad.narrow(1, layout.seq_offset(rank), layout.seq_splits[rank])
        else:
            mine = grad.narrow(2, layout.head_offset(rank), layout.head_splits[rank])
        part_for(layout, total, peer).add_(mine)
    return total
