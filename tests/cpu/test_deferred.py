"""scatter_into, gather_into and complete between gloo ranks: groups, parts, channels, refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from rank_pool import RankPool
from torch import Tensor
from whole_tensors import layout_of, numbered, same_bytes

from ulysses_ops import Exchange, UlyssesCommunicator, UlyssesError, Window, WindowSpec, reserve
from ulysses_ops.exchange import pending_channels
from ulysses_ops.plan import Direction
from ulysses_ops.reference import shard_of, window_of

Ranks = Callable[[int], RankPool]
Splits = tuple[int, ...] | None
OPS = torch.ops.ulysses


def spec_of(
    name: str,
    direction: Direction,
    whole: Tensor,
    channel: str | None = None,
    seq_splits: Splits = None,
    head_splits: Splits = None,
) -> WindowSpec:
    batch, rows, heads, head_dim = whole.shape
    shape = (batch, rows, heads, head_dim)
    return WindowSpec(name, direction, shape, whole.dtype, channel, seq_splits, head_splits)


def open_windows(
    comm: UlyssesCommunicator, *names: str, channel: str | None = None
) -> tuple[Tensor, Tensor, list[Window]]:
    """A source, what arrives of it, and a scatter window for each name."""
    whole = numbered(2, 3 * comm.world_size, 2 * comm.world_size, 4)
    layout = layout_of("scatter", whole, comm.world_size)
    specs = [spec_of(name, "scatter", whole, channel) for name in names]
    return (
        shard_of(whole, layout, comm.rank),
        window_of(whole, layout, comm.rank),
        reserve(comm, specs),
    )


# ---- values --------------------------------------------------------------------------------------


def group_of_three(rank: int, world_size: int, seq_splits: Splits, head_splits: Splits) -> None:
    """V, K and Q of different dtypes in one channel, then the way back; twice over."""
    shape = (2, sum(seq_splits or (3,) * world_size), sum(head_splits or (2,) * world_size), 4)
    dtypes = {"v": torch.bfloat16, "k": torch.float32, "q": torch.int64}
    wholes = {name: numbered(*shape, dtype=dtype) for name, dtype in dtypes.items()}
    splits = (seq_splits, head_splits)
    there = layout_of("scatter", wholes["q"], world_size, *splits)
    back = layout_of("gather", wholes["q"], world_size, *splits)
    with UlyssesCommunicator(timeout_s=10) as comm:
        windows = reserve(
            comm,
            [spec_of(name, "scatter", whole, "vkq", *splits) for name, whole in wholes.items()],
        )
        outs = reserve(
            comm, [spec_of(name, "gather", whole, None, *splits) for name, whole in wholes.items()]
        )
        for addend in (0, 1):
            with Exchange(comm) as exchange:
                for whole, window in zip(wholes.values(), windows, strict=True):
                    exchange.send(shard_of(whole + addend, there, rank), window)
                assert bool(pending_channels(comm))
            assert pending_channels(comm) == ""
            for whole, window in zip(wholes.values(), windows, strict=True):
                assert same_bytes(window.tensor, window_of(whole + addend, there, rank))
            with Exchange(comm) as exchange:
                for window, out in zip(windows, outs, strict=True):
                    exchange.send(window.tensor, out)
            for whole, out in zip(wholes.values(), outs, strict=True):
                assert same_bytes(out.tensor, window_of(whole + addend, back, rank))


@pytest.mark.parametrize(
    ("world_size", "seq_splits", "head_splits"),
    [
        (1, None, None),
        (2, None, None),
        (4, None, None),
        (2, (7, 6), (3, 2)),
        (4, (8, 7, 7, 7), None),
    ],
)
def test_a_group_is_completed_at_once(
    ranks: Ranks, world_size: int, seq_splits: Splits, head_splits: Splits
) -> None:
    ranks(world_size).run(group_of_three, seq_splits, head_splits, timeout_s=20)


def parts(rank: int, world_size: int, direction: Direction, own_by_producer: bool) -> None:
    """Parts cut for one rank each, in any order; the own part sent, or written by its producer."""
    whole = numbered(2, 7, 5, 3)
    layout = layout_of(direction, whole, world_size, (4, 3), (2, 3))
    spec = spec_of("w", direction, whole, None, layout.seq_splits, layout.head_splits)
    dim, sizes = (2, layout.head_splits) if direction == "scatter" else (1, layout.seq_splits)
    x = shard_of(whole, layout, rank)
    with UlyssesCommunicator(timeout_s=10) as comm:
        (window,) = reserve(comm, [spec])
        window.tensor.fill_(-1)
        cut = [part.contiguous() for part in x.split(list(sizes), dim=dim)]
        assert window.own_view.shape == cut[rank].shape
        with Exchange(comm) as exchange:
            for peer in (rank, 1 - rank):
                if peer == rank and own_by_producer:
                    window.own_view.copy_(cut[rank])
                else:
                    exchange.send(cut[peer], window, peer=peer)
        assert same_bytes(window.tensor, window_of(whole, layout, rank))


@pytest.mark.parametrize("direction", ["scatter", "gather"])
@pytest.mark.parametrize("own_by_producer", [True, False])
def test_parts_cut_for_one_rank(ranks: Ranks, direction: Direction, own_by_producer: bool) -> None:
    ranks(2).run(parts, direction, own_by_producer, timeout_s=20)


def one_source_twice(rank: int, world_size: int) -> None:
    with UlyssesCommunicator(timeout_s=10) as comm:
        x, received, (k, v) = open_windows(comm, "k", "v", channel="kv")
        with Exchange(comm) as exchange:
            exchange.send(x, k)
            exchange.send(x, v)
        assert torch.equal(k.tensor, received)
        assert torch.equal(v.tensor, received)


def test_one_source_may_go_into_two_windows(ranks: Ranks) -> None:
    ranks(2).run(one_source_twice, timeout_s=20)


def lazy_minus_sign(rank: int, world_size: int) -> None:
    """The sign of such a view is not in memory: what is sent is a copy that has it."""
    with UlyssesCommunicator(timeout_s=10) as comm:
        x, received, (window,) = open_windows(comm, "a")
        source = torch.complex(torch.zeros_like(x), -x).conj().imag
        assert source.is_neg()
        with Exchange(comm) as exchange:
            exchange.send(source, window)
        assert torch.equal(window.tensor, received)


def test_a_source_with_a_lazy_minus_sign(ranks: Ranks) -> None:
    ranks(2).run(lazy_minus_sign, timeout_s=20)


def no_gradient(rank: int, world_size: int) -> None:
    with UlyssesCommunicator(timeout_s=10) as comm:
        x, received, (window,) = open_windows(comm, "a")
        leaf = x.clone().requires_grad_()
        with Exchange(comm) as exchange:
            for source in (leaf, leaf * 1):
                with pytest.raises(ValueError, match=r"requires grad.*no_grad.*or use scatter"):
                    exchange.send(source, window)
            with torch.no_grad():
                exchange.send(leaf, window)
        assert torch.equal(window.tensor, received)
        assert not window.tensor.requires_grad


def test_a_source_that_needs_a_gradient_is_refused(ranks: Ranks) -> None:
    ranks(2).run(no_gradient, timeout_s=20)


def channels_in_any_order(rank: int, world_size: int) -> None:
    with UlyssesCommunicator(timeout_s=10) as comm:
        x, received, (a, b) = open_windows(comm, "a", "b")
        first, second = Exchange(comm), Exchange(comm)
        first.send(x, a)
        second.send(x + 1, b)
        assert pending_channels(comm) == "a, b"
        second.complete()
        assert pending_channels(comm) == "a"
        first.complete()
        first.complete()  # nothing is left to complete
        assert torch.equal(a.tensor, received)
        assert torch.equal(b.tensor, received + 1)


def test_channels_are_completed_in_any_order(ranks: Ranks) -> None:
    ranks(2).run(channels_in_any_order, timeout_s=20)


# ---- refusals: each names the window, and a right call works after it ----------------------------


def send(comm: UlyssesCommunicator, x: Tensor, window: Tensor, *peer: int) -> None:
    OPS.scatter_into(x, window, comm.token, comm.world_size, comm.name, *peer)


def complete(comm: UlyssesCommunicator, windows: list[Tensor], sources: list[Tensor]) -> None:
    OPS.complete(windows, sources, comm.token, comm.world_size, comm.name)


def wrong_sends(
    comm: UlyssesCommunicator, x: Tensor, a: Tensor, b: Tensor
) -> dict[str, Callable[[], Any]]:
    token, size, name = comm.token, comm.world_size, comm.name
    return {
        r"x is \[2, 3, 2, 4\].* takes \[2, 3, 4, 4\]": lambda: send(comm, x[:, :, :2], a),
        r"x is .*float64.* takes .*float32": lambda: send(comm, x.double(), a),
        r"x is \[2, 3, 4, 4\].* takes \[2, 3, 2, 4\]": lambda: send(comm, x, a, 1),
        "peer=2 must be a rank below 2": lambda: send(comm, x, a, 2),
        "peer=-1 must be a rank below 2": lambda: send(comm, x, a, -1),
        "none of the windows": lambda: send(comm, x, torch.empty_like(a)),
        "given as window is none of the windows of": lambda: send(comm, x, a[:, :4]),
        "is for scatter; use that operator": lambda: OPS.gather_into(a, a, token, size, name),
        "world_size=3": lambda: OPS.scatter_into(x, a, token, 3, name),
        "no communicator is named 'nobody'": lambda: OPS.scatter_into(x, a, token, size, "nobody"),
        "nothing in flight": lambda: complete(comm, [b], [x]),
    }


def refuse_sends(rank: int, world_size: int) -> None:
    with UlyssesCommunicator(timeout_s=10) as comm:
        x, received, (a, b) = open_windows(comm, "a", "b")
        for pattern, call in wrong_sends(comm, x, a.tensor, b.tensor).items():
            with pytest.raises((ValueError, UlyssesError), match=pattern):
                call()
        assert pending_channels(comm) == ""
        send(comm, x, a.tensor)
        complete(comm, [a.tensor], [x])
        assert torch.equal(a.tensor, received)


def test_wrong_sends_are_refused(ranks: Ranks) -> None:
    ranks(2).run(refuse_sends, timeout_s=20)


def wrong_completions(
    comm: UlyssesCommunicator, x: Tensor, a: Tensor, b: Tensor
) -> dict[str, Callable[[], Any]]:
    """``x`` is in flight into ``a`` and ``b``, which are one channel."""
    return {
        "channel 'ab' also has window 'b' in flight": lambda: complete(comm, [a], [x]),
        "2 sources are not the 2 tensors": lambda: complete(comm, [a, b], [x, x.clone()]),
        "1 sources are not the 2 tensors": lambda: complete(comm, [a, b], [x]),
        "3 sources are not the 2 tensors": lambda: complete(comm, [a, b], [x, x, x]),
        "none of the windows": lambda: complete(comm, [a, b.clone()], [x, x]),
        "in flight for rank all; complete it": lambda: send(comm, x, a),
        "already has an exchange in flight": lambda: send(comm, x[:, :, :2], a, 1),
    }


def refuse_completions(rank: int, world_size: int) -> None:
    with UlyssesCommunicator(timeout_s=10) as comm:
        x, received, (a, b) = open_windows(comm, "a", "b", channel="ab")
        send(comm, x, a.tensor)
        send(comm, x, b.tensor)
        for pattern, call in wrong_completions(comm, x, a.tensor, b.tensor).items():
            with pytest.raises((ValueError, UlyssesError), match=pattern):
                call()
        complete(comm, [b.tensor, a.tensor], [x, x])
        assert torch.equal(a.tensor, received)
        assert torch.equal(b.tensor, received)


def test_wrong_completions_are_refused_and_what_is_in_flight_stays(ranks: Ranks) -> None:
    ranks(2).run(refuse_completions, timeout_s=20)


def refuse_missing_parts(rank: int, world_size: int) -> None:
    with UlyssesCommunicator(timeout_s=10) as comm:
        x, received, (window,) = open_windows(comm, "a")
        cut = [part.contiguous() for part in x.split(2, dim=2)]
        with Exchange(comm) as exchange:
            exchange.send(cut[rank], window, peer=rank)
            with pytest.raises(UlyssesError, match=rf"was sent nothing for ranks \[{1 - rank}\]"):
                complete(comm, [window.tensor], [cut[rank]])
            with pytest.raises(UlyssesError, match=f"in flight for rank {rank}"):
                exchange.send(cut[rank], window, peer=rank)
            with pytest.raises(UlyssesError, match="in flight for rank all"):
                exchange.send(x, window)
            exchange.send(cut[1 - rank], window, peer=1 - rank)
        assert torch.equal(window.tensor, received)


def test_every_peer_needs_its_part_once(ranks: Ranks) -> None:
    ranks(2).run(refuse_missing_parts, timeout_s=20)


def send_and_raise(comm: UlyssesCommunicator, x: Tensor, window: Window) -> None:
    with Exchange(comm) as exchange:
        exchange.send(x, window)
        raise KeyError("ours")


def leave_by_exception(rank: int, world_size: int) -> None:
    with UlyssesCommunicator(timeout_s=10) as comm:
        x, received, (window,) = open_windows(comm, "a")
        window.tensor.fill_(-1)
        with pytest.raises(KeyError, match="ours"):
            send_and_raise(comm, x, window)
        assert pending_channels(comm) == ""
        assert torch.equal(window.tensor, torch.full_like(window.tensor, -1))
        with Exchange(comm) as exchange:
            exchange.send(x, window)
        assert torch.equal(window.tensor, received)
    with pytest.raises(UlyssesError, match="is closed"):
        pending_channels(comm)


def test_a_block_left_by_an_exception_forgets_what_it_sent(ranks: Ranks) -> None:
    ranks(2).run(leave_by_exception, timeout_s=20)


def send_the_own_part_alone(comm: UlyssesCommunicator, x: Tensor, window: Window) -> None:
    heads = x.shape[2] // comm.world_size
    with Exchange(comm) as exchange:
        exchange.send(x[:, :, :heads], window, peer=comm.rank)


def leave_without_parts(rank: int, world_size: int) -> None:
    with UlyssesCommunicator(timeout_s=10) as comm:
        x, received, (window,) = open_windows(comm, "a")
        with pytest.raises(UlyssesError, match="was sent nothing for ranks"):
            send_the_own_part_alone(comm, x, window)
        assert pending_channels(comm) == ""
        with Exchange(comm) as exchange:
            exchange.send(x, window)
        assert torch.equal(window.tensor, received)


def test_a_block_whose_completion_is_refused_forgets_what_it_sent(ranks: Ranks) -> None:
    ranks(2).run(leave_without_parts, timeout_s=20)


# ---- rounds that are opened before their first send ----------------------------------------------


def opened(rank: int, world_size: int) -> list[str]:
    with UlyssesCommunicator(timeout_s=20) as comm:
        x, result, (window,) = open_windows(comm, "early")
        with Exchange(comm) as exchange:
            exchange.open(window)
            exchange.send(x, window)
        assert same_bytes(window.tensor, result)
        refused = []
        with Exchange(comm) as exchange:
            exchange.send(x, window)
            with pytest.raises(UlyssesError) as twice:
                exchange.open(window)
            refused.append(str(twice.value))
        nothing = Exchange(comm)
        with pytest.raises(UlyssesError) as error, nothing:
            nothing.open(window)
        refused.append(str(error.value))
        with (
            pytest.raises(ValueError, match=r"Exchange\.open: window") as kind,
            Exchange(comm) as e,
        ):
            e.open(window.tensor)  # type: ignore[arg-type]
        refused.append(str(kind.value))
        with Exchange(comm) as exchange:
            exchange.send(x, window)
        assert same_bytes(window.tensor, result)
        return refused


def test_a_round_may_be_opened_before_its_first_send(ranks: Ranks) -> None:
    for twice, nothing, kind in ranks(2).run(opened, timeout_s=60):
        assert twice.startswith("exchange: channel 'early' has an exchange in flight; complete it")
        assert nothing.startswith("complete: channel 'early' was opened and nothing was sent into")
        assert "a Window, as reserve() returned it" in kind
