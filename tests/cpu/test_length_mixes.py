"""The table of predicted imbalance: what the tool computes now, and what the page shows."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from ulysses_ops.tools.length_mixes import MIXES, NAME, WORLD_SIZES, predict, with_table

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results" / "cpu" / f"{NAME}.json"


def test_the_recorded_predictions_are_those_of_this_code() -> None:
    recorded = json.loads(RESULTS.read_text())["mixes"]
    assert recorded == [asdict(row) for row in predict()], (
        "run python -m ulysses_ops.tools.length_mixes"
    )


def test_the_page_shows_what_is_recorded() -> None:
    page = (ROOT / "docs" / "llm.md").read_text()
    recorded = json.loads(RESULTS.read_text())["mixes"]
    assert with_table(page, recorded) == page, "run python -m ulysses_ops.tools.length_mixes"
    assert page.count("| 8 |") >= len(MIXES)
    changed = [{**recorded[0], "plain_us": 1.0}, *recorded[1:]]
    assert with_table(page, changed) != page


def test_a_plan_is_never_slower_than_whole_requests() -> None:
    rows = predict()
    assert len(rows) == len(MIXES) * len(WORLD_SIZES)
    for row in rows:
        assert row.planned_us <= row.longest_first_us <= row.plain_us * 4 / 3
    assert max(row.plain_us / row.planned_us for row in rows) > 2
