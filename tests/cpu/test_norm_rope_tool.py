"""The benchmark of the fused RMSNorm + RoPE, on one CPU rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from torch import Tensor
from typer.testing import CliRunner

from ulysses_ops.tools import norm_rope_benchmark, norm_rope_rows
from ulysses_ops.tools.norm_rope_benchmark import parse_shapes
from ulysses_ops.tools.norm_rope_rows import last_places
from ulysses_ops.tools.results import rows_from_json
from ulysses_ops.tools.timing import Summary

CPU = torch.device("cpu")


def test_writes_rows(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(norm_rope_benchmark.run_benchmark)
    done = CliRunner().invoke(app, ["--cpu", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    content = json.loads((tmp_path / "cpu" / "norm_rope.json").read_text())
    rows = rows_from_json(content["rows"])
    assert [(row.op, (row.details or {})["norm"]) for row in rows] == [
        ("qk_norm_rope", "per_head"),
        ("qk_norm_rope", "across_heads"),
    ]
    assert all((row.details or {})["percent_within_1"] > 99.9 for row in rows)


@pytest.mark.parametrize("norm", ["per_head", "across_heads"])
def test_what_inductor_makes_is_the_same(norm: Any) -> None:
    buffers = norm_rope_rows._Set.make(5, 2, 16, CPU)
    parameters = norm_rope_rows._Parameters.make(5, 2, 16, norm, CPU)
    expected = norm_rope_rows._plain_pair(buffers.q, buffers.k, parameters)
    torch._dynamo.reset()
    compiled = torch.compile(norm_rope_rows._plain_pair, fullgraph=True, dynamic=False)
    for got, value in zip(compiled(buffers.q, buffers.k, parameters), expected, strict=True):
        assert int(last_places(got, value).max()) <= 1


def test_the_check_sees_a_wrong_result(monkeypatch: pytest.MonkeyPatch) -> None:
    buffers = norm_rope_rows._Set.make(5, 2, 16, CPU)
    parameters = norm_rope_rows._Parameters.make(5, 2, 16, "per_head", CPU)
    assert norm_rope_rows._check(buffers, parameters)["percent_within_1"] == 100.0
    plain = norm_rope_rows._plain_pair

    def swapped(q: Tensor, k: Tensor, p: Any) -> tuple[Tensor, Tensor]:
        first, second = plain(q, k, p)
        return second, first

    monkeypatch.setattr(norm_rope_rows, "_plain_pair", swapped)
    assert norm_rope_rows._check(buffers, parameters)["percent_within_1"] < 50


def test_rates() -> None:
    times = {
        name: Summary(median_us=us, p99_us=us, round_us=(us, us), samples=2)
        for name, us in (("ours", 20.0), ("copy", 18.0), ("inductor", 50.0))
    }
    rates = norm_rope_rows._rates(times, 80_000_000)
    assert rates["gbs"] == 4000.0
    assert (rates["percent_of_copy"], rates["x_inductor"]) == (90.0, 2.5)


def test_last_places_count_values_between() -> None:
    one = torch.tensor([1.0, -1.0, 0.0, 1.0], dtype=torch.bfloat16)
    other = torch.tensor([1.0078125, -1.0078125, -0.0, -1.0], dtype=torch.float64)
    assert last_places(one, other)[:3].tolist() == [1, 1, 0]
    assert int(last_places(one, other)[3]) > 30000


def test_shapes() -> None:
    assert parse_shapes("2000x24, 7x1") == ((2000, 24), (7, 1))
    for text in ("", "2000", "2000x", "0x24", "2000x24,"):
        with pytest.raises(ValueError, match="is not of the form 2000x24"):
            parse_shapes(text)
