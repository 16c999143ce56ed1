"""scatter and gather refused: by all ranks alike, before any of them waits in a collective."""

from __future__ import annotations

import time
from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankPool
from torch import Tensor
from whole_tensors import numbered

from ulysses_ops import (
    AgreementError,
    UlyssesCommunicator,
    UlyssesError,
    collective,
    gather,
    scatter,
)

Ranks = Callable[[int], RankPool]


def refuse_everywhere(rank: int, world_size: int) -> list[str]:
    """Wrong calls, the same on every rank: each raises at once, and a right one works after it."""
    x = numbered(1, 4, 4, 2)
    ops = torch.ops.ulysses
    texts = []
    with UlyssesCommunicator(timeout_s=10) as comm:
        wrong: list[Callable[[], Tensor]] = [
            lambda: scatter(x[0], comm),
            lambda: scatter(x[:, :, :3], comm),
            lambda: gather(x[:, :3], comm),
            lambda: scatter(x, comm, head_splits=[3, 2]),
            lambda: scatter(x, comm, seq_splits=[4, 4, 4]),
            lambda: ops.scatter(x, 3, comm.name),
            lambda: ops.scatter(x, 2, "nobody"),
        ]
        for call in wrong:
            start = time.monotonic()
            with pytest.raises(ValueError, match=r"^(scatter|gather): ") as error:
                call()
            assert time.monotonic() - start < 1
            texts.append(str(error.value))
        assert scatter(x, comm).shape == (1, 8, 2, 2)
    with pytest.raises(UlyssesError, match="is closed; construct a new one"):
        scatter(x, comm)
    return texts


def test_wrong_calls_are_refused_before_any_rank_waits(ranks: Ranks) -> None:
    first, second = ranks(2).run(refuse_everywhere, timeout_s=20)
    assert first == second
    for text, values in zip(
        first,
        ["[4, 4, 2]", "H=3", "S_global=3", "[3, 2]", "[4, 4, 4]", "world_size=3", "'nobody'"],
        strict=True,
    ):
        assert values in text


def differ_on_one(rank: int, world_size: int, what: str) -> str:
    x = numbered(1, 4, 4, 2)
    odd = {"dtype": x.double(), "S_local": x[:, :3], "D": x[..., :1], "call": x}[what]
    with UlyssesCommunicator(timeout_s=10) as comm:
        exchange = gather if what == "call" and rank == 1 else scatter
        with (
            mock.patch.object(collective, "all_to_all") as exchanged,
            pytest.raises(ValueError, match="ranks ask for different exchanges") as error,
        ):
            exchange(odd if rank == 1 else x, comm)
        exchanged.assert_not_called()
        assert scatter(x, comm).shape == (1, 8, 2, 2)
    return str(error.value)


@pytest.mark.parametrize("what", ["dtype", "S_local", "D", "call"])
def test_ranks_that_differ_all_raise_the_same(ranks: Ranks, what: str) -> None:
    first, second = ranks(2).run(differ_on_one, what, timeout_s=20)
    assert first == second
    assert "ranks [0]" in first
    assert "ranks [1]" in first


def wrong_total(rank: int, world_size: int) -> list[str]:
    """Rank 1 holds an unsharded tensor: said by all at the first call, by rank 1 alone later."""
    whole = numbered(1, 7, 4, 2)
    x = whole[:, :4] if rank == 0 else whole
    good = whole.split([4, 3], dim=1)[rank]
    with UlyssesCommunicator(timeout_s=2) as comm:
        with (
            mock.patch.object(collective, "all_to_all") as exchanged,
            pytest.raises(ValueError, match=r"^scatter: rank 1 holds 7 rows, .*say 3") as error,
        ):
            scatter(x, comm, seq_splits=(4, 3))
        exchanged.assert_not_called()
        y = scatter(good, comm, seq_splits=(4, 3))
        assert torch.equal(y, whole.split(2, dim=2)[rank])
        if rank == 1:
            with pytest.raises(ValueError, match=r"^scatter: rank 1 holds 7 rows"):
                scatter(x, comm, seq_splits=(4, 3))
        with pytest.raises(ValueError, match=r"^gather: rank 1 holds 4 heads") as other:
            gather(y if rank == 0 else whole, comm, seq_splits=(4, 3), head_splits=(2, 2))
        back = gather(y, comm, seq_splits=(4, 3), head_splits=(2, 2))
        assert torch.equal(back, good)
    return [str(error.value), str(other.value)]


def test_a_tensor_that_is_not_the_declared_shard_is_refused_by_all(ranks: Ranks) -> None:
    first, second = ranks(2).run(wrong_total, timeout_s=20)
    assert first == second


def refused_alone(rank: int, world_size: int) -> None:
    """The others do not come to say the same: the cause is still what is raised."""
    with UlyssesCommunicator(timeout_s=1) as comm:
        if rank == 1:
            with pytest.raises(ValueError, match=r"^scatter: rank 1 holds 4 rows") as error:
                scatter(numbered(1, 4, 4, 2), comm, seq_splits=(4, 3))
            assert isinstance(error.value.__cause__, AgreementError)


def test_a_refusal_that_nobody_hears_is_raised_in_time(ranks: Ranks) -> None:
    ranks(2).run(refused_alone, timeout_s=20)


def meet_a_new_shape_alone(rank: int, world_size: int) -> None:
    known, new = numbered(1, 4, 4, 2), numbered(1, 6, 4, 2)
    with UlyssesCommunicator(timeout_s=1) as comm:
        scatter(known, comm)
        if rank == 0:
            start = time.monotonic()
            with (
                mock.patch.object(collective, "all_to_all") as exchanged,
                pytest.raises(AgreementError, match=r"rank 0 waited 1 s for ranks \[1\]"),
            ):
                scatter(new, comm)
            assert time.monotonic() - start < 3
            exchanged.assert_not_called()
    seen = [None] * world_size
    dist.all_gather_object(seen, rank)  # the process group was not touched: collectives pair up
    assert seen == list(range(world_size))
    with UlyssesCommunicator(timeout_s=10) as comm:
        assert scatter(new, comm).shape == (1, 12, 2, 2)


def test_one_rank_alone_meets_a_new_shape(ranks: Ranks) -> None:
    ranks(2).run(meet_a_new_shape_alone, timeout_s=20)


def come_late(rank: int, world_size: int) -> None:
    new = numbered(1, 6, 4, 2)
    with UlyssesCommunicator(timeout_s=1) as comm:
        if rank == 0:
            with pytest.raises(AgreementError, match=r"for ranks \[1\]"):
                scatter(new, comm)
        dist.barrier()
        # Rank 0 has given up. Whoever comes now must not go on into a collective alone.
        with pytest.raises(UlyssesError):
            scatter(new, comm)
    dist.barrier()
    with UlyssesCommunicator(timeout_s=10) as comm:
        assert scatter(new, comm).shape == (1, 12, 2, 2)


def test_a_rank_that_comes_after_the_others_gave_up_raises_as_well(ranks: Ranks) -> None:
    ranks(2).run(come_late, timeout_s=15)
