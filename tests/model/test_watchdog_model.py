"""No rank hands out what a watchdog spoiled, and none waits for ever; else, how it goes wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from state_space import DEADLOCK, explore
from watchdog_model import HANDED_OUT, Watchdogs, rounds_with_watchdogs

pytestmark = pytest.mark.long


@dataclass(frozen=True)
class Watched:
    """A scenario, and how it fails if it does."""

    name: str
    world_size: int
    num_rounds: int
    how: Watchdogs
    kind: str = ""


SAFE = (
    Watched("a peer is late", 2, 3, Watchdogs()),
    Watched("a peer dies", 2, 3, Watchdogs(dies=1)),
    Watched("both give up", 2, 3, Watchdogs(act_first=(0, 1))),
    Watched("a peer is late, one is told", 3, 1, Watchdogs()),
    Watched("a peer dies, one is told", 3, 1, Watchdogs(dies=1)),
)
WRONG = (
    Watched("nobody is told", 2, 3, Watchdogs(tell="never"), HANDED_OUT),
    Watched("told after the release", 2, 3, Watchdogs(tell="after"), HANDED_OUT),
    Watched("nobody looks", 2, 3, Watchdogs(looks=False), HANDED_OUT),
    Watched("no watchdog, a peer dies", 2, 3, Watchdogs(act_first=(), dies=1), DEADLOCK),
    Watched("nobody is told, a peer dies", 3, 1, Watchdogs(tell="never", dies=1), DEADLOCK),
)


@pytest.mark.parametrize(
    "watched",
    [
        pytest.param(one, id=one.name, marks=[pytest.mark.long] if one.world_size > 2 else [])
        for one in SAFE
    ],
)
def test_watchdogs_spoil_nothing_and_leave_nobody_waiting(
    watched: Watched, recorded: list[dict[str, Any]]
) -> None:
    model = rounds_with_watchdogs(watched.world_size, watched.num_rounds, watched.how)
    found = explore(model)
    print(f"{watched.name}: {found.states:,} states")
    recorded.append(
        {
            "model": "watchdogs",
            "name": watched.name,
            "world_size": watched.world_size,
            "states": found.states,
            "transitions": found.transitions,
            "failure": found.failure and found.failure.kind,
        }
    )
    assert found.failure is None, str(found.failure)
    assert not found.unused, "steps that no interleaving reaches prove nothing"


@pytest.mark.parametrize("watched", WRONG, ids=lambda watched: watched.name)
def test_broken_variant_is_found(watched: Watched, recorded: list[dict[str, Any]]) -> None:
    model = rounds_with_watchdogs(watched.world_size, watched.num_rounds, watched.how)
    failure = explore(model, watched.kind).failure
    assert failure is not None, f"BLIND: {watched.name} shows no {watched.kind}"
    print(f"{watched.name}: {failure}")
    recorded.append(
        {
            "model": "watchdogs, broken",
            "name": watched.name,
            "world_size": watched.world_size,
            "steps": len(failure.trace),
            "failure": failure.kind,
        }
    )


def test_without_a_watchdog_and_without_a_fault_nothing_is_spoiled() -> None:
    assert explore(rounds_with_watchdogs(2, 3, Watchdogs(act_first=()))).failure is None
