"""Ranks that line up for a capture: what differs is heard by all, before it is issued."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from rank_pool import RankPool
from torch import Tensor
from whole_tensors import check_service, numbered

from ulysses_ops import (
    AgreementError,
    Exchange,
    PeerTimeoutError,
    UlyssesCommunicator,
    UlyssesError,
    Window,
    WindowSpec,
    reserve,
    scatter,
)
from ulysses_ops.graphs.line_up import compare_inputs, lined_up
from ulysses_ops.graphs.signature import flatten

Ranks = Callable[[int], RankPool]
CPU = torch.device("cpu")
SHAPE = (1, 8, 4, 2)


def two_windows(comm: UlyssesCommunicator) -> tuple[Window, Window]:
    one, other = reserve(
        comm, [WindowSpec(name, "scatter", SHAPE, torch.float32) for name in ("a", "b")]
    )
    return one, other


def send(comm: UlyssesCommunicator, *windows: Window) -> None:
    for window in windows:
        with Exchange(comm) as exchange:
            exchange.send(torch.ones(window.source_shape), window)


def rounds(rank: int, world_size: int, how: str) -> str:
    """Exchanges that differ between ranks; all raise, and the communicator serves on."""
    with UlyssesCommunicator(timeout_s=10) as comm:
        a, b = two_windows(comm)
        known = [numbered(1, 4, 4, 2), numbered(1, 6, 4, 2)]
        for x in known:
            scatter(x, comm)
        odd = rank == 1

        def step() -> None:
            if how == "other window":
                send(comm, a, *((a, b) if odd else (b, a)))
            elif how == "fewer":
                send(comm, *((a,) if odd else (a, b)))
            elif how == "functional":
                scatter(known[odd], comm)
            elif how == "new shape":
                scatter(numbered(1, 10, 4, 2), comm) if odd else send(comm, a)
            else:
                send(comm, a)
                if odd:
                    raise KeyError(how)
                send(comm, b)

        texts = []
        for _ in range(2):
            with pytest.raises((UlyssesError, KeyError)) as refused, lined_up(comm):
                step()
            texts.append(f"{type(refused.value).__name__}: {refused.value}")
        with lined_up(comm):
            send(comm, a, b)
        assert comm.announce is None
        check_service(comm)
    assert texts[0] == texts[1]
    return texts[0]


@pytest.mark.parametrize(
    ("how", "parts"),
    [
        ("other window", ("ranks [0]: scatter window 'b'", "ranks [1]: scatter window 'a'")),
        ("fewer", ("ranks [0]: scatter window 'b'", "ranks [1]: none, its step is over")),
        ("functional", ("ranks [0]: scatter window 'ulysses::scatter' [1, 8, 4, 2]", "ranks [1]")),
    ],
)
def test_exchanges_that_differ_are_refused_by_all(
    ranks: Ranks, how: str, parts: tuple[str, str]
) -> None:
    first, second = ranks(2).run(rounds, how, timeout_s=30)
    assert first == second
    for part in (*parts, "capture_step: the ranks are about to use different exchanges"):
        assert part in first


def test_a_rank_that_fails_is_heard_of(ranks: Ranks) -> None:
    first, second = ranks(2).run(rounds, "failure", timeout_s=30)
    assert "ranks [1]: none, its step failed (KeyError: 'failure')" in first
    assert second == "KeyError: 'failure'"


def test_a_rank_that_meets_a_new_shape_is_heard_of(ranks: Ranks) -> None:
    first, second = ranks(2).run(rounds, "new shape", timeout_s=30)
    assert first == second
    assert "by rank ['capture_step', 'reserve']" in first


def not_lined_up(rank: int, world_size: int) -> str:
    """Control: the rank that ends early is waited for, and the communicator is of no use then."""
    with UlyssesCommunicator(timeout_s=1) as comm:
        a, b = two_windows(comm)
        send(comm, *((a,) if rank == 1 else (a, b)))
        return comm.name


def test_control_without_it_a_rank_waits() -> None:
    with (
        RankPool(2, env={"CUDA_VISIBLE_DEVICES": ""}) as pool,
        pytest.raises(AssertionError, match=PeerTimeoutError.__name__),
    ):
        pool.run(not_lined_up, timeout_s=30)


def kinds(rank: int, world_size: int, how: str) -> str:
    x: Tensor = torch.zeros(2 + rank, 4)  # shards may differ in size
    good = flatten("test", (x, {"t": rank + 0.5}), CPU).signature
    bad = {
        "dtype": (x.double() if rank else x, {"t": 0.5}),
        "nesting": ((x, 0.5) if rank else (x, {"t": 0.5})),
        "dimensions": (x[0] if rank else x, {"t": 0.5}),
        "constant": (x, {"t": None if rank else 0.5}),
    }[how]
    with UlyssesCommunicator(timeout_s=10) as comm:
        compare_inputs(comm, good, 3)
        with pytest.raises(UlyssesError) as refused:
            compare_inputs(comm, flatten("test", bad, CPU).signature, 3)
        with pytest.raises(UlyssesError, match=r"warmup=1.*warmup=2"):
            compare_inputs(comm, good, 1 + rank)
        compare_inputs(comm, good, 3)
        check_service(comm)
    assert not isinstance(refused.value, AgreementError)
    return str(refused.value)


@pytest.mark.parametrize("how", ["dtype", "nesting", "dimensions", "constant"])
def test_inputs_of_different_kinds_are_refused_by_all(ranks: Ranks, how: str) -> None:
    first, second = ranks(2).run(kinds, how, timeout_s=20)
    assert first == second
    assert "different inputs" in first
    assert "ranks [0]: (" in first and "ranks [1]: (" in first
