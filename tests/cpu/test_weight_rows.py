"""The benchmark of sharded weights on CPU ranks: every way gives the same bits."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import typer
from recorded import MACHINE, a_row
from typer.testing import CliRunner

from ulysses_ops.tools import readme_tables, weight_benchmark
from ulysses_ops.tools.launch import Launch, RankContext, run_ranks
from ulysses_ops.tools.markdown import read_records
from ulysses_ops.tools.one_launch import FUNCTIONAL_RUN
from ulysses_ops.tools.results import Row, rows_from_json, rows_to_json, write_results
from ulysses_ops.tools.shapes import FUNCTIONAL_BLOCKS, Shape
from ulysses_ops.tools.timing import Effort
from ulysses_ops.tools.weight_rows import (
    BASELINE,
    OP,
    PREFETCHED,
    WHEN_NEEDED,
    WHOLE,
    WeightJob,
    _Step,
    draw_weights,
    weight_rows,
)
from ulysses_ops.weight_shards import WeightShards

TINY = Shape("tiny", "tiny", 16, 4, 8)


def test_every_way_is_exact_and_tells_what_it_saves() -> None:
    job = WeightJob((TINY,), 5, Effort(1, 0.1))
    by_rank: Any = run_ranks(weight_rows, job, Launch(2, "cpu", 0, 100.0))
    machine, rows = by_rank[0]
    assert machine.gpu == "cpu"
    assert all(row.exact for row in rows)
    by_way = {row.op.rpartition("weights ")[2]: row for row in rows}
    assert set(by_way) == {WHOLE, PREFETCHED, WHEN_NEEDED, BASELINE}
    assert [by_way[way].transport for way in (WHOLE, PREFETCHED, BASELINE)] == [
        "none",
        "gloo",
        "gloo",
    ]
    whole_bytes = 32 * 32 * 4
    assert by_way[PREFETCHED].details["saved_bytes"] == 3 * whole_bytes - 5 * whole_bytes // 2
    assert by_way[PREFETCHED].bytes_per_peer == whole_bytes // 2
    assert by_way[WHOLE].bytes_per_peer == 0
    assert by_way[WHOLE].details["exposed_us"] == 0
    assert "whole_bytes" not in by_way[PREFETCHED].details  # a CPU cannot tell


def _weights_of_before(context: RankContext, job: WeightJob) -> dict[str, bool]:
    """What each layer was given at first is given ever after, whatever its weight is now."""
    first: dict[int, torch.Tensor] = {}
    right = WeightShards.whole

    def stale(weights: WeightShards, layer: int) -> torch.Tensor:
        return first.setdefault(layer, right(weights, layer).clone())

    with mock.patch.object(WeightShards, "whole", stale):
        _, rows = weight_rows(context, job)
    return {row.op.rpartition("weights ")[2]: bool(row.exact) for row in rows}


def test_weights_of_before_are_seen() -> None:
    job = WeightJob((TINY,), 3, Effort(1, 0.1))
    for exact in run_ranks(_weights_of_before, job, Launch(2, "cpu", 0, 100.0)):
        assert exact == {WHOLE: True, PREFETCHED: False, WHEN_NEEDED: False, BASELINE: True}


def test_another_weight_gives_another_result() -> None:
    context: Any = SimpleNamespace(device=torch.device("cpu"), world_size=1)
    step = _Step(context, TINY, draw_weights(context, TINY, 3))
    good = step.run(step.weights.__getitem__, lambda layer: None)
    assert torch.equal(good, step.run(step.weights.__getitem__, lambda layer: None))
    wrong = step.run(lambda layer: step.weights[2 - layer], lambda layer: None)
    assert not torch.equal(good, wrong)


def weight_row(way: str, median_us: float, **details: Any) -> Row:
    exposed = {"exposed_us": median_us - 100, "exposed_quartiles_us": [0.5, 3.0]}
    told = {"variant": way, "layers": 8, **exposed, **details}
    return a_row(op=f"{OP} {way}", median_us=median_us, details=told)


def test_the_table_shows_memory_and_time(tmp_path: Path) -> None:
    taken = {"saved_bytes": 1_000_000, "whole_bytes": 400_000_000, "sharded_bytes": 300_000_000}
    rows = [
        weight_row(WHOLE, 100.0),
        weight_row(PREFETCHED, 101.5, **taken),
        weight_row(WHEN_NEEDED, 250.0, **taken),
    ]
    write_results(tmp_path, "weight_prefetch", MACHINE, "abc", {"rows": rows_to_json(rows)})
    table = readme_tables.render("weights", read_records(tmp_path))
    (line,) = table.splitlines()[4:]
    assert line.startswith("| Wan 480p, S=32760, H=40 | 8 | 100 | +1.5 (0.5 to 3.0) | +150.0 (")
    assert line.endswith("| not run | 400 | 300 | 100 | yes |")
    rows[1] = weight_row(PREFETCHED, 101.5, saved_bytes=7_000_000)  # the device could not tell
    write_results(tmp_path, "weight_prefetch", MACHINE, "abc", {"rows": rows_to_json(rows)})
    assert "|  |  | 7 | yes |" in readme_tables.render("weights", read_records(tmp_path))


def test_the_command_writes_its_rows(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(weight_benchmark.run_benchmark)
    options = ["--cpu", "--out", str(tmp_path), "--commit", "abc", "--time-limit", "100"]
    done = CliRunner().invoke(app, options)
    assert done.exit_code == 0, done.output
    assert FUNCTIONAL_RUN in done.output
    content = json.loads((tmp_path / "cpu" / "weight_prefetch.json").read_text())
    assert content["commit"] == "abc"
    rows = rows_from_json(content["rows"])
    assert len(rows) == 4 * len(FUNCTIONAL_BLOCKS)
    assert all(row.exact for row in rows)


@pytest.mark.parametrize(
    "options",
    [["--shapes", "nothing"], ["--shapes", "wan-720p"], ["--world-size", "7"]],
    ids=["unknown", "of blocks alone", "too many ranks"],
)
def test_what_has_no_shape_is_refused(options: list[str]) -> None:
    app = typer.Typer()
    app.command()(weight_benchmark.run_benchmark)
    with mock.patch.object(weight_benchmark, "run_and_report") as started:
        done = CliRunner().invoke(app, ["--cpu", *options])
    assert done.exit_code == 2
    assert not started.called
    with pytest.raises(ValueError, match=r"5 ranks divide; choose from \['wan-480p', 'lingbot'\]"):
        weight_benchmark.fitting_shapes("flux", 5, on_gpu=True)


def test_layers_are_as_many_as_asked_for_on_the_cpu_too() -> None:
    app = typer.Typer()
    app.command()(weight_benchmark.run_benchmark)
    with mock.patch.object(weight_benchmark, "run_and_report") as started:
        for options, layers in (([], 3), (["--layers", "5", "--shapes", "flux"], 5)):
            assert CliRunner().invoke(app, ["--cpu", *options]).exit_code == 0
            assert started.call_args.args[3].layers == layers
