"""Weights sharded by rows: whole when they are used, refused when they are not there."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from rank_pool import RankPool

from ulysses_ops import UlyssesCommunicator, UlyssesError
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
