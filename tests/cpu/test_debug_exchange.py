"""debug_exchange: right exchanges are found right, and a broken one is found, named by element."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from rank_pool import RankPool
from torch import Tensor

from ulysses_ops import UlyssesCommunicator, UlyssesError
from ulysses_ops import collective as collective_module
from ulysses_ops.debug_exchange import debug_exchange

Ranks = Callable[[int], RankPool]


def all_are_right(rank: int, world_size: int) -> None:
    rows = {2: (3, 4), 4: (2, 0, 3, 1)}[world_size]
    heads = {2: (1, 3), 4: (1, 2, 0, 3)}[world_size]
    dtypes = [torch.bool, torch.bfloat16, torch.float32, torch.int64, torch.complex128]
    with UlyssesCommunicator(timeout_s=10, max_windows=40) as comm:
        for dtype in dtypes:
            x = torch.zeros(2, rows[rank], sum(heads), 3, dtype=dtype)
            fused = torch.zeros(2, rows[rank], 2 * sum(heads), 3, dtype=dtype)[:, :, : sum(heads)]
            turned = x.transpose(1, 2).contiguous().transpose(1, 2)
            expanded = x[:, :, :1].expand(x.shape)
            splits: Any = {"seq_splits": rows, "head_splits": heads}
            for source in (x, fused, turned, expanded):
                assert debug_exchange(comm, source, **splits).is_right
            assert debug_exchange(comm, x, op="all_gather", seq_splits=rows).is_right
            y = torch.zeros(2, sum(rows), heads[rank], 3, dtype=dtype)
            report = debug_exchange(comm, y, op="gather", **splits)
            report.raise_if_wrong()
            assert report.misplaced == (None,) * world_size


@pytest.mark.parametrize("world_size", [2, 4])
def test_right_exchanges_are_found_right(ranks: Ranks, world_size: int) -> None:
    ranks(world_size).run(all_are_right, timeout_s=60)


def swapped(original: Callable[..., list[Tensor]]) -> Callable[..., list[Tensor]]:
    """Two senders' parts change places."""
    return lambda out, layout: original(out, layout)[::-1]


def lost(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Nothing arrives on rank 1: what an earlier exchange left is there still."""
    stale: dict[Any, Tensor] = {}

    def exchange(comm: Any, layout: Any, prepare: Any, name: str) -> Tensor:
        out = original(comm, layout, prepare, name)
        if comm.rank == 1:
            out.copy_(stale.setdefault(name, out.clone()))
        return out

    return exchange


def broken(rank: int, world_size: int) -> tuple[str, str]:
    x = torch.zeros(1, 2, 4, 3, dtype=torch.bfloat16)
    with UlyssesCommunicator(timeout_s=10) as comm:
        with mock.patch.object(collective_module, "_places", swapped(collective_module._places)):
            turned_round = debug_exchange(comm, x)
        exchange = lost(collective_module._exchange)
        with mock.patch.object(collective_module, "_exchange", exchange):
            first = debug_exchange(comm, x)  # its last piece is what is stale from then on
            second = debug_exchange(comm, x)
        assert first.misplaced[0] is None
        assert second.misplaced[0] is None
        assert second.misplaced[1] is not None
        with pytest.raises(UlyssesError, match="rank 0: 24 wrong"):
            turned_round.raise_if_wrong()
        assert debug_exchange(comm, x).is_right
    return turned_round.describe(), second.describe()


def test_a_broken_exchange_is_found_and_named_by_element(ranks: Ranks) -> None:
    reports = ranks(2).run(broken, timeout_s=30)
    assert reports[0] == reports[1]
    misplaced, stale = reports[0]
    assert misplaced.splitlines()[0] == "scatter of [1, 4, 4, 3], torch.bfloat16, on 'gloo'"
    # y_0[0, 0, 0, 0] is x_0[0, 0, 0, 0], and x_1's is there
    assert (
        "rank 0: 24 wrong, first at [0, 0, 0, 0]: element 0 of rank 1 instead of element 0 of "
        "rank 0" in misplaced
    )
    assert (
        "rank 1: 24 wrong, first at [0, 0, 0, 0]: element 6 of rank 1 instead of element 6 of "
        "rank 0" in misplaced
    )
    assert "rank 0: right" in stale
    assert "bytes that no rank sent instead of" in stale


def test_head_splits_mean_nothing_to_all_gather() -> None:
    with (
        UlyssesCommunicator(device="cpu") as comm,
        pytest.raises(ValueError, match="leave head_splits out"),
    ):
        debug_exchange(comm, torch.zeros(1, 2, 4, 3), op="all_gather", head_splits=[4])
