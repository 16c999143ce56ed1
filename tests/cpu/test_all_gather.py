"""all_gather between gloo ranks: exact, grouped with scatter, differentiable, refused clearly."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from rank_pool import RankError, RankPool
from torch import Tensor
from whole_tensors import layout_of, numbered, same_bytes

from ulysses_ops import Exchange, UlyssesCommunicator, WindowSpec, all_gather, reserve
from ulysses_ops import collective as collective_module
from ulysses_ops.reference import all_gather_reference, shard_of, window_of

Ranks = Callable[[int], RankPool]
Splits = tuple[int, ...] | None


def shards_of(whole: Tensor, splits: tuple[int, ...]) -> list[Tensor]:
    return list(whole.split(list(splits), dim=1))


def gather_and_compare(
    rank: int,
    world_size: int,
    shape: tuple[int, ...],
    seq_splits: Splits = None,
    dtype: torch.dtype = torch.float32,
) -> None:
    whole = numbered(*shape, dtype=dtype)
    splits = seq_splits or (shape[1] // world_size,) * world_size
    shards = shards_of(whole, splits)
    with UlyssesCommunicator(timeout_s=10) as comm:
        for x in (shards[rank], shards[rank].transpose(1, 2).contiguous().transpose(1, 2)):
            y = all_gather(x, comm, seq_splits=seq_splits)
            assert y.is_contiguous()
            assert same_bytes(y, all_gather_reference(shards))
        again = all_gather(shards[rank], comm, seq_splits=seq_splits)
        assert y.numel() == 0 or again.data_ptr() != y.data_ptr()


@pytest.mark.parametrize(
    ("world_size", "shape", "seq_splits"),
    [
        (1, (2, 4, 3, 16), None),
        (2, (2, 4, 1, 576), None),
        (4, (1, 8, 3, 5), None),
        (2, (2, 13, 1, 8), (6, 7)),
        (4, (2, 3, 2, 8), (1, 1, 1, 0)),
        (4, (1, 29, 1, 4), (0, 29, 0, 0)),
        (2, (1, 0, 4, 8), None),
        (2, (2, 4, 0, 8), None),
    ],
)
def test_every_rank_gets_all_rows_and_heads(
    ranks: Ranks, world_size: int, shape: tuple[int, ...], seq_splits: Splits
) -> None:
    ranks(world_size).run(gather_and_compare, shape, seq_splits, timeout_s=20)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int64, torch.bfloat16], ids=str)
def test_any_dtype(ranks: Ranks, dtype: torch.dtype) -> None:
    ranks(2).run(gather_and_compare, (2, 5, 2, 3), (3, 2), dtype, timeout_s=20)


def misplaced(rank: int, world_size: int) -> None:
    """The same with an exchange that mixes up where two senders' parts belong."""
    places = collective_module._places

    def swapped(out: Tensor, layout: object) -> list[Tensor]:
        return places(out, layout)[::-1]  # type: ignore[arg-type]

    with mock.patch.object(collective_module, "_places", swapped):
        gather_and_compare(rank, world_size, (2, 4, 1, 3))


def test_the_comparison_sees_a_misplaced_part(ranks: Ranks) -> None:
    with pytest.raises(RankError, match="AssertionError"):
        ranks(2).run(misplaced, timeout_s=20)


# ---- grouped -------------------------------------------------------------------------------------


def grouped(rank: int, world_size: int) -> None:
    """Q scattered and a latent gathered in one exchange; thrice, with other values each time."""
    splits = (3, 4) if world_size == 2 else (3, 0, 5, 1)
    rows = sum(splits)
    q_spec = WindowSpec("q", "scatter", (2, rows, 4, 6), torch.float32, "mixed", splits)
    latent_spec = WindowSpec.all_gather(
        "latent", (2, rows, 1, 5), torch.bfloat16, world_size, channel="mixed", seq_splits=splits
    )
    with UlyssesCommunicator(timeout_s=10) as comm:
        q_window, latent_window = reserve(comm, [q_spec, latent_spec])
        assert latent_window.layout.is_all_gather
        assert not q_window.layout.is_all_gather
        assert latent_window.own_view.shape == (2, splits[rank], 1, 5)
        for round_number in range(3):
            q = numbered(2, rows, 4, 6) + round_number
            latent = numbered(2, rows, 1, 5, dtype=torch.bfloat16) + round_number
            shard = shards_of(latent, splits)[rank]
            with Exchange(comm) as exchange:
                exchange.send(shard_of(q, q_window.layout, rank), q_window)
                if round_number < 2:
                    exchange.send(shard, latent_window)
                else:  # to each peer by itself, the own rows by their producer
                    latent_window.own_view.copy_(shard)
                    for peer in range(world_size):
                        if peer != rank:
                            exchange.send(shard, latent_window, peer=peer)
            assert same_bytes(q_window.tensor, window_of(q, q_window.layout, rank).contiguous())
            assert same_bytes(latent_window.tensor, latent)


@pytest.mark.parametrize("world_size", [2, 4])
def test_grouped_with_scatter(ranks: Ranks, world_size: int) -> None:
    ranks(world_size).run(grouped, timeout_s=20)


def by_operator(rank: int, world_size: int) -> None:
    whole = numbered(1, 6, 2, 3)
    spec = WindowSpec.all_gather("w", (1, 6, 2, 3), torch.float32, world_size)
    other = WindowSpec("by heads", "scatter", (1, 6, 2, 3), torch.float32)
    back = WindowSpec("back", "gather", (1, 6, 2, 3), torch.float32)
    with UlyssesCommunicator(timeout_s=10) as comm:
        window, by_heads, gathered = reserve(comm, [spec, other, back])
        x = whole.split(3, dim=1)[rank]
        group = (comm.token, world_size, comm.name)
        torch.ops.ulysses.all_gather_into(x, window.tensor, *group)
        torch.ops.ulysses.complete([window.tensor], [x], *group)
        assert torch.equal(window.tensor, whole)
        with pytest.raises(ValueError, match=r"gives ranks heads \[1, 1\] of 2; reserve it by"):
            torch.ops.ulysses.all_gather_into(x, by_heads.tensor, *group)
        with pytest.raises(ValueError, match="window 'back' is for gather"):
            torch.ops.ulysses.all_gather_into(x, gathered.tensor, *group)
        with pytest.raises(ValueError, match="all_gather_into: x is"):
            torch.ops.ulysses.all_gather_into(x[:, :1], window.tensor, *group)


def test_the_deferred_operator(ranks: Ranks) -> None:
    ranks(2).run(by_operator, timeout_s=20)


# ---- gradients and compilation -------------------------------------------------------------------


def gradients(rank: int, world_size: int, splits: tuple[int, ...] | None) -> None:
    """The gradient of a row is the sum of what every rank wants of it."""
    rows = splits or (2,) * world_size
    total = sum(rows)
    weights = [numbered(2, total, 3, 4, dtype=torch.float64) * (peer + 1) for peer in range(9)]
    with UlyssesCommunicator(timeout_s=10) as comm:
        x = numbered(2, rows[rank], 3, 4, dtype=torch.float64).requires_grad_()
        y = all_gather(x, comm, seq_splits=splits)
        (grad,) = torch.autograd.grad((y * weights[rank]).sum(), x)
    wanted = torch.stack(weights[:world_size]).sum(0)
    assert torch.equal(grad, wanted.split(list(rows), dim=1)[rank])
    assert rows[rank] == 0 or not torch.equal(grad, weights[rank].split(list(rows), dim=1)[rank])


@pytest.mark.parametrize(
    ("world_size", "splits"), [(2, None), (2, (3, 0)), (4, None), (4, (1, 0, 3, 2))]
)
def test_gradients_are_summed(ranks: Ranks, world_size: int, splits: Splits) -> None:
    ranks(world_size).run(gradients, splits, timeout_s=20)


def test_gradcheck() -> None:
    with UlyssesCommunicator(device="cpu") as comm:
        x = torch.randn(2, 3, 4, 2, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(lambda x: all_gather(x.sin(), comm), (x,))


def compiled(rank: int, world_size: int) -> None:
    with UlyssesCommunicator(timeout_s=20) as comm:

        def step(x: Tensor, splits: list[int]) -> tuple[Tensor, Tensor]:
            first = all_gather(x, comm, seq_splits=splits)
            return first, all_gather(x + 1, comm, seq_splits=splits).sum()

        fast = torch.compile(step, fullgraph=True, backend="aot_eager")
        for splits in ([3, 2], [4, 1], [2, 5]):
            whole = numbered(1, sum(splits), 2, 3)
            x = whole.split(splits, dim=1)[rank]
            first, total = fast(x, splits)
            assert torch.equal(first, whole)
            assert total == (whole + 1).sum()


def test_compiled_as_one_graph(ranks: Ranks) -> None:
    ranks(2).run(compiled, timeout_s=60)


# ---- refusals ------------------------------------------------------------------------------------


def wrong_rows(rank: int, world_size: int) -> str:
    """One rank holds other rows than declared: all raise the same sentence, and go on."""
    with UlyssesCommunicator(timeout_s=5) as comm:
        with pytest.raises(ValueError, match="all_gather: rank 1 holds 5 rows") as error:
            all_gather(torch.zeros(1, (2, 5)[rank], 1, 4), comm, seq_splits=(2, 3))
        good = all_gather(torch.ones(1, (2, 3)[rank], 1, 4), comm, seq_splits=(2, 3))
        assert good.sum() == 20
    return str(error.value)


def test_rows_that_are_not_as_declared_are_refused_by_all(ranks: Ranks) -> None:
    assert len(set(ranks(2).run(wrong_rows, timeout_s=20))) == 1


def test_a_shape_that_is_none_of_ours_is_refused() -> None:
    with (
        UlyssesCommunicator(device="cpu") as comm,
        pytest.raises(ValueError, match=r"all_gather: x must have shape \(B, S, H, D\)"),
    ):
        all_gather(torch.zeros(3, 4), comm)


def test_a_layout_that_gives_a_rank_some_heads_is_no_all_gather() -> None:
    whole = numbered(1, 4, 4, 2)
    assert not layout_of("scatter", whole, 2).is_all_gather
    assert not layout_of("gather", whole, 2).is_all_gather
    assert WindowSpec.all_gather("w", (1, 4, 4, 2), torch.int8, 2).layout(2).is_all_gather
