"""Statistics, rows, files of results, and what is made from them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import typer
from recorded import MACHINE, a_row
from typer.testing import CliRunner

from ulysses_ops.tools import readme_tables
from ulysses_ops.tools.markdown import read_records
from ulysses_ops.tools.results import (
    Row,
    gpu_slug,
    read_results,
    rows_from_json,
    rows_to_json,
    write_results,
)
from ulysses_ops.tools.shapes import BLOCKS, PRODUCTION, Shape, select_shapes
from ulysses_ops.tools.tables import exactness, row_cells
from ulysses_ops.tools.timing import Summary, paired_ratio, percentile, summarise

ROOT = Path(__file__).resolve().parents[2]


# ---- statistics ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [
        ([3.0], 99, 3.0),
        ([2.0, 1.0], 50, 1.0),
        (list(range(1, 101)), 99, 99),
        (list(range(1, 101)), 100, 100),
        (list(range(1, 12)), 99, 11),
    ],
)
def test_percentile_is_the_nearest_rank(
    values: list[float], percent: float, expected: float
) -> None:
    assert percentile(values, percent) == expected


@pytest.mark.parametrize(("values", "percent"), [([], 50), ([1.0], 0), ([1.0], 101)])
def test_percentile_refuses_what_has_none(values: list[float], percent: float) -> None:
    with pytest.raises(ValueError, match="percentile"):
        percentile(values, percent)


def test_the_slowest_rank_counts() -> None:
    summary = summarise([[[1.0, 2.0, 3.0], [5.0, 5.0, 9.0]], [[4.0, 4.0, 4.0], [1.0, 1.0, 1.0]]])
    assert summary == Summary(4.0, 9.0, (4.0, 5.0), 6)
    assert summary.spread_us == (4.0, 5.0)


@pytest.mark.parametrize("by_rank", [[], [[]], [[[1.0]], [[1.0], [2.0]]]])
def test_summary_refuses_ranks_that_measured_differently(by_rank: list[Any]) -> None:
    with pytest.raises(ValueError, match="the ranks measured"):
        summarise(by_rank)


def test_a_drift_between_rounds_cancels_in_the_paired_ratio() -> None:
    slow = Summary(30.0, 0.0, (10.0, 30.0, 80.0), 3)
    fast = Summary(10.0, 0.0, (5.0, 15.0, 40.0), 3)
    assert paired_ratio(slow, fast) == 2.0
    assert slow.median_us / fast.median_us != 2.0  # what an unpaired comparison would have said
    with pytest.raises(ValueError, match="zip"):
        paired_ratio(slow, Summary(1.0, 1.0, (1.0,), 1))


# ---- shapes, rows, files -------------------------------------------------------------------------


def test_shapes_are_selected_by_name() -> None:
    assert select_shapes("all") == PRODUCTION
    assert [shape.seq for shape in select_shapes("flux, minimax-h3")] == [4608, 37888]
    assert [shape.seq for shape in select_shapes("flux, wan-720p", BLOCKS)] == [4608, 75600]
    assert [shape.key for shape in select_shapes("flux, wan-720p")] == ["flux"]
    with pytest.raises(ValueError, match=r"\['hunyuan'\] are unknown"):
        select_shapes("flux,hunyuan")


@pytest.mark.parametrize("shape", BLOCKS, ids=lambda shape: shape.key)
def test_bytes_to_a_peer_are_its_share_of_the_rows_sent(shape: Shape) -> None:
    sent = torch.empty(shape.local_source(2), dtype=torch.bfloat16, device="meta")
    received = torch.empty(shape.local_window(2), dtype=torch.bfloat16, device="meta")
    assert 2 * shape.bytes_per_peer(2, 2) == sent.nbytes == received.nbytes


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm4-80gb"),
        ("Tesla T4", "t4"),
        ("", "gpu"),
    ],
)
def test_gpu_names_become_path_names(name: str, slug: str) -> None:
    assert gpu_slug(name) == slug


def test_rows_survive_json() -> None:
    rows = [a_row(), a_row(exact=None, median_us=None, p99_us=None, spread_us=None, details=None)]
    entries = json.loads(json.dumps(rows_to_json(rows)))
    assert rows_from_json(entries) == rows
    assert all({"median_us", "p99_us", "exact"} <= set(entry) for entry in entries)
    assert "tax_percent" not in entries[0]


@pytest.mark.parametrize(
    ("entry", "complaint"),
    [({"op": "scatter", "speed": 1}, r"unknown fields \['speed'\]"), ({"op": "x"}, "incomplete")],
)
def test_rows_of_another_version_are_refused(entry: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        rows_from_json([entry])


def test_bandwidths_follow_from_bytes_and_median() -> None:
    row = a_row()
    assert row.busbw_gbs == pytest.approx(10.0)  # 1e6 bytes in 100 us
    assert row.algbw_gbs == pytest.approx(20.0)


def test_results_name_machine_commit_and_date(tmp_path: Path) -> None:
    path = write_results(tmp_path, "x", MACHINE, "abc", {"rows": rows_to_json([a_row()])})
    assert path == tmp_path / "h200-x2" / "x.json"
    content = json.loads(path.read_text())
    header = {"host", "gpu", "driver", "torch", "cuda", "nccl", "commit", "date", "python"}
    assert header <= set(content)
    assert content["commit"] == "abc"
    row = content["rows"][0]
    assert row["shape"] == [1, 32760, 40, 128]
    assert (row["world_size"], row["transport"], row["mode"]) == (2, "ce", "graph")


@pytest.mark.parametrize(("exact", "word"), [(True, "ok"), (False, "WRONG"), (None, "-")])
def test_a_row_is_ok_only_if_it_was_found_exact(exact: bool | None, word: str) -> None:
    assert exactness(a_row(exact=exact)) == word
    assert row_cells(a_row(exact=exact))[-1] == word


# ---- tables of README.md -------------------------------------------------------------------------

MARKED = "".join(
    f"# {name}\n<!-- table:{name} -->\nold\n<!-- /table -->\n" for name in readme_tables.TABLES
)


def _attention_row(variant: str, median_us: float) -> Row:
    return a_row(
        op="attention_step",
        median_us=median_us,
        exact=None if variant == "compute" else True,
        tax_percent=median_us - 100,
        details={"variant": variant},
    )


def _written_results(folder: Path) -> Path:
    steps = [("ours", 103.0), ("baseline", 110.0), ("overlapped", 107.0), ("compute", 100.0)]
    rows = [a_row(), *(_attention_row(variant, time_us) for variant, time_us in steps)]
    handshakes = {"handshake_us": 5.5, "bare_handshake_us": 4.5}
    rows.append(a_row(op="handshake round", model="", details=handshakes))
    replayed = {"replays_done": 100_000, "mismatches": 0, "shared_gpus": True}
    rows.append(a_row(op="replayed exchange", details=replayed))
    write_results(folder, "all", MACHINE, "0123456789abcdef", {"rows": rows_to_json(rows)})
    tests = {
        "selection": "tests/gpu",
        "trees": {"csrc": "f" * 40},
        "passed": ["a", "b"],
        "failed": {},
        "skipped": {"c": "needs four GPUs"},
    }
    write_results(folder, "tests", MACHINE, "0123456789abcdef", tests)
    return folder


def _update(readme: Path, results: Path, *more: str) -> Any:
    app = typer.Typer()
    app.command()(readme_tables.update_tables)
    arguments = ["--readme", str(readme), "--results", str(results), *more]
    return CliRunner().invoke(app, arguments)


def test_tables_are_written_from_results_and_checked(tmp_path: Path) -> None:
    results = _written_results(tmp_path / "results")
    readme = tmp_path / "README.md"
    readme.write_text(MARKED)
    assert _update(readme, results, "--check").exit_code == 1
    assert readme.read_text() == MARKED
    assert _update(readme, results).exit_code == 0
    text = readme.read_text()
    for part in (
        "2x NVIDIA H200, driver 580.1, CUDA 13.0, NCCL 2.28.9, torch 2.11.0, commit 0123456789ab",
        "| scatter, Wan 480p, graph | 1.0 | 100.0 | 120.0 | 10 | 95 % | 2.40 | 2.30 | yes |",
        "| Wan 480p, S=32760, H=40 | 100 | 103 (+3.0 %) | 110 (+10.0 %) | 107 (+7.0 %) |",
        "| one handshake alone, in a graph | 4.5 |",
        "| one handshake within a round, in a graph | 5.5 |",
        "| 2 (sharing GPUs) | 100,000 | 0 |",
        "| tests/gpu | 2 | 0 | 1 | - | csrc ffffffffffff |",
    ):
        assert part in text
    assert "old" not in text
    assert _update(readme, results, "--check").exit_code == 0
    readme.write_text(text.replace("95 %", "99 %"))  # a number that was written by hand
    assert _update(readme, results, "--check").exit_code == 1


def test_tables_without_results_say_so(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(MARKED)
    _update(readme, tmp_path)
    assert readme.read_text().count(readme_tables.NOTHING) == len(readme_tables.TABLES)


def test_an_unknown_table_is_an_error() -> None:
    with pytest.raises(ValueError, match="table:speed is unknown"):
        readme_tables.regenerate("<!-- table:speed -->\n<!-- /table -->", [])


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("<!-- table:costs -->\n", "line 1: <!-- table:costs --> has no <!-- /table --> behind"),
        ("a\n<!-- /table -->\n", "line 2: <!-- /table --> has no table before it"),
        ("<!-- table:costs -->\nprose\n<!-- table:step -->\n<!-- /table -->", "line 3: .*stands b"),
        ("<!-- table:Costs -->\n<!-- /table -->", "table:Costs is unknown"),
        ("<!-- table: costs -->\n<!-- /table -->", "must read <!-- table:costs -->"),
        ("<!-- table:costs --> x\n<!-- /table -->", "on a line of its own"),
        ("<!-- table:costs -->\n<!--/table-->", "must read <!-- /table -->"),
    ],
)
def test_markers_that_are_not_as_they_must_be_change_nothing(
    text: str, complaint: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=complaint):
        readme_tables.regenerate(text, [])
    readme = tmp_path / "README.md"
    readme.write_text(text)
    assert _update(readme, tmp_path).exit_code == 2
    assert readme.read_text() == text


def test_a_folder_of_results_that_is_not_there_changes_nothing(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(MARKED)
    assert _update(readme, tmp_path / "nowhere").exit_code == 2
    assert _update(tmp_path / "nothing.md", tmp_path).exit_code == 2
    assert readme.read_text() == MARKED


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        "docs/graphs.md",
        "docs/llm.md",
        "docs/protocol.md",
        "docs/reliability.md",
        "docs/shapes.md",
    ],
)
def test_tables_of_the_docs_are_current(page: str) -> None:
    text = (ROOT / page).read_text()
    assert readme_tables.find_places(text), f"{page} has no marked table"
    records = read_records(ROOT / "docs" / "results")
    assert readme_tables.regenerate(text, records) == text, (
        f"run python -m ulysses_ops.tools.readme_tables --readme {page}"
    )


def test_what_cpu_ranks_show_of_faults_and_models_is_told(tmp_path: Path) -> None:
    cells = [
        {"fault": fault, "step": step, "outcome": outcome, "seconds": seconds}
        for fault, step, outcome, seconds in (
            ("killed", "reserve", "refused", 2.04),
            ("killed", "construction", "refused", 1.5),
            ("killed", "construction", "right", 2.5),
            ("late", "teardown", "right", 0.1),
        )
    ]
    matrix = {"world_size": 2, "transport": "gloo", "limit_s": 2.0, "cells": cells}
    models = [
        {"model": "m", "name": name, "world_size": 2, "states": states, "failure": None}
        for name, states in (("a", 1000), ("b", 500))
    ]
    broken = {"model": "m, broken", "name": "c", "world_size": 3, "failure": "deadlock"}
    on_cpu = replace(MACHINE, gpu="cpu", gpu_count=0)
    write_results(tmp_path, "fault_matrix", on_cpu, "abc", matrix)
    write_results(tmp_path, "models", on_cpu, "abc", {"models": [*models, broken]})
    text = readme_tables.regenerate(MARKED, read_records(tmp_path))
    for line in (
        "| gloo, limit 2 s, W=2 | construction | reserve | teardown |",
        "| killed | refused / right, 2.5 s (2) | refused, 2.0 s (1) |  |",
        "| late |  |  | right, 0.1 s (1) |",
        "| m | 2 | 2 | 1,500 | 1,000 | none |",
        "| m, broken | 3 | 1 |  |  | deadlock |",
    ):
        assert line in text


# ---- record of the suite -------------------------------------------------------------------------

SUITE = """
import pytest

def test_good(): assert True
def test_bad(): assert 1 == 2, "one is not two"
@pytest.mark.skip(reason="needs four GPUs")
def test_skipped(): assert False
@pytest.mark.xfail(reason="known", strict=True)
def test_expected(): assert False
@pytest.fixture
def broken(): raise RuntimeError("no device")
def test_error(broken): assert True
"""


def _run_suite(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_suite.py").write_text(SUITE)
    plugin = ["-p", "ulysses_ops.tools.record_tests", "-p", "no:cacheprovider"]
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *plugin, *arguments, "test_suite.py"],
        cwd=folder,
        env={
            **{name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"},
            "PYTHONPATH": str(ROOT),
            "CUDA_VISIBLE_DEVICES": "",
        },
        capture_output=True,
        text=True,
        timeout=100,
    )


def test_a_run_of_the_suite_is_recorded(tmp_path: Path) -> None:
    trees = ["--record-commit", "abc", "--record-trees", "csrc=1,ulysses_ops=2,graphs=3"]
    done = _run_suite(tmp_path, "--record-tests", "out", *trees)
    content = json.loads((tmp_path / "out" / "cpu" / "tests.json").read_text())
    assert done.returncode == 1  # the plugin hides no failure
    assert content["passed"] == ["test_suite.py::test_good"]
    assert "one is not two" in content["failed"]["test_suite.py::test_bad"]
    assert "no device" in content["failed"]["test_suite.py::test_error"]
    assert content["skipped"] == {
        "test_suite.py::test_skipped": "needs four GPUs",
        "test_suite.py::test_expected": "fails as expected: known",
    }
    assert content["not_run"] == []
    assert content["trees"] == {"csrc": "1", "ulysses_ops": "2", "graphs": "3"}
    assert content["commit"] == "abc"
    _run_suite(tmp_path, "--record-tests", "out", "--record-name", "tests_part", *trees)
    assert json.loads((tmp_path / "out" / "cpu" / "tests_part.json").read_text()) == content | {
        "date": mock.ANY
    }


def test_what_a_cut_session_did_not_reach_is_recorded(tmp_path: Path) -> None:
    trees = ["--record-commit", "abc", "--record-trees", "csrc=1,ulysses_ops=2,graphs=3"]
    _run_suite(tmp_path, "--record-tests", "out", "--exitfirst", *trees)
    content = read_results(tmp_path / "out" / "cpu" / "tests.json")  # as tables are made of it
    assert list(content["failed"]) == ["test_suite.py::test_bad"]
    names = ("skipped", "expected", "error")
    assert content["not_run"] == [f"test_suite.py::test_{name}" for name in names]


def test_a_record_needs_an_id_for_every_tree(tmp_path: Path) -> None:
    done = _run_suite(tmp_path, "--record-tests", "out", "--record-trees", "csrc=1")
    assert done.returncode == 4
    assert "must give an id for each of csrc, ulysses_ops, graphs" in done.stderr
    assert not (tmp_path / "out").exists()
