"""The verdict is closed to doubt, and the same on every rank."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import lru_cache
from itertools import permutations
from typing import Any

import pytest
from fake_nvml import (
    NOT_SUPPORTED,
    NVLINK,
    READ,
    WRITE,
    FakeNvml,
    full_mesh,
    group_topologies,
    machine,
    pair_lines,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from ulysses_ops.eligibility import Decision, Request, decide
from ulysses_ops.facts import Answer, Fact, Reading, Topology

NCCL = Request(backends=("nccl",))
ANSWERS: tuple[Answer, ...] = ("yes", "no", "unknown")
Decide = Callable[[Sequence[Topology], Request], Decision]
Path = tuple[str | int, ...]


def changed(value: Any, path: Path, new: Any) -> Any:
    """``value`` with what is at ``path`` replaced."""
    if not path:
        return new
    head, *rest = path
    if isinstance(head, int):
        return (*value[:head], changed(value[head], tuple(rest), new), *value[head + 1 :])
    return replace(value, **{head: changed(getattr(value, head), tuple(rest), new)})


def at(value: Any, path: Path) -> Any:
    for step in path:
        value = value[step] if isinstance(step, int) else getattr(value, step)
    return value


def facts_in(value: Any, path: Path = ()) -> Iterator[Path]:
    """Where the facts and the identifying readings of a topology are."""
    if isinstance(value, Fact) or (isinstance(value, Reading) and path[0] == "process"):
        yield path
    elif isinstance(value, tuple):
        for index, item in enumerate(value):
            yield from facts_in(item, (*path, index))
    elif is_dataclass(value):
        for entry in fields(value):
            yield from facts_in(getattr(value, entry.name), (*path, entry.name))


def doubted(topology: Topology, path: Path) -> Topology:
    """The topology with one fact turned to unknown."""
    old = at(topology, path)
    new = Fact("unknown", old.source) if isinstance(old, Fact) else Reading(None, old.source)
    result = changed(topology, path, new)
    assert isinstance(result, Topology)
    return result


WITHOUT_WEIGHT = {"flush_remote_writes", "multicast", "container", "devices"}


def counts(topology: Topology, path: Path) -> bool:
    """Whether ``ce`` needs this fact: of a GPU, only MIG, and only where others do not answer."""
    if path[0] in WITHOUT_WEIGHT or path[-1] == "atomics":
        return False
    if path[0] == "gpus":
        return bool(path[-1] == "mig" and at(topology, path[:2]) == topology.gpu)
    return True


@lru_cache
def eligible(world_size: int) -> tuple[Topology, ...]:
    return tuple(full_mesh(world_size))


def check_fail_closed(verdict: Decide, ranks: Sequence[Topology], rank: int, path: Path) -> None:
    """One fact in doubt takes ``ce`` away, and the reasons name the rank that doubts."""
    doubtful = list(ranks)
    doubtful[rank] = doubted(ranks[rank], path)
    decision = verdict(doubtful, NCCL)
    assert decision.transport == "nccl", f"{path} unknown on rank {rank} passed"
    assert any(f"rank {rank}" in reason for reason in decision.reasons)
    assert verdict(doubtful, Request(transport="ce")).transport is None


def lenient(topologies: Sequence[Topology], request: Request) -> Decision:
    """A verdict that takes every unknown for the answer it would like."""

    def hoped(topology: Topology) -> Topology:
        for path in list(facts_in(topology)):
            fact = at(topology, path)
            if isinstance(fact, Fact) and fact.answer == "unknown":
                good = Fact("no" if path[-1] in ("mig", "mps") else "yes", fact.source)
                topology = changed(topology, path, good)
        return topology

    return decide([hoped(topology) for topology in topologies], request)


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_fact_in_doubt_closes_and_no_other_does(world_size: int) -> None:
    ranks = eligible(world_size)
    checked = 0
    for rank in range(world_size):
        for path in facts_in(ranks[rank]):
            if counts(ranks[rank], path):
                check_fail_closed(decide, ranks, rank, path)
                checked += 1
            else:
                doubtful = list(ranks)
                doubtful[rank] = doubted(ranks[rank], path)
                assert decide(doubtful, NCCL).transport == "ce"
    # nvml, identity, 64-bit, MPS, library; boot id, PID namespace; own MIG; four for each pair
    assert checked == world_size * (8 + 4 * world_size * (world_size - 1))


def test_a_lenient_verdict_would_be_caught() -> None:
    ranks = eligible(2)
    for path in facts_in(ranks[0]):
        if counts(ranks[0], path) and path[0] != "process":
            with pytest.raises(AssertionError, match="unknown on rank 0 passed"):
                check_fail_closed(lenient, ranks, 0, path)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_every_rank_reaches_the_same_verdict_in_the_same_words(data: st.DataObject) -> None:
    """Each rank has its own copies, in which lists may stand in another order."""
    world_size = data.draw(st.integers(2, 4))
    ranks = list(eligible(world_size))
    for _ in range(data.draw(st.integers(0, 3))):
        rank = data.draw(st.integers(0, world_size - 1))
        path = data.draw(st.sampled_from(list(facts_in(ranks[rank]))))
        old = at(ranks[rank], path)
        answer = data.draw(st.sampled_from(ANSWERS))
        if isinstance(old, Fact):
            ranks[rank] = changed(ranks[rank], path, replace(old, answer=answer))
        elif answer != "yes":
            value = None if answer == "unknown" else "elsewhere"
            ranks[rank] = changed(ranks[rank], path, replace(old, value=value))
    shared = data.draw(st.booleans())
    request = Request(backends=("nccl",), allow_shared_devices=shared)
    shuffle = random.Random(data.draw(st.integers(0, 2**16)))
    verdicts = {
        decide(
            [
                replace(
                    Topology.from_json(topology.to_json()),
                    gpus=tuple(shuffle.sample(topology.gpus, len(topology.gpus))),
                    pairs=tuple(shuffle.sample(topology.pairs, len(topology.pairs))),
                )
                for topology in ranks
            ],
            request,
        )
        for _ in range(world_size)
    }
    assert verdicts == {decide(ranks, request)}


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_the_order_of_ranks_changes_words_but_no_transport(data: st.DataObject) -> None:
    count = data.draw(st.integers(2, 4))
    status = {
        (a, b, kind): data.draw(st.sampled_from([0, 0, 0, 0, 0, NOT_SUPPORTED, 6]))
        for a, b in permutations(range(count), 2)
        for kind in (READ, WRITE, NVLINK)
    }
    ranks = group_topologies(FakeNvml(machine(count), status))
    bad = {(a, b) for (a, b, _), value in status.items() if value}
    first = decide(ranks, NCCL)
    assert (first.transport, pair_lines(first)) == ("nccl" if bad else "ce", bad)
    order = data.draw(st.permutations(range(count)))
    assert decide([ranks[rank] for rank in order], NCCL).transport == first.transport
