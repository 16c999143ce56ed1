"""The first stage in fewer GEMMs and on two streams, over the copy engines."""

from __future__ import annotations

from itertools import count

import pytest
import torch
from fused_layer import GROUPED, KINDS, compare_all, fused_and_plain, inputs, spoil
from on_gpu import NO_OPEN, communicator, delay, fault, settle
from rank_pool import RankPool
from torch import Tensor

from ulysses_ops import Products, Schedule
from ulysses_ops.graphs import capture_step
from ulysses_ops.side_stream import SideStream

ACROSS = KINDS[1]


def schedule_of(products: Products) -> Schedule:
    return Schedule("peers", "whole", "whole", products=products)


def every_form(rank: int, world_size: int) -> None:
    with communicator() as comm:
        compare_all(comm, KINDS, 1, GROUPED)
        compare_all(comm, KINDS[:2], 2, GROUPED)
        settle()


def test_every_form_equals_the_plain_stage(pair: RankPool) -> None:
    pair.run(every_form, timeout_s=120)


def replays(rank: int, world_size: int, products: Products) -> int:
    """Replays with changing rows against eager calls, ranks skewed; also across heads."""
    wrong = 0
    with communicator() as comm:
        for kind in (KINDS[0], ACROSS):
            layer, _ = fused_and_plain(comm, kind, schedule_of(products))
            x, cos, sin = inputs(comm, kind, 1, 0)
            step = capture_step(comm, lambda x: layer.project(x, cos, sin), [x])  # noqa: B023
            for seed in range(20):
                x = inputs(comm, kind, 1, seed)[0]
                expected = [part.clone() for part in layer.project(x, cos, sin)]
                spoil(layer, x)
                if seed % 2 != rank:
                    delay(2)
                got = step.replay(x)
                wrong += sum(not torch.equal(a, b) for a, b in zip(got, expected, strict=True))
            settle()
            step.close()
    return wrong


@pytest.mark.parametrize("products", GROUPED, ids=str)
def test_replays(pair: RankPool, products: Products) -> None:
    assert pair.run(replays, products, timeout_s=60) == [0, 0]


def late_readers(rank: int, world_size: int, products: Products, broken: str) -> int:
    """Rounds from two streams in turn; a rank reads the windows late, while the next is issued.

    With ``broken="follow"`` the side stream follows the caller at the start of a round alone, and
    not behind the first send, which waits for the reader. With ``"open"`` nobody opens.
    """
    right, calls = SideStream.follow, count()

    def at_the_start(side: SideStream) -> None:
        if next(calls) % 2 == 0:
            right(side)

    with communicator() as comm, pytest.MonkeyPatch.context() as patch:
        kind = KINDS[0]
        layer, _ = fused_and_plain(comm, kind, schedule_of(products))
        given = [inputs(comm, kind, 1, seed) for seed in range(20)]
        expected = [[part.clone() for part in layer.project(*one)] for one in given]
        settle()
        if broken == "follow":
            patch.setattr(SideStream, "follow", at_the_start)
        streams = [torch.cuda.Stream(), torch.cuda.Stream()]
        found: list[list[Tensor]] = []
        with fault(comm, NO_OPEN if broken == "open" else 0):
            for number, one in enumerate(given):
                with torch.cuda.stream(streams[number % 2]):
                    windows = layer.project(*one)
                    if number % 2 == rank:
                        delay(10)
                    found.append([part.clone() for part in windows])
            settle()
        wrong = 0
        for got, wanted in zip(found, expected, strict=True):
            wrong += sum(not torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
        return wrong


@pytest.mark.parametrize(
    "products",
    [
        Products(lanes=2),
        Products("paired", lanes=2),
        Products(opens_early=True),
        Products(lanes=2, opens_early=True),
    ],
    ids=str,
)
def test_windows_are_written_behind_readers_of_another_stream(
    pair: RankPool, products: Products
) -> None:
    assert pair.run(late_readers, products, "", timeout_s=60) == [0, 0]


def test_control_own_parts_that_are_written_at_once_are_seen(pair: RankPool) -> None:
    assert max(pair.run(late_readers, Products(lanes=2), "follow", timeout_s=60)) > 0


def test_control_a_round_that_is_not_opened_is_seen(pair: RankPool) -> None:
    assert max(pair.run(late_readers, Products(opens_early=True), "open", timeout_s=60)) > 0
