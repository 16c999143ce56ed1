"""reserve(): a meeting of the ranks. They get the same windows, evict the same, and fail alike."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankPool
from whole_tensors import numbered

from ulysses_ops import (
    AgreementError,
    Exchange,
    UlyssesCommunicator,
    UlyssesError,
    Window,
    WindowSpec,
    reserve,
)
from ulysses_ops.windows import WindowCache

Ranks = Callable[[int], RankPool]

SPEC = WindowSpec("w", "scatter", (1, 8, 4, 2), torch.float32)


def named(*names: str) -> list[WindowSpec]:
    return [replace(SPEC, name=name) for name in names]


def cached(comm: UlyssesCommunicator) -> list[str]:
    """Names of the windows that are kept, least recently used first."""
    return [window.spec.name for window in WindowCache.of(comm).all()]


def check_service(comm: UlyssesCommunicator, window: Window) -> None:
    """An even scatter through the window, with the same source on every rank, is right."""
    x = numbered(*window.source_shape)
    with Exchange(comm) as exchange:
        exchange.send(x, window)
    mine = x.chunk(comm.world_size, dim=2)[comm.rank]
    assert torch.equal(window.tensor, torch.cat([mine] * comm.world_size, dim=1))


# ---- what a window is ----------------------------------------------------------------------------


def shapes(rank: int, world_size: int) -> None:
    specs = [
        WindowSpec("s", "scatter", (2, 7, 5, 3), torch.float32, None, (4, 3), (2, 3)),
        WindowSpec("g", "gather", (2, 7, 5, 3), torch.bfloat16, None, (4, 3), (2, 3)),
    ]
    rows, heads = (4, 3)[rank], (2, 3)[rank]
    with UlyssesCommunicator(timeout_s=10) as comm:
        scattered, gathered = reserve(comm, specs)
        assert scattered.tensor.shape == (2, 7, heads, 3)
        assert scattered.source_shape == (2, rows, 5, 3)
        assert scattered.own_view.shape == (2, rows, heads, 3)
        assert gathered.tensor.shape == (2, rows, 5, 3)
        assert gathered.source_shape == (2, 7, heads, 3)
        assert gathered.own_view.shape == (2, rows, heads, 3)
        assert gathered.tensor.dtype == torch.bfloat16
        for window in (scattered, gathered):
            assert window.tensor.is_contiguous()
            assert window.channel == window.spec.name
            window.tensor.zero_()
            window.own_view.fill_(1)  # a view, at the place of this rank's own share
            assert int(window.tensor.sum()) == window.own_view.numel()
        assert scattered.tensor[:, (0, 4)[rank] :][:, :rows].min() == 1
        assert gathered.tensor[:, :, (0, 2)[rank] :][:, :, :heads].min() == 1


def test_shapes_follow_the_splits(ranks: Ranks) -> None:
    ranks(2).run(shapes, timeout_s=20)


VARIANTS = [
    replace(SPEC, name="another"),
    replace(SPEC, direction="gather"),
    replace(SPEC, shape=(1, 4, 8, 2)),
    replace(SPEC, shape=(2, 8, 4, 1)),
    replace(SPEC, dtype=torch.int32),
    replace(SPEC, channel="channel"),
    replace(SPEC, seq_splits=(3, 5)),
    replace(SPEC, head_splits=(1, 3)),
    replace(SPEC, head_splits=(2, 2), head_starts=(0, 0)),
    replace(SPEC, seq_splits=(4, 3), seq_starts=(0, 5)),
]


def test_what_differs_is_another_window_and_what_does_not_is_not() -> None:
    keys = [spec.key(2) for spec in (SPEC, *VARIANTS)]
    assert len(set(keys)) == len(keys)
    same = replace(SPEC, channel="w", seq_splits=(4, 4), head_splits=(2, 2), seq_starts=(0, 4))
    assert same.key(2) == SPEC.key(2)


def nothing_here(rank: int, world_size: int) -> None:
    """Two windows that are empty on this rank are two, and both work; on ``gloo`` here."""
    specs = [
        replace(SPEC, name=name, direction="gather", seq_splits=(0, 8)) for name in ("a", "b")
    ] + [replace(SPEC, name="c", head_splits=(4, 0)), replace(SPEC, name="d", shape=(0, 8, 4, 2))]
    with UlyssesCommunicator(timeout_s=10, max_windows=4) as comm:
        windows = reserve(comm, specs)
        empty = [window for window in windows if window.tensor.numel() == 0]
        assert [w.spec.name for w in empty] == (["a", "b", "d"] if rank == 0 else ["c", "d"])
        assert len({window.address for window in windows}) == 4
        assert [WindowCache.of(comm).at(window.tensor) for window in windows] == windows
        for window in windows:
            with Exchange(comm) as exchange:
                exchange.send(torch.full(window.source_shape, rank + 1.0), window)
            assert window.tensor.sum() == window.tensor.numel() * 1.5
        reserve(comm, named("e", "f", "g", "h"))  # and can be evicted
        assert cached(comm) == ["e", "f", "g", "h"]


def test_a_rank_with_nothing_has_windows_too(ranks: Ranks) -> None:
    ranks(2).run(nothing_here, timeout_s=20)


def gaps_and_overlaps(rank: int, world_size: int) -> None:
    """Rows that nobody sends keep what was there; a head that both need goes to both."""
    spec = replace(
        SPEC, seq_splits=(3, 2), seq_starts=(5, 1), head_splits=(3, 2), head_starts=(0, 2)
    )
    with UlyssesCommunicator(timeout_s=10) as comm:
        (window,) = reserve(comm, [spec])
        whole = numbered(1, 8, 4, 2)
        window.tensor.fill_(-1)
        with Exchange(comm) as exchange:
            first, rows = (5, 1)[rank], (3, 2)[rank]
            exchange.send(whole[:, first : first + rows], window)
        expected = torch.full_like(whole, -1)
        for rows_of in (slice(5, 8), slice(1, 3)):
            expected[:, rows_of] = whole[:, rows_of]
        heads = (slice(0, 3), slice(2, 4))[rank]
        assert torch.equal(window.tensor, expected[:, :, heads])
        assert torch.equal(window.own_view, whole[:, first : first + rows, heads])


def test_ranges_may_leave_gaps_and_overlap(ranks: Ranks) -> None:
    ranks(2).run(gaps_and_overlaps, timeout_s=20)


def kept(rank: int, world_size: int) -> None:
    with UlyssesCommunicator(timeout_s=10) as comm:
        (window,) = reserve(comm, [SPEC])
        with mock.patch.object(comm.agreement, "exchange", side_effect=AssertionError):
            twice = reserve(comm, [SPEC, replace(SPEC, seq_splits=(4, 4))])  # no meeting
        assert twice[0] is twice[1] is window
        gone = weakref.ref(window)
    del window, twice
    gc.collect()
    assert gone() is None  # a closed communicator keeps no memory


def test_a_window_is_kept_until_the_communicator_closes(ranks: Ranks) -> None:
    ranks(2).run(kept, timeout_s=20)


# ---- eviction ------------------------------------------------------------------------------------


def evict(rank: int, world_size: int) -> list[str]:
    with UlyssesCommunicator(timeout_s=10, max_windows=3) as comm:
        reserve(comm, named("a", "b", "c"))
        reserve(comm, named("a"))  # now the most recently used
        d, a = reserve(comm, named("d", "a"))
        assert cached(comm) == ["c", "d", "a"]  # "b" went
        b, c = reserve(comm, named("b", "c"))
        assert cached(comm) == ["a", "b", "c"]
        for window in (a, b, c):
            check_service(comm, window)
        with pytest.raises(ValueError, match="none of the windows"), Exchange(comm) as exchange:
            exchange.send(numbered(*d.source_shape), d)
        with pytest.raises(UlyssesError, match="4 windows are asked for at once") as error:
            reserve(comm, named("a", "b", "c", "d"))
        check_service(comm, a)
        return [str(error.value)]


def test_the_least_recently_used_goes_first(ranks: Ranks) -> None:
    first, second = ranks(2).run(evict, timeout_s=20)
    assert first == second


def differently_used(rank: int, world_size: int) -> list[str]:
    """Each rank used its windows in another order; yet they evict the same one."""
    with UlyssesCommunicator(timeout_s=10, max_windows=2) as comm:
        reserve(comm, named("a", "b"))
        reserve(comm, named("ab"[rank]))
        (c,) = reserve(comm, named("c"))
        check_service(comm, c)
        return sorted(cached(comm))


def test_eviction_is_agreed(ranks: Ranks) -> None:
    first, second = ranks(2).run(differently_used, timeout_s=20)
    assert first == second


def evict_in_flight(rank: int, world_size: int, together: bool) -> None:
    """What is in flight on some rank stays; with nothing else to evict, that is an error."""
    with UlyssesCommunicator(timeout_s=10, max_windows=1) as comm:
        (a,) = reserve(comm, named("a"))
        x = numbered(*a.source_shape)
        exchange = Exchange(comm)
        if together or rank == 0:
            exchange.send(x, a)
        with pytest.raises(UlyssesError, match="can be evicted"):
            reserve(comm, named("b"))
        if not together and rank == 1:
            exchange.send(x, a)
        exchange.complete()
        assert torch.equal(a.own_view, x.split(2, dim=2)[rank])
        (b,) = reserve(comm, named("b"))
        check_service(comm, b)


@pytest.mark.parametrize("together", [True, False])
def test_a_window_in_flight_is_not_evicted(ranks: Ranks, together: bool) -> None:
    ranks(2).run(evict_in_flight, together, timeout_s=20)


# ---- failures are alike on every rank ------------------------------------------------------------


def differ(rank: int, world_size: int, number: int) -> str:
    with UlyssesCommunicator(timeout_s=10) as comm:
        with pytest.raises(ValueError, match="ranks ask for different exchanges") as error:
            reserve(comm, [VARIANTS[number] if rank == 1 else SPEC])
        assert cached(comm) == []
        check_service(comm, *reserve(comm, [SPEC]))
    return str(error.value)


@pytest.mark.parametrize("number", range(len(VARIANTS)))
def test_ranks_that_ask_for_different_windows_all_raise_the_same(ranks: Ranks, number: int) -> None:
    first, second = ranks(2).run(differ, number, timeout_s=20)
    assert first == second
    for spec in (SPEC, VARIANTS[number]):
        assert spec.key(2) in first


def run_out_of_memory(rank: int, world_size: int) -> str:
    """Rank 1 has room for the first of two windows only."""
    real = torch.empty
    calls = []

    def empty(*args: object, **kwargs: object) -> object:
        calls.append(args)
        if rank == 1 and len(calls) == 2:
            raise torch.OutOfMemoryError("no room for 256 bytes")
        return real(*args, **kwargs)  # type: ignore[call-overload]

    with UlyssesCommunicator(timeout_s=2) as comm:
        with (
            mock.patch("ulysses_ops.windows.torch.empty", empty),
            pytest.raises(UlyssesError, match=r"rank 1: .*no room for 256 bytes") as error,
        ):
            reserve(comm, named("a", "b"))
        for window in reserve(comm, named("a", "b")):
            check_service(comm, window)
    return str(error.value)


def test_out_of_memory_on_one_rank_is_raised_by_all(ranks: Ranks) -> None:
    first, second = ranks(2).run(run_out_of_memory, timeout_s=15)
    assert first == second


def stay_away(rank: int, world_size: int) -> None:
    with UlyssesCommunicator(timeout_s=1) as comm:
        if rank == 0:
            with pytest.raises(AgreementError, match=r"reserve: rank 0 waited 1 s for ranks \[1\]"):
                reserve(comm, [SPEC])
            assert cached(comm) == []
    dist.barrier()
    with UlyssesCommunicator(timeout_s=10) as comm:
        check_service(comm, *reserve(comm, [SPEC]))


def test_a_rank_that_stays_away_is_named(ranks: Ranks) -> None:
    ranks(2).run(stay_away, timeout_s=20)


def refuse(rank: int, world_size: int) -> list[str]:
    """Wrong specs, the same on every rank; a right one works after each."""
    wrong = {
        "direction='up' must be": replace(SPEC, direction="up"),  # type: ignore[arg-type]
        r"shape must be \(B, S_global, H, D\)": replace(SPEC, shape=(1, 8, 4)),  # type: ignore[arg-type]
        "S_global=7 must be divisible by world_size=2": replace(SPEC, shape=(1, 7, 4, 2)),
        "H=3 must be divisible by world_size=2": replace(SPEC, shape=(1, 8, 3, 2)),
        r"seq_splits=\[4, 5\] add up to 9": replace(SPEC, seq_splits=(4, 5)),
        r"seq_starts=\[0, 3\] .* overlap": replace(SPEC, seq_splits=(4, 4), seq_starts=(0, 3)),
        r"head_starts=\[0, 3\] .* within the 4": replace(
            SPEC, head_splits=(2, 2), head_starts=(0, 3)
        ),
        "head_starts need head_splits beside them": replace(SPEC, head_starts=(0, 0)),
    }
    texts = []
    with UlyssesCommunicator(timeout_s=10) as comm:
        for pattern, spec in wrong.items():
            with pytest.raises(ValueError, match=f"^reserve: .*{pattern}") as error:
                reserve(comm, [SPEC, spec])
            texts.append(str(error.value))
            check_service(comm, *reserve(comm, [SPEC]))
    with pytest.raises(UlyssesError, match="is closed; construct a new one"):
        reserve(comm, [SPEC])
    return texts


def test_wrong_specs_are_refused_on_every_rank(ranks: Ranks) -> None:
    first, second = ranks(2).run(refuse, timeout_s=20)
    assert first == second
