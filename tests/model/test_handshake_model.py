"""The schedules in use are safe in every interleaving, and the search itself can be trusted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import stream_steps
from broken_schedules import WRONG
from handshake_model import Scenario
from host_calls import Host
from schedules import SAFE, one_channel
from state_space import Assembly, explore
from stream_steps import Await, Record, Reset, Signal, Wait

PAGE = Path(__file__).parents[2] / "docs" / "design" / "handshake.md"
SMALL = [scenario for scenario in SAFE if scenario.world_size == 2]


def ids(scenarios: list[Scenario]) -> list[str]:
    return [f"{scenario.name}, W={scenario.world_size}" for scenario in scenarios]


@pytest.mark.parametrize("scenario", SAFE, ids=ids([*SAFE]))
def test_schedule_is_safe(scenario: Scenario, recorded: list[dict[str, Any]]) -> None:
    found = explore(scenario.model())
    recorded.append(
        {
            "model": "handshake",
            "name": scenario.name,
            "world_size": scenario.world_size,
            "states": found.states,
            "transitions": found.transitions,
            "failure": found.failure and found.failure.kind,
        }
    )
    row = f"| {scenario.name} | {scenario.world_size} | {found.states:,} | {found.transitions:,} |"
    print(row)
    assert found.failure is None, str(found.failure)
    assert not found.unused, "steps that no interleaving reaches prove nothing"
    assert row in PAGE.read_text(encoding="utf-8"), f"docs/design/handshake.md should hold: {row}"


@pytest.mark.long
@pytest.mark.parametrize("scenario", SMALL, ids=ids(SMALL))
def test_generations_are_enough(scenario: Scenario, monkeypatch: pytest.MonkeyPatch) -> None:
    """Were two rounds taken for one, more generations would give more states."""
    states = explore(scenario.model()).states
    monkeypatch.setattr(stream_steps, "GENERATIONS", 11)
    assert explore(scenario.model()).states == states


@pytest.mark.parametrize("scenario", [*SAFE, *(w.scenario for w in WRONG)], ids=lambda s: s.name)
def test_events_have_one_recorder_and_one_waiter(scenario: Scenario) -> None:
    """What makes it right to take events as soon as they are ready."""
    for kind in (Record, Await):
        users: dict[str, set[str]] = {}
        for stream in scenario.model().streams:
            for step in stream.steps:
                if isinstance(step, kind):
                    users.setdefault(step.event.name, set()).add(stream.name)
        assert users
        assert all(len(streams) == 1 for streams in users.values()), users


@pytest.mark.parametrize(
    "scenario",
    [
        *(s for s in SMALL if s.name in {"one channel", "two graphs on one stream"}),
        *(w.scenario for w in WRONG if w.scenario.name in {"no open", "reset before wait"}),
    ],
    ids=lambda scenario: scenario.name,
)
def test_taking_events_at_once_changes_no_verdict(scenario: Scenario) -> None:
    fast, slow = (explore(scenario.model(), settle=settle) for settle in (True, False))
    assert slow.states > fast.states
    assert (slow.failure and slow.failure.kind) == (fast.failure and fast.failure.kind)


def test_counterexample_is_the_shortest() -> None:
    """Whoever writes first shuts the other out, at the latest after three steps."""
    assembly = Assembly(forever=False)
    left, right = assembly.cell("left"), assembly.cell("right")
    for stream, mine, other in (("a", left, right), ("b", right, left)):
        assembly.put(stream, Wait(mine, 0))
        assembly.put(stream, Signal(other, 1))
        assembly.put(stream, Wait(mine, 0))
    assert str(explore(assembly.model()).failure).splitlines() == [
        "deadlock after 3 steps",
        "    1  a: wait left == 0",
        "    2  a: write right = 1",
        "    3  a: wait left == 0",
        "stuck  b: wait right == 0",
    ]


def test_streams_that_end_are_no_deadlock() -> None:
    assembly = Assembly(forever=False)
    word = assembly.cell("word")
    assembly.put("a", Signal(word, 1))
    assembly.put("b", Wait(word, 1))
    assembly.put("b", Reset(word))
    assert explore(assembly.model()).failure is None


def test_bounds_are_said() -> None:
    with pytest.raises(MemoryError, match="more than 100 states; choose smaller bounds"):
        explore(SMALL[0].model(), max_states=100)

    def long_round(host: Host) -> None:
        for _ in range(30):
            one_channel(host)

    with pytest.raises(ValueError, match="stream rank 0 copy has 300 steps, not 1 to 254"):
        Scenario("too long", 2, long_round).model()
