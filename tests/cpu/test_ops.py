"""scatter and gather between gloo ranks: exact for every shape, split, dtype and stride."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from unittest import mock

import pytest
import torch
from rank_pool import RankPool
from torch import Tensor
from whole_tensors import layout_of, numbered, same_bytes

from ulysses_ops import UlyssesCommunicator, gather, scatter
from ulysses_ops.plan import Direction
from ulysses_ops.reference import shard_of, window_of

Ranks = Callable[[int], RankPool]
Splits = tuple[int, ...] | None

EXCHANGES: dict[str, Callable[..., Tensor]] = {"scatter": scatter, "gather": gather}
DIRECTIONS: tuple[Direction, ...] = ("scatter", "gather")


# ---- values --------------------------------------------------------------------------------------


def exchange_and_return(
    rank: int,
    world_size: int,
    direction: Direction,
    shape: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    seq_splits: Splits = None,
    head_splits: Splits = None,
) -> None:
    whole = numbered(*shape, dtype=dtype)
    layout = layout_of(direction, whole, world_size, seq_splits, head_splits)
    there = EXCHANGES[direction]
    back = EXCHANGES["gather" if direction == "scatter" else "scatter"]
    with UlyssesCommunicator(timeout_s=10) as comm:
        x = shard_of(whole, layout, rank)
        before = x.clone()
        y = there(x, comm, seq_splits=seq_splits, head_splits=head_splits)
        assert y.is_contiguous()
        assert same_bytes(y, window_of(whole, layout, rank))
        again = there(x, comm, seq_splits=seq_splits, head_splits=head_splits)
        pointers = [t.untyped_storage().data_ptr() for t in (x, y, again) if t.numel()]
        assert len(set(pointers)) == len(pointers), "a result may not share memory with anything"
        assert same_bytes(back(y, comm, seq_splits=seq_splits, head_splits=head_splits), before)
        assert same_bytes(x, before)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    ("world_size", "shape"),
    [
        (1, (2, 4, 8, 16)),
        (2, (2, 4, 8, 16)),
        (4, (2, 4, 8, 16)),
        (2, (3, 10, 6, 40)),
        (4, (3, 20, 12, 40)),
        (2, (1, 2, 2, 1)),
        (2, (0, 4, 4, 8)),
        (2, (1, 0, 4, 8)),
    ],
)
def test_even_splits(
    ranks: Ranks, direction: Direction, world_size: int, shape: tuple[int, ...]
) -> None:
    ranks(world_size).run(exchange_and_return, direction, shape, timeout_s=20)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    ("world_size", "shape", "seq_splits", "head_splits"),
    [
        (2, (2, 13, 4, 8), (7, 6), None),
        (2, (2, 13, 5, 8), (6, 7), (3, 2)),
        (4, (1, 1001, 4, 2), (251, 250, 250, 250), None),
        (4, (2, 3, 4, 8), (1, 1, 1, 0), None),
        (4, (2, 8, 3, 8), (2, 2, 2, 2), (1, 0, 2, 0)),
        (4, (1, 29, 8, 4), (8, 7, 7, 7), None),
        (2, (1, 5, 4, 4), (0, 5), (4, 0)),
    ],
)
def test_uneven_splits(
    ranks: Ranks,
    direction: Direction,
    world_size: int,
    shape: tuple[int, ...],
    seq_splits: Splits,
    head_splits: Splits,
) -> None:
    pool = ranks(world_size)
    task = (direction, shape, torch.float32, seq_splits, head_splits)
    pool.run(exchange_and_return, *task, timeout_s=20)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.bool,
        torch.complex64,
        torch.int8,
        torch.float64,
        torch.bfloat16,
        torch.int64,
    ],
    ids=str,
)
def test_any_dtype(ranks: Ranks, dtype: torch.dtype) -> None:
    for direction in DIRECTIONS:
        ranks(2).run(exchange_and_return, direction, (2, 4, 4, 3), dtype, timeout_s=20)


# ---- ranges that overlap -------------------------------------------------------------------------


def overlapping(rank: int, world_size: int, direction: Direction) -> None:
    """A head (a row) that two ranks want goes to both, and its gradient is the sum of theirs."""
    whole = torch.randn(2, 7, 5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    weights = whole.flip(0, 1, 2, 3)
    held, held_dim, cut_dim = ((4, 3), 1, 2) if direction == "scatter" else ((2, 3), 2, 1)
    sizes, starts = ((3, 4), (1, 1)) if direction == "scatter" else ((5, 4), (0, 2))
    splits = {"seq_splits": held, "head_splits": sizes, "head_starts": starts}
    if direction == "gather":
        splits = {"seq_splits": sizes, "head_splits": held, "seq_starts": starts}
    exchange = EXCHANGES[direction]
    x = whole.split(list(held), dim=held_dim)[rank].clone().requires_grad_()
    with UlyssesCommunicator(timeout_s=10) as comm:
        y = exchange(x, comm, **splits)
        mine = whole.narrow(cut_dim, starts[rank], sizes[rank])
        assert torch.equal(y, mine)
        (grad,) = torch.autograd.grad(
            (y * weights.narrow(cut_dim, starts[rank], sizes[rank])).sum(), x
        )
    expected = torch.zeros_like(whole)
    for start, size in zip(starts, sizes, strict=True):
        expected.narrow(cut_dim, start, size).add_(weights.narrow(cut_dim, start, size))
    torch.testing.assert_close(grad, expected.split(list(held), dim=held_dim)[rank])
    assert (grad == 0).any()  # of what nobody got


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_ranges_may_overlap(ranks: Ranks, direction: Direction) -> None:
    ranks(2).run(overlapping, direction, timeout_s=20)


# ---- strides -------------------------------------------------------------------------------------


def strided(kind: str, x: Tensor) -> Tensor:
    """The values of ``x`` in memory of another kind."""
    batch, rows, heads, head_dim = x.shape
    if kind == "contiguous":
        return x.contiguous()
    if kind == "fused":  # K of a fused QKV projection
        fused = torch.full((batch, rows, 3, heads, head_dim), torch.nan)
        view = fused[:, :, 1]
    elif kind == "transposed":
        view = torch.full((batch, heads, rows, head_dim), torch.nan).transpose(1, 2)
    elif kind == "sequence first":
        view = torch.full((rows, batch, heads, head_dim), torch.nan).transpose(0, 1)
    elif kind == "offset":
        view = torch.full((x.numel() + 7,), torch.nan)[7:].view(x.shape)
    elif kind == "last stride 2":
        view = torch.full((batch, rows, heads, 2 * head_dim), torch.nan)[..., ::2]
    elif kind == "expanded":
        view = x[:, :1].expand(x.shape)  # stride 0; the rows of x are equal
        assert torch.equal(view, x)
        return view
    else:
        assert kind == "negated"
        return torch.complex(torch.zeros_like(x), -x).conj().imag  # a lazy minus sign
    view.copy_(x)
    return view


def exchange_strided(
    rank: int, world_size: int, direction: Direction, kinds: tuple[str, ...]
) -> None:
    whole = numbered(2, 3 * world_size, 2 * world_size, 4)
    if "expanded" in kinds:
        whole = whole[:, :1].expand(whole.shape).clone()
    layout = layout_of(direction, whole, world_size)
    x = strided(kinds[rank], shard_of(whole, layout, rank))
    assert kinds[rank] == "contiguous" or not x.is_contiguous() or x.storage_offset() or x.is_neg()
    with UlyssesCommunicator(timeout_s=10) as comm:
        y = EXCHANGES[direction](x, comm)
        assert same_bytes(y, window_of(whole, layout, rank))


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    "kind",
    ["fused", "transposed", "sequence first", "offset", "last stride 2", "expanded", "negated"],
)
def test_any_strides_on_all_ranks_or_on_one(ranks: Ranks, direction: Direction, kind: str) -> None:
    for kinds in ((kind, kind), ("contiguous", kind)):
        ranks(2).run(exchange_strided, direction, kinds, timeout_s=20)


# ---- autograd ------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_gradcheck(direction: Direction) -> None:
    exchange = EXCHANGES[direction]
    with UlyssesCommunicator(device="cpu") as comm:
        x = torch.randn(2, 3, 4, 2, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(lambda x: exchange(x * 2, comm), (x,))
        splits: dict[str, Sequence[int]] = {"seq_splits": [3], "head_splits": [4]}
        assert torch.autograd.gradgradcheck(lambda x: exchange(x.sin(), comm, **splits), (x,))


def backward_of_each_is_the_other(
    rank: int, world_size: int, direction: Direction, seq_splits: Splits, head_splits: Splits
) -> None:
    generator = torch.Generator().manual_seed(1)
    shape = (2, sum(seq_splits or (2, 2)), sum(head_splits or (2, 2)), 3)
    whole = torch.randn(shape, dtype=torch.float64, generator=generator)
    weights = torch.randn(shape, dtype=torch.float64, generator=generator)
    layout = layout_of(direction, whole, world_size, seq_splits, head_splits)
    op = getattr(torch.ops.ulysses, direction)
    with UlyssesCommunicator(timeout_s=10) as comm:
        x = shard_of(whole, layout, rank).clone().requires_grad_()
        where = {"world_size": world_size, "group_name": comm.name}
        y = op(x, **where, head_splits=head_splits, seq_splits=seq_splits)
        (grad,) = torch.autograd.grad((y * window_of(weights, layout, rank)).sum(), x)
        # d/dx of the sum over all ranks of <weights, y> is the weight that sits at x's place
        assert torch.equal(grad, shard_of(weights, layout, rank))
        y = op(x, world_size, comm.name, seq_splits, head_splits)
        (grad,) = torch.autograd.grad(y.sum(), x)  # the gradient of y comes expanded, stride 0
        assert torch.equal(grad, torch.ones_like(x))


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    ("seq_splits", "head_splits"), [(None, None), ((4, 3), None), (None, (3, 2)), ((0, 3), (1, 2))]
)
def test_backward_of_each_is_the_other(
    ranks: Ranks, direction: Direction, seq_splits: Splits, head_splits: Splits
) -> None:
    task = (direction, seq_splits, head_splits)
    ranks(2).run(backward_of_each_is_the_other, *task, timeout_s=20)


# ---- one rank alone ------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_one_rank_copies_and_never_maps(direction: Direction) -> None:
    x = numbered(2, 3, 4, 5)
    with (
        mock.patch("ulysses_ops.windows.allocate", side_effect=AssertionError) as allocate,
        UlyssesCommunicator(device="cpu") as comm,
    ):
        y = EXCHANGES[direction](x, comm)
        assert (comm.transport, comm.mapping, comm.world_size) == ("local", None, 1)
    allocate.assert_not_called()
    assert torch.equal(y, x)
    y.zero_()
    assert torch.equal(x, numbered(2, 3, 4, 5))
