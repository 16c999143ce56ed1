"""Negative controls: every variant that is known to be wrong fails in the way that is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from broken_schedules import WRONG
from handshake_model import Wrong
from state_space import explore

PAGE = Path(__file__).parents[2] / "docs" / "design" / "handshake.md"


@pytest.mark.parametrize("wrong", WRONG, ids=[wrong.scenario.name for wrong in WRONG])
def test_broken_variant_is_found(wrong: Wrong, recorded: list[dict[str, Any]]) -> None:
    failure = explore(wrong.scenario.model(), wrong.kind).failure
    assert failure is not None, f"BLIND: {wrong.scenario.name} shows no {wrong.kind}"
    print(f"{wrong.scenario.name}: {failure}")
    assert failure.kind == wrong.kind
    recorded.append(
        {
            "model": "handshake, broken",
            "name": wrong.scenario.name,
            "world_size": wrong.scenario.world_size,
            "steps": len(failure.trace),
            "failure": failure.kind,
        }
    )
    row = f"| {wrong.scenario.name} | {failure.kind} | {len(failure.trace)} | {wrong.why} |"
    print(row)
    assert row in PAGE.read_text(encoding="utf-8"), f"docs/design/handshake.md should hold: {row}"


@pytest.mark.parametrize("wrong", WRONG, ids=[wrong.scenario.name for wrong in WRONG])
def test_broken_variant_fails_without_being_told_how(wrong: Wrong) -> None:
    assert explore(wrong.scenario.model()).failure is not None
