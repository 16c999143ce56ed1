"""The table of predicted imbalance: what the tool computes now, and what is made of it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import typer
from typer.testing import CliRunner

from ulysses_ops.tools.length_mixes import (
    MIXES,
    NAME,
    WORLD_SIZES,
    predict,
    write_predictions,
)
from ulysses_ops.tools.llm_tables import mixes_table
from ulysses_ops.tools.markdown import Record

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results" / "cpu" / f"{NAME}.json"


def test_the_recorded_predictions_are_those_of_this_code() -> None:
    recorded = json.loads(RESULTS.read_text())["mixes"]
    assert recorded == [asdict(row) for row in predict()], (
        "run python -m ulysses_ops.tools.length_mixes"
    )


def test_the_table_has_a_line_for_each_mix() -> None:
    content = json.loads(RESULTS.read_text())
    table = mixes_table(Record("cpu", NAME, content))
    assert table.count("\n") == 2 + len(MIXES) * len(WORLD_SIZES)
    first, *others = content["mixes"]
    changed = {**content, "mixes": [{**first, "plain_us": 1.0}, *others]}
    assert mixes_table(Record("cpu", NAME, changed)) != table
    assert mixes_table(Record("cpu", "other", {})) == ""


def test_the_tool_writes_what_it_predicts(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(write_predictions)
    done = CliRunner().invoke(app, ["--results", str(tmp_path)])
    assert done.exit_code == 0, done.output
    written = json.loads((tmp_path / "cpu" / f"{NAME}.json").read_text())
    assert written["mixes"] == json.loads(RESULTS.read_text())["mixes"]
    assert [path.name for path in tmp_path.iterdir()] == ["cpu"]


def test_a_plan_is_never_slower_than_whole_requests() -> None:
    rows = predict()
    assert len(rows) == len(MIXES) * len(WORLD_SIZES)
    for row in rows:
        assert row.planned_us <= row.longest_first_us <= row.plain_us * 4 / 3
    assert max(row.plain_us / row.planned_us for row in rows) > 2
