"""The tool that measures what the planner computes with, without GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from ulysses_ops.constants import read_constants, shipped_constants
from ulysses_ops.part_norm_rope import NormRope
from ulysses_ops.planner import plan_schedule
from ulysses_ops.schedule import Problem
from ulysses_ops.tools.measure_constants import measure_constants, rising

rates = st.lists(st.tuples(st.floats(1, 1e4), st.floats(1, 1e3)), min_size=1, max_size=12)


@given(rates)
def test_rates_never_fall_with_size_and_keep_their_mean(rows: list[tuple[float, float]]) -> None:
    table = rising(rows)
    values = [rate for _, rate in table]
    assert values == sorted(values)
    assert [size for size, _ in table] == sorted({float(f"{size:.4g}") for size, _ in rows})
    low, high = min(rate for _, rate in rows), max(rate for _, rate in rows)
    assert low * 0.999 <= values[0] <= values[-1] <= high * 1.001


def test_falling_rates_are_joined_and_rising_ones_kept() -> None:
    assert rising([(1.0, 10.0), (2.0, 20.0)]) == ((1.0, 10.0), (2.0, 20.0))
    assert rising([(3.0, 20.0), (2.0, 30.0), (1.0, 10.0)]) == (
        (1.0, 10.0),
        (2.0, 25.0),
        (3.0, 25.0),
    )
    assert rising([(1.0, 10.0), (1.0, 30.0)]) == ((1.0, 20.0),)


@pytest.mark.slow
def test_a_functional_run_writes_constants_that_plan(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(measure_constants)
    path = tmp_path / "constants.json"
    ran = CliRunner().invoke(app, ["--cpu", "--out", str(path), "--commit", "abc"])
    assert ran.exit_code == 0, ran.output
    constants = read_constants(path)
    assert (constants.device, constants.num_sms) == ("cpu", 1)
    assert "commit abc" in constants.source
    problem = Problem(1, 64, 4, 4, 32, 128, 128, 2, 2, NormRope())
    assert plan_schedule(problem, constants) != plan_schedule(problem, shipped_constants())
