"""Blocks of an exchange: whose they are, and what is left when one goes wrong. On gloo ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from rank_pool import RankPool
from torch import Tensor

from ulysses_ops import Exchange, UlyssesCommunicator, UlyssesError, WindowSpec, reserve
from ulysses_ops.exchange import pending_channels
from ulysses_ops.windows import Window

Ranks = Callable[[int], RankPool]


def two_windows(comm: UlyssesCommunicator) -> tuple[Tensor, list[Window]]:
    """A source, and two windows of one channel that take it."""
    dims = (1, 2 * comm.world_size, comm.world_size, 4)
    specs = [WindowSpec(name, "scatter", dims, torch.float32, channel="both") for name in "ab"]
    windows = reserve(comm, specs)
    return torch.full(windows[0].source_shape, 1.0 + comm.rank), windows


def arrived(comm: UlyssesCommunicator, window: Window) -> bool:
    parts = window.tensor.chunk(comm.world_size, dim=1)
    return all(bool((part == 1.0 + sender).all()) for sender, part in enumerate(parts))


def by_another_thread(call: Callable[[], object]) -> str:
    """What a call raises in a thread of its own."""
    said: list[str] = []

    def run() -> None:
        try:
            call()
        except UlyssesError as error:
            said.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
    return said[0] if said else ""


def take_and_give(comm: UlyssesCommunicator) -> None:
    with comm.turn.of("another"):
        pass


def refused_to_others(rank: int, world_size: int) -> list[str]:
    with UlyssesCommunicator(timeout_s=10) as comm:
        x, (a, b) = two_windows(comm)
        said = []
        with Exchange(comm) as exchange:
            exchange.send(x, a)
            said.append(by_another_thread(lambda: exchange.send(x, b)))
            said.append(by_another_thread(lambda: Exchange(comm).open(b)))
            said.append(by_another_thread(exchange.complete))
            said.append(by_another_thread(lambda: exchange.__exit__(None, None, None)))
            exchange.send(x, b)
        assert arrived(comm, a)
        assert arrived(comm, b)
        assert by_another_thread(lambda: take_and_give(comm)) == ""  # nobody has the turn
        return said


def test_a_block_belongs_to_its_thread(ranks: Ranks) -> None:
    for said in ranks(2).run(refused_to_others, timeout_s=30):
        assert all("in use by thread" in text for text in said[:3])
        assert "another thread entered this block" in said[3]


def refused_and_repeated(rank: int, world_size: int) -> str:
    """A completion that is refused while another thread has the turn has lost nothing."""
    with UlyssesCommunicator(timeout_s=10) as comm:
        x, (a, _) = two_windows(comm)
        exchange = Exchange(comm)
        exchange.send(x, a)
        with comm.turn.of("the main thread"):
            refused = by_another_thread(exchange.complete)
            raw = by_another_thread(
                lambda: torch.ops.ulysses.complete([a.tensor], [x], comm.token, 2, comm.name)
            )
        exchange.complete()
        assert arrived(comm, a)
        assert "in use by thread" in raw
        return refused


def test_a_completion_that_was_refused_can_be_repeated(ranks: Ranks) -> None:
    for refused in ranks(2).run(refused_and_repeated, timeout_s=30):
        assert "in use by thread" in refused


def entered_twice(rank: int, world_size: int) -> str:
    with UlyssesCommunicator(timeout_s=10) as comm:
        x, (a, _) = two_windows(comm)
        exchange = Exchange(comm)
        with exchange:
            with pytest.raises(UlyssesError) as twice, exchange:
                pass
            exchange.send(x, a)
        assert arrived(comm, a)
        assert by_another_thread(lambda: take_and_give(comm)) == ""
        return str(twice.value)


def test_a_block_is_entered_once_at_a_time(ranks: Ranks) -> None:
    for twice in ranks(2).run(entered_twice, timeout_s=30):
        assert "this block is entered already; make an Exchange for each block" in twice


def used_again(rank: int, world_size: int) -> None:
    with UlyssesCommunicator(timeout_s=10) as comm:
        x, (a, b) = two_windows(comm)
        exchange = Exchange(comm)

        def send_and_fail() -> None:
            exchange.send(x, a)
            raise KeyError

        def open_and_fail() -> None:
            exchange.open(a)
            raise KeyError

        for fail in (send_and_fail, open_and_fail):
            with pytest.raises(KeyError), exchange:
                fail()
            assert pending_channels(comm) == ""
        with exchange:
            exchange.open(a)
            exchange.send(x, a)
            exchange.send(x, b)
        assert arrived(comm, a)
        assert arrived(comm, b)


def test_an_exchange_can_be_used_again_after_an_exception_in_its_block(ranks: Ranks) -> None:
    ranks(2).run(used_again, timeout_s=30)


def opened_by_two(rank: int, world_size: int) -> list[str]:
    with UlyssesCommunicator(timeout_s=10) as comm:
        x, (a, b) = two_windows(comm)
        said = []
        with Exchange(comm) as first:
            first.open(a)
            for begun in (Exchange(comm), first):
                with pytest.raises(UlyssesError) as refused:
                    begun.open(b)
                said.append(str(refused.value))
            first.send(x, a)
        with Exchange(comm) as second:  # its round is over
            second.open(b)
            second.send(x, b)
        assert arrived(comm, b)
    with pytest.raises(UlyssesError) as closed:
        Exchange(comm).open(a)
    return [*said, str(closed.value)]


def test_a_channel_has_one_round_whoever_opened_it(ranks: Ranks) -> None:
    for *said, closed in ranks(2).run(opened_by_two, timeout_s=30):
        assert all("'both' has an exchange in flight" in text for text in said)
        assert "is closed" in closed


def not_dense(rank: int, world_size: int) -> list[str]:
    with UlyssesCommunicator(timeout_s=10) as comm:
        x, (a, _) = two_windows(comm)
        said = []
        for bad in (x.to_sparse(), torch.nested.nested_tensor([x[0]])):
            with pytest.raises(ValueError, match="must be a dense tensor") as refused:
                Exchange(comm).send(bad, a)
            said.append(str(refused.value))
        return said


def test_what_has_no_strides_is_refused_in_a_sentence(ranks: Ranks) -> None:
    for said in ranks(2).run(not_dense, timeout_s=30):
        assert said == [
            "Exchange.send: x is torch.sparse_coo, and must be a dense tensor; convert it",
            "Exchange.send: x is nested, and must be a dense tensor; convert it",
        ]
