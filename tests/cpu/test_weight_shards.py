"""Weights sharded by rows: whole when they are used, refused when they are not there."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from rank_pool import RankPool

from ulysses_ops import UlyssesCommunicator, UlyssesError, WindowSpec, reserve
from ulysses_ops.weight_shards import WeightShards

Ranks = Callable[[int], RankPool]


def layers(rank: int, world_size: int) -> None:
    generator = torch.Generator().manual_seed(1)
    wholes = [torch.randn(7, 5, generator=generator) for _ in range(5)]
    with UlyssesCommunicator(timeout_s=10) as comm:
        shards = [WeightShards.cut(w, comm) for w in wholes]
        weights = WeightShards(comm, shards)
        held = sum(shard.nbytes for shard in shards)
        assert weights.saved_bytes == 3 * wholes[0].nbytes - held
        for _ in range(2):  # steps
            weights.prefetch(0)
            for number, whole in enumerate(wholes):
                if number + 1 < len(wholes):
                    weights.prefetch(number + 1)
                assert torch.equal(weights.whole(number), whole)
                assert torch.equal(weights.whole(number), whole)  # and again
        with pytest.raises(UlyssesError, match=r"layer 1 is not there; call prefetch\(1\)"):
            weights.whole(1)
        weights.prefetch(1)
        with pytest.raises(UlyssesError, match="needs the window of layer 1"):
            weights.prefetch(3)
        assert torch.equal(weights.whole(1), wholes[1])
        assert not torch.equal(weights.whole(1), wholes[3])
        with pytest.raises(ValueError, match="layer=5 must be from 0 to 4"):
            weights.prefetch(5)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_weights_are_whole_when_they_are_used(ranks: Ranks, world_size: int) -> None:
    ranks(world_size).run(layers, timeout_s=20)


@pytest.mark.parametrize(
    "shapes", [[], [(2, 3), (2, 4)], [(2, 3, 1)]], ids=["none", "differing", "three dimensions"]
)
def test_shards_that_are_not_alike_are_refused(shapes: list[tuple[int, ...]]) -> None:
    with (
        UlyssesCommunicator(device="cpu") as comm,
        pytest.raises(ValueError, match=r"must be \(rows, in\) and all alike"),
    ):
        WeightShards(comm, [torch.zeros(shape) for shape in shapes])


def evicted(rank: int, world_size: int) -> None:
    generator = torch.Generator().manual_seed(1)
    wholes = [torch.randn(7, 5, generator=generator) for _ in range(4)]
    with UlyssesCommunicator(timeout_s=10, max_windows=3) as comm:
        weights = WeightShards(comm, [WeightShards.cut(w, comm) for w in wholes])
        for step in range(2):
            weights.prefetch(0)
            for number, whole in enumerate(wholes):
                if number + 1 < len(wholes):
                    weights.prefetch(number + 1)
                assert torch.equal(weights.whole(number), whole)
                if number == 2:  # layer 3 is on its way, and stays
                    reserve(comm, [others(step, 0), others(step, 1)])
                    with pytest.raises(UlyssesError, match="layer 2 is not there"):
                        weights.whole(2)
        reserve(comm, [others(2, number) for number in range(3)])  # and now both are gone
        with pytest.raises(UlyssesError, match="layer 3 is not there"):
            weights.whole(3)
        weights.prefetch(3)
        assert torch.equal(weights.whole(3), wholes[3])
        with pytest.raises(UlyssesError, match="layer 2 is not there"):
            weights.whole(2)


def others(step: int, number: int) -> WindowSpec:
    return WindowSpec(f"{step}.{number}", "scatter", (1, 4, 4, 2), torch.float32)


def test_weights_go_on_after_their_windows_were_evicted(ranks: Ranks) -> None:
    ranks(2).run(evicted, timeout_s=20)


def different_ranks(rank: int, world_size: int) -> list[str]:
    texts = []
    with UlyssesCommunicator(timeout_s=10) as comm:
        good = torch.ones(2, 3)
        given: list[tuple[Any, Any]] = [
            ([good] * (3 + rank), "w"),
            ([good] if rank else [1, 2], "w"),
            ([good.double() if rank else good], "w"),
            ([torch.ones(2, 3 + rank)], "w"),
            ([good], f"w{rank}"),
            ([good], "w" if rank else 3),
            ([good.to_sparse() if rank else good], "w"),
            ([good.to("meta") if rank else good], "w"),
        ]
        for own, name in given:
            with pytest.raises(ValueError, match="WeightShards: ") as refused:
                WeightShards(comm, own, name=name)
            texts.append(str(refused.value))
        uneven = WeightShards(comm, [torch.full((1 + rank, 3), float(rank))])  # rows may differ
        uneven.prefetch(0)
        assert uneven.whole(0)[:, 0].tolist() == [0.0, 1.0, 1.0]
    return texts


def test_what_ranks_do_not_have_alike_is_refused_by_all(ranks: Ranks) -> None:
    one, other = ranks(2).run(different_ranks, timeout_s=20)
    assert one == other
    said = ["3 layers (rows, 3)", "4 layers", "each a tensor; got 1", "torch.float64", "(rows, 4)"]
    said += ["name='w1'", "name=3 must be text", "x is torch.sparse_coo", "x is a meta tensor"]
    assert len(one) == 8
    for text in said:
        assert any(text in sentence for sentence in one), text


def asked_again(rank: int, world_size: int) -> None:
    """Another thread is in a call while a layer is asked for; then it is asked for again."""
    whole = torch.arange(1.0, 21.0).view(4, 5)
    with UlyssesCommunicator(timeout_s=10) as comm:
        weights = WeightShards(comm, [WeightShards.cut(whole, comm)])
        weights._windows[0].tensor.fill_(-1.0)
        weights.prefetch(0)
        is_taken, may_end = threading.Event(), threading.Event()

        def hold() -> None:
            with comm.turn.of("other"):
                is_taken.set()
                may_end.wait(10)

        thread = threading.Thread(target=hold)
        thread.start()
        assert is_taken.wait(10)
        try:
            for _ in range(2):
                with pytest.raises(UlyssesError, match=r"whole: .* is in use by thread"):
                    weights.whole(0)
        finally:
            may_end.set()
            thread.join(10)
        assert torch.equal(weights.whole(0), whole)


def test_a_layer_that_was_refused_may_be_asked_for_again(ranks: Ranks) -> None:
    ranks(2).run(asked_again, timeout_s=20)


def failed(rank: int, world_size: int) -> None:
    """An exchange that fails on every rank leaves nothing that passes for a weight."""
    whole = torch.arange(1.0, 21.0).view(4, 5)
    with UlyssesCommunicator(timeout_s=10) as comm:
        weights = WeightShards(comm, [WeightShards.cut(whole, comm)])
        weights.prefetch(0)
        broken = mock.patch("ulysses_ops.collective._pack", side_effect=RuntimeError("no memory"))
        with broken, pytest.raises(UlyssesError, match="nothing was exchanged"):
            weights.whole(0)
        for _ in range(2):
            with pytest.raises(UlyssesError, match=r"is not there; call prefetch\(0\) first"):
                weights.whole(0)
        weights.prefetch(0)
        assert torch.equal(weights.whole(0), whole)


def test_a_layer_whose_exchange_failed_is_not_there(ranks: Ranks) -> None:
    ranks(2).run(failed, timeout_s=20)


def test_wrong_kinds_are_refused_in_a_sentence() -> None:
    wrong: Any
    with UlyssesCommunicator(device="cpu") as comm:
        mixed = [torch.ones(2), torch.ones(2, 3), torch.ones(2, 3, dtype=torch.int32)]
        for wrong in ([1, 2], None, torch.ones(2, 3), mixed):
            with pytest.raises(ValueError, match=r"must be \(rows, in\) and all alike"):
                WeightShards(comm, wrong)
        with pytest.raises(ValueError, match=r"cut: weight must be \(out, in\)"):
            WeightShards.cut(torch.ones(3), comm)
        with pytest.raises(ValueError, match=r"cut: x is torch\.sparse_coo"):
            WeightShards.cut(torch.ones(3, 2).to_sparse(), comm)
        nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)])
        for wrong, what in ((nested, "nested"), (torch.ones(2, 3).to_sparse(), "torch.sparse_coo")):
            with pytest.raises(ValueError, match=f"WeightShards: x is {what}, and must be a dense"):
                WeightShards(comm, [wrong])
        weights = WeightShards(comm, [torch.ones(2, 3)])
        for wrong in (1.0, 0.0, None, "a", True, -1, 1):
            with pytest.raises(ValueError, match="must be from 0 to 0"):
                weights.prefetch(wrong)
            with pytest.raises(ValueError, match="must be from 0 to 0"):
                weights.whole(wrong)
