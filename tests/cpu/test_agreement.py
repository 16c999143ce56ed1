"""Meetings of the ranks, here threads over one store: bounded, alike on every rank, never stale."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import Store

from ulysses_ops.agreement import Agreement, find_disagreement, join
from ulysses_ops.errors import AgreementError

T = TypeVar("T")

LONG_S = 10.0
SHORT_S = 0.3


def on_ranks(world_size: int, work: Callable[[int], T]) -> list[T]:
    """Run ``work(rank)`` on every rank at once; an exception is a result too."""

    def guarded(rank: int) -> Any:
        try:
            return work(rank)
        except Exception as error:  # noqa: BLE001 - the caller looks at it
            return error

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(guarded, range(world_size)))


def agreements(store: Store, world_size: int, timeout_s: float = LONG_S) -> list[Agreement]:
    return [Agreement(store, "session", rank, world_size, timeout_s) for rank in range(world_size)]


@pytest.fixture(params=["hash", "file", "prefix"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "file":
        return dist.FileStore(str(tmp_path / "store"), -1)
    store = dist.HashStore()
    return dist.PrefixStore("group", store) if request.param == "prefix" else store


# ---- exchange ------------------------------------------------------------------------------------


def test_every_rank_reads_every_record(store: Store) -> None:
    ranks = agreements(store, 3)
    for meeting in range(5):
        found = on_ranks(3, lambda rank: ranks[rank].exchange("topic", {"at": [rank, meeting]}))  # noqa: B023
        assert found == [[{"at": [rank, meeting]} for rank in range(3)]] * 3


def test_a_rank_that_does_not_come_is_named_within_the_limit(store: Store) -> None:
    ranks = agreements(store, 4, SHORT_S)
    start = time.monotonic()
    found = on_ranks(
        4, lambda rank: ranks[rank].exchange("reserve", {}) if rank in (0, 2) else None
    )
    assert time.monotonic() - start < SHORT_S + 3
    assert found[1] is found[3] is None
    texts = {str(found[rank]) for rank in (0, 2)}  # of the first that gave up
    assert isinstance(found[0], AgreementError)
    assert isinstance(found[2], AgreementError)
    (text,) = texts
    assert re.match(r"reserve: rank [02] waited 0.3 s for ranks \[1, 3\], which did not", text)
    assert "every rank must make the same calls" in text


def test_a_rank_that_comes_when_the_others_gave_up_is_refused_too(store: Store) -> None:
    """Else it would go on alone, into a collective that nobody joins."""
    ranks = agreements(store, 2, SHORT_S)
    with pytest.raises(AgreementError, match=r"rank 0 waited 0.3 s for ranks \[1\]") as early:
        ranks[0].exchange("reserve", {})
    with pytest.raises(AgreementError) as late:
        ranks[1].exchange("reserve", {})
    assert str(late.value) == str(early.value)


class OutOfTime(dist.HashStore):
    """A store in which never all records are there at once."""

    def check(self, keys: list[str]) -> bool:
        return len(keys) == 1 and super().check(keys)


def test_who_comes_at_the_last_moment_has_come() -> None:
    """The limit is over, but when one looks who is missing, nobody is."""
    store = OutOfTime()
    late, early = agreements(store, 2, SHORT_S)
    with pytest.raises(AgreementError, match=r"for ranks \[0\]"):
        early.exchange("a rank is missing", {})
    with pytest.raises(AgreementError, match=r"for ranks \[0\]"):
        late.exchange("a rank is missing", {})
    store.set("session/1/1", json.dumps({"topic": "nobody is missing", "record": {}}))
    assert late.exchange("nobody is missing", {}) == [{}, {}]


def test_ranks_at_different_calls_are_told_which(store: Store) -> None:
    ranks = agreements(store, 3)
    topics = ("reserve", "capture", "reserve")
    for error in on_ranks(3, lambda rank: ranks[rank].exchange(topics[rank], {})):
        assert isinstance(error, AgreementError)
        assert "by rank ['reserve', 'capture', 'reserve']" in str(error)
    found = on_ranks(3, lambda rank: ranks[rank].exchange("again", {}))
    assert found == [[{}] * 3] * 3


def test_records_do_not_pile_up_in_the_store() -> None:
    store = dist.HashStore()
    ranks = agreements(store, 2)
    sizes = []
    for _ in range(20):
        on_ranks(2, lambda rank: ranks[rank].exchange("topic", {}))
        sizes.append(store.num_keys())
    assert sizes[-1] <= sizes[3]


def test_one_rank_meets_itself() -> None:
    (alone,) = agreements(dist.HashStore(), 1, SHORT_S)
    assert alone.exchange("topic", {"pair": (1, 2)}) == [{"pair": [1, 2]}]
    assert alone.all_left("handle")


# ---- attempt -------------------------------------------------------------------------------------


def test_a_step_that_fails_on_one_rank_is_known_to_all(store: Store) -> None:
    ranks = agreements(store, 3)

    def step(rank: int) -> int:
        if rank == 1:
            raise MemoryError("no room\nfor details")
        return rank

    found = on_ranks(3, lambda rank: ranks[rank].attempt("reserve", lambda: step(rank)))
    failures = ["rank 1: MemoryError: no room"]
    assert found == [(0, failures), (None, failures), (2, failures)]


def test_no_rank_leaves_before_it_has_said_how_it_went(store: Store) -> None:
    """Control: a step that stays away from the meeting when it fails makes the other one wait."""
    ranks = agreements(store, 2, SHORT_S)

    def stay_away(rank: int) -> object:
        if rank == 1:
            raise MemoryError("no room")
        return ranks[rank].exchange("reserve", {"failure": ""})

    found = on_ranks(2, stay_away)
    assert isinstance(found[0], AgreementError)
    assert "for ranks [1]" in str(found[0])


def test_leaving_is_told_without_waiting(store: Store) -> None:
    ranks = agreements(store, 3)
    assert not ranks[0].all_left("handle")
    ranks[1].leave("handle", owner=0)
    assert not ranks[0].all_left("handle")
    ranks[2].leave("handle", owner=0)
    assert ranks[0].all_left("handle")
    assert not ranks[0].all_left("another")
    assert not ranks[1].all_left("handle")


# ---- join: a store may hold records of an earlier life -------------------------------------------


def naive_join(store: Store, name: str, rank: int, world_size: int, timeout_s: float) -> str:
    """The control: post a random number, wait until there is one of every rank."""
    keys = [f"{name}/hello/{peer}" for peer in range(world_size)]
    store.set(keys[rank], json.dumps(random.getrandbits(64)))
    store.wait(keys, timedelta(seconds=timeout_s))
    return "-".join(store.get(key).decode() for key in keys)


Join = Callable[[Store, str, int, int, float], str]


def lives(store: Store, how: Join, world_size: int) -> list[str]:
    """Two lives over one store; the session of each, the same on every rank."""
    sessions = []
    for _ in range(2):
        found = on_ranks(world_size, lambda rank: how(store, "name", rank, world_size, LONG_S))
        assert len(set(found)) == 1, found
        sessions.append(found[0])
    return sessions


def test_a_second_life_meets_anew(store: Store) -> None:
    for world_size in (2, 3, 2):
        first, second = lives(store, join, world_size)
        assert first != second
        assert first.startswith("name/")


class _Slow:
    """A store that one rank looks into seldom."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def check(self, keys: list[str]) -> bool:
        time.sleep(0.02)
        return self._store.check(keys)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def test_a_rank_that_joins_again_at_once_does_not_leave_a_peer_behind() -> None:
    store = dist.HashStore()

    def come(rank: int) -> list[str]:
        mine = store if rank == 0 else _Slow(store)
        return [join(cast("Store", mine), "name", rank, 2, LONG_S) for _ in range(4)]

    first, second = on_ranks(2, come)
    assert first == second
    assert len(set(first)) == 4


def test_records_of_an_earlier_life_are_not_taken_for_a_peer(store: Store) -> None:
    lives(store, join, 2)
    with pytest.raises(AgreementError, match=r"'name': rank 0 waited 0.3 s for ranks \[1\]"):
        join(store, "name", 0, 2, SHORT_S)


def test_a_join_that_takes_what_it_finds_is_fooled(store: Store) -> None:
    """Control of the two above."""
    store.set("name/hello/1", json.dumps(7))
    assert naive_join(store, "name", 0, 2, SHORT_S).endswith("-7")


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(0, 12), min_size=2, max_size=4), st.booleans())
def test_ranks_that_come_at_any_time_agree(delays_ms: list[int], used_before: bool) -> None:
    store = dist.HashStore()
    world_size = len(delays_ms)
    earlier = lives(store, join, world_size) if used_before else []

    def come(rank: int) -> str:
        time.sleep(delays_ms[rank] / 1000)
        return join(store, "name", rank, world_size, LONG_S)

    found = on_ranks(world_size, come)
    assert len(set(found)) == 1
    assert found[0] not in earlier


# ---- disagreement --------------------------------------------------------------------------------


def test_what_differs_is_said_once_with_its_ranks() -> None:
    assert find_disagreement([{"a": 1, "b": 2}, {"b": 2, "a": 1}]) is None
    found = find_disagreement([{"dtype": "x"}, {"dtype": "y"}, {"dtype": "x"}])
    assert found is not None
    assert found.describe() == 'ranks [0, 2]: {"dtype": "x"}; ranks [1]: {"dtype": "y"}'
