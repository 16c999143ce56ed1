"""Results of several runs in one file: rows are replaced together, and carry their commits."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import typer
from recorded import MACHINE, a_row
from rich.console import Console

from ulysses_ops.tools import one_launch
from ulysses_ops.tools.kept_rows import commits_of, keep_rows
from ulysses_ops.tools.launch import Launch
from ulysses_ops.tools.markdown import Record, read_records
from ulysses_ops.tools.report import Outcome
from ulysses_ops.tools.results import Row, check_results, rows_to_json, write_results


def _block(model: str, variant: str, median_us: float) -> Row:
    return a_row(op="block", model=model, median_us=median_us, details={"variant": variant})


def _outcome(*rows: Row, finished: tuple[str, ...], **not_run: str) -> dict[str, Any]:
    told = {key.replace("__", ": ").replace("_", "/"): why for key, why in not_run.items()}
    return Outcome(MACHINE, list(rows), "ce", finished, told).content()


FIRST = _outcome(
    _block("FLUX", "ours", 10.0),
    _block("FLUX", "old", 11.0),
    _block("Wan", "ours", 20.0),
    finished=("block/flux", "block/wan"),
    block_h3="no time",
    block_wan__naive="failed",
    block__flashinfer="not installed",
)


def _read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def test_a_run_replaces_what_it_measured_and_nothing_else(tmp_path: Path) -> None:
    keep_rows(tmp_path, "block", MACHINE, "aaa", FIRST)
    second = _outcome(
        _block("FLUX", "ours", 9.0),
        _block("H3", "ours", 30.0),
        finished=("block/flux", "block/h3"),
        block__packed="failed",
    )
    path, why_anew = keep_rows(tmp_path, "block", MACHINE, "bbb", second)
    assert why_anew == ""
    content = _read(path)
    found = [(row["model"], row["median_us"], row["commit"]) for row in content["rows"]]
    assert found == [("FLUX", 9.0, "bbb"), ("Wan", 20.0, "aaa"), ("H3", 30.0, "bbb")]
    assert content["commit"] == "bbb"
    assert content["finished"] == {"block/flux": "bbb", "block/wan": "aaa", "block/h3": "bbb"}
    # What was said of this operation is said anew; what was said of Wan alone still holds.
    assert content["not_run"] == {"block/wan: naive": "failed", "block: packed": "failed"}


def test_parts_of_one_run_replace_each_other(tmp_path: Path) -> None:
    part = _outcome(_block("FLUX", "ours", 9.0), finished=("block/flux",))
    whole = _outcome(
        _block("FLUX", "ours", 8.0),
        _block("Wan", "ours", 7.0),
        finished=("block/flux", "block/wan"),
    )
    for content in (part, whole):
        path, _ = keep_rows(tmp_path, "block", MACHINE, "aaa", content)
    assert [row["median_us"] for row in _read(path)["rows"]] == [8.0, 7.0]


def test_a_section_that_has_rows_is_not_said_to_lack_them(tmp_path: Path) -> None:
    keep_rows(tmp_path, "block", MACHINE, "aaa", FIRST)
    later = _outcome(_block("H3", "ours", 1.0), finished=("block/h3",), block_wan="no time")
    path, _ = keep_rows(tmp_path, "block", MACHINE, "bbb", later)
    assert _read(path)["not_run"] == {"block/wan: naive": "failed"}


@pytest.mark.parametrize("change", [{"driver": "590.1"}, {"torch": "2.14.0"}])
def test_rows_of_other_versions_are_not_mixed_in(change: dict[str, Any], tmp_path: Path) -> None:
    keep_rows(tmp_path, "block", replace(MACHINE, **change), "aaa", FIRST)
    later = _outcome(_block("H3", "ours", 1.0), finished=("block/h3",))
    path, why_anew = keep_rows(tmp_path, "block", MACHINE, "bbb", later)
    ((name, value),) = change.items()
    assert f"{name} {value} there" in why_anew
    assert [row["model"] for row in _read(path)["rows"]] == ["H3"]


def test_a_file_of_one_run_gets_the_commit_of_its_header(tmp_path: Path) -> None:
    write_results(tmp_path, "block", MACHINE, "aaa", FIRST)  # rows without a commit of their own
    later = _outcome(_block("H3", "ours", 1.0), finished=("block/h3",))
    path, _ = keep_rows(tmp_path, "block", MACHINE, "bbb", later)
    content = _read(path)
    assert [row["commit"] for row in content["rows"]] == ["aaa", "aaa", "aaa", "bbb"]
    assert content["finished"]["block/wan"] == "aaa"
    assert commits_of(content) == ["aaa", "bbb"]
    assert "commits aaa, bbb" in Record("h200-x2", "block", content).caption()


# ---- files that are not as they must be ----------------------------------------------------------

GOOD = {**asdict(MACHINE), "commit": "aaa", "date": "2026-11-30T00:00:00+00:00"}
ROW = rows_to_json([_block("FLUX", "ours", 10.0)])[0]
BROKEN: dict[str, Any] = {
    "Expecting value": None,
    "holds no object": [],
    "'gpu' is missing": {"torch": "2.11.0"},
    "'date' is 3": {**GOOD, "date": 3},
    "'rows' is 3": {**GOOD, "rows": 3},
    "'rows' is missing": GOOD,
    "a row is 3, and must be": {**GOOD, "rows": [3]},
    "a row is incomplete": {**GOOD, "rows": [{"op": "block"}]},
    "unknown fields": {**GOOD, "rows": [{**ROW, "speed": 1}]},
    "world_size='2'": {**GOOD, "rows": [{**ROW, "world_size": "2"}]},
    r"shape=\[1, 2\]": {**GOOD, "rows": [{**ROW, "shape": [1, 2]}]},
    "median_us='fast'": {**GOOD, "rows": [{**ROW, "median_us": "fast"}]},
    "'finished' is 'all'": {**GOOD, "rows": [], "finished": "all"},
}


def _broken(folder: Path, complaint: str) -> Path:
    path = folder / MACHINE.folder / "block.json"
    path.parent.mkdir()
    found = BROKEN[complaint]
    path.write_text("" if found is None else json.dumps(found))
    return path


@pytest.mark.parametrize("complaint", BROKEN)
def test_a_file_that_is_none_of_results_is_named_and_kept(complaint: str, tmp_path: Path) -> None:
    path = _broken(tmp_path, complaint)
    before = path.read_text()
    with pytest.raises(ValueError, match=f"block.json is no file of results: .*{complaint}"):
        keep_rows(tmp_path, "block", MACHINE, "bbb", FIRST)
    with pytest.raises(ValueError, match=complaint):
        check_results(tmp_path, ["block"])
    assert path.read_text() == before
    check_results(tmp_path, ["other"])


def test_it_is_refused_before_ranks_start(tmp_path: Path) -> None:
    _broken(tmp_path, "holds no object")
    with mock.patch.object(one_launch, "run_ranks") as started, pytest.raises(typer.BadParameter):
        one_launch.run_and_report(
            Console(quiet=True), "block", print, None, Launch(2, "cpu"), out=tmp_path, commit=None
        )
    assert not started.called


def test_a_page_is_not_written_from_it(tmp_path: Path) -> None:
    _broken(tmp_path, "'gpu' is missing")
    with pytest.raises(ValueError, match=r"block\.json is no file of results"):
        read_records(tmp_path)
