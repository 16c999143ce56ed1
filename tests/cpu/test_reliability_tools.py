"""Tools that record what ranks do when one dies, and what sanitizers find: on the CPU, and read."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from recorded import MACHINE
from typer.testing import CliRunner

from ulysses_ops.tools import (
    fault_matrix,
    length_mixes,
    norm_rope_benchmark,
    peer_death,
    plots,
    replay_benchmark,
    sanitize,
    soak,
    weight_benchmark,
)
from ulysses_ops.tools.launch import Launch
from ulysses_ops.tools.markdown import read_records
from ulysses_ops.tools.out_folder import check_file, check_folder, refuse_file
from ulysses_ops.tools.peer_death import Death, Place, all_in_time, die_once
from ulysses_ops.tools.readme_tables import regenerate
from ulysses_ops.tools.results import write_results

LAUNCH = Launch(2, "cpu")
# Stands in for compute-sanitizer: writes a log as it does, and runs the tests.
STAND_IN = """#!{python}
import subprocess, sys
arguments = sys.argv[1:]
log = arguments[arguments.index("--log-file") + 1]
rest = arguments[arguments.index("--log-file") + 2:]
done = subprocess.run(rest)
with open(log, "w") as file:
    file.write("========= COMPUTE-SANITIZER\\n========= ERROR SUMMARY: {errors} error{s}\\n")
sys.exit(done.returncode or (9 if {errors} else 0))
"""


# ---- deaths --------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["eager", "meeting"])
def test_a_death_is_told_in_time(place: Place) -> None:
    death = die_once(LAUNCH, place, 1.0)
    assert death.is_in_time, death
    assert ("gave up" if place == "eager" else "for ranks [1], which did not come") in death.told[0]


def test_control_what_comes_late_or_not_at_all_is_seen() -> None:
    good = Death("eager", 1.0, [1.9], ["PeerTimeoutError: ..."])
    assert all_in_time([good])
    assert not all_in_time([good, replace(good, seconds=[2.1])])
    assert not all_in_time([replace(good, seconds=[0.5], told=[""])])


def test_there_are_graphs_on_gpus_alone() -> None:
    assert peer_death.places_of(LAUNCH) == ["eager", "meeting"]
    assert peer_death.places_of(Launch(2, "cuda", 2)) == ["eager", "graph", "meeting"]


# ---- sanitizers ----------------------------------------------------------------------------------


def sanitized(
    folder: Path, monkeypatch: pytest.MonkeyPatch, errors: int, test: str, *options: str
) -> tuple[int, dict[str, Any]]:
    """What a run of one test comes to."""
    stand_in = folder / "compute-sanitizer"
    stand_in.write_text(
        STAND_IN.format(python=sys.executable, errors=errors, s="" if errors == 1 else "s")
    )
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    (folder / "test_it.py").write_text(test)
    app = typer.Typer()
    app.command()(sanitize.main)
    arguments = ["memcheck", "--out", str(folder), "--commit", "abc", *options]
    done = CliRunner().invoke(app, [*arguments, "--", str(folder / "test_it.py")])
    return done.exit_code, json.loads((folder / "cpu" / "sanitizer_memcheck.json").read_text())


def test_a_clean_run_is_kept_with_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status, content = sanitized(tmp_path, monkeypatch, 0, "def test_it(): pass")
    assert status == 0, content
    assert (content["errors"], content["passed"], content["failed"]) == (0, 1, 0)
    assert "ERROR SUMMARY: 0 errors" in (tmp_path / "cpu" / "sanitizer_memcheck.txt").read_text()
    assert content["log"][-1] == "========= ERROR SUMMARY: 0 errors"


@pytest.mark.parametrize(
    ("errors", "test"),
    [(1, "def test_it(): pass"), (0, "def test_it(): assert False"), (0, "")],
    ids=["an error", "a test that fails", "no test"],
)
def test_control_what_is_wrong_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, errors: int, test: str
) -> None:
    status, content = sanitized(tmp_path, monkeypatch, errors, test)
    assert status == 1
    assert content["errors"] == errors


def test_a_run_past_its_limit_is_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = "import time\ndef test_it(): time.sleep(60)"
    status, content = sanitized(tmp_path, monkeypatch, 0, slow, "--limit", "2")
    assert status == 1
    assert content["exit"] is content["errors"] is None


def test_where_no_sanitizer_is_one_sentence_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sanitize, "PLACES", ())
    app = typer.Typer()
    app.command()(sanitize.main)
    done = CliRunner().invoke(app, ["memcheck", "--out", str(tmp_path), "--", "tests/gpu"])
    assert done.exit_code == 1
    assert done.output.startswith("error: compute-sanitizer is neither in PATH nor in")
    assert len(done.output.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_every_process_counts() -> None:
    log = "ERROR SUMMARY: 0 errors\nERROR SUMMARY: 3 errors\nRACECHECK SUMMARY: 2 hazards displayed"
    assert sanitize.errors_of(log) == 5
    assert sanitize.errors_of("cut off") is None


FAILED_CALL = """\
========= Program hit CUDA_ERROR_NOT_PERMITTED (error 800) due to "operation not permitted" on \
CUDA API call to cuMemCreate.
=========     Saved host backtrace up to driver entry point at error
=========         Host Frame: {frame} [0x536ad] in {library}
=========         Host Frame: main [0x1] in python3
=========
"""


def test_calls_that_failed_are_told_apart_from_errors() -> None:
    theirs = FAILED_CALL.format(frame="c10::cuda::isFabricSupported()", library="libc10_cuda.so")
    ours = FAILED_CALL.format(frame="ulysses_ops::Lanes::Lanes(long)", library="_C_cuda.so")
    found = sanitize.failed_calls_of(theirs + ours + theirs)
    assert found == {"cuMemCreate: CUDA_ERROR_NOT_PERMITTED, by c10::cuda::isFabricSupported()": 2}
    assert sanitize.failed_calls_of("========= Invalid __global__ write of size 4 bytes") == {}


# ---- tables --------------------------------------------------------------------------------------


def test_what_was_recorded_is_told(tmp_path: Path) -> None:
    deaths = [
        {"place": place, "limit_s": 2.0, "seconds": [seconds], "is_in_time": seconds <= 3.0}
        for place, seconds in (("eager", 2.01), ("eager", 2.03), ("graph", 3.5))
    ]
    write_results(tmp_path, "peer_death", MACHINE, "abc", {"transport": "ce", "deaths": deaths})
    piece = {"transport": "ce", "calls": 500_000, "eager": 9, "mismatches": 0}
    soak = {
        "pieces": [{**piece, "control_mismatches": 3}, {**piece, "control_mismatches": 1}],
        "cycles": [{"cycles": 200, "leaks": [[], []], "gpu_bytes_more": [0, 2_000_000]}],
    }
    write_results(tmp_path, "soak", MACHINE, "abc", soak)
    found = {"passed": 7, "failed": 0, "errors": 0, "seconds": 61.4}
    run = {"sanitizer": "memcheck", "selection": ["tests/gpu"], **found}
    write_results(tmp_path, "sanitizer_memcheck", MACHINE, "abc", run)
    marked = "".join(
        f"<!-- table:{name} -->\n<!-- /table -->\n" for name in ("deaths", "soak", "sanitizers")
    )
    text = regenerate(marked, read_records(tmp_path))
    for line in (
        "| ce, eager | 2.0 | 2 | 2.01 | 2.03 | yes |",
        "| ce, graph | 2.0 | 1 | 3.50 | 3.50 | **no** |",
        "| ce | 1,000,000 | 18 | 0 | yes | 200 | 2.0 | 0 |",
        "| memcheck | tests/gpu | 7 | 0 | 0 |  | 61 |",
    ):
        assert line in text


NOWHERE: dict[Callable[..., Any], list[str]] = {
    replay_benchmark.run_benchmark: ["--cpu", "--only", "exchange", "--out"],
    weight_benchmark.run_benchmark: ["--cpu", "--out"],
    norm_rope_benchmark.run_benchmark: ["--cpu", "--out"],
    fault_matrix.main: ["--cpu", "--only", "all", "--out"],
    soak.main: ["--cpu", "--out"],
    peer_death.main: ["--cpu", "--out"],
    sanitize.main: ["memcheck", "x", "--out"],
    length_mixes.write_predictions: ["--results"],
    plots.plot_results: ["docs/results/h200-x2", "--out"],
}


@pytest.mark.parametrize("command", NOWHERE, ids=lambda command: command.__module__.split(".")[-1])
def test_a_folder_that_is_none_is_refused_before_anything_starts(
    command: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*arguments: object, **options: object) -> None:
        message = "something was started"
        raise AssertionError(message)

    for place in (
        "one_launch.run_ranks",
        "benchmark_run.run_ranks",
        "fault_matrix.find_moments",
        "soak.run_ranks",
        "peer_death.die_once",
        "sanitize.run",
        "length_mixes.predict",
        "plots.draw_results",
    ):
        monkeypatch.setattr(f"ulysses_ops.tools.{place}", never)
    (tmp_path / "file").write_text("mine")
    app = typer.Typer()
    app.command()(command)
    for wrong in (tmp_path / "file", tmp_path / "file" / "below"):
        done = CliRunner().invoke(app, [*NOWHERE[command], str(wrong)])
        assert done.exit_code == 2, done.output
        said = "".join(done.output.replace("│", " ").split())
        assert f"{NOWHERE[command][-1]}:nothingcanbewritteninto" in said
        assert "isnofolder;nameanotherone" in said
    assert (tmp_path / "file").read_text() == "mine"


def test_where_a_command_may_write(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    check_folder(tmp_path / "new" / "below")
    check_folder(Path("new"))
    check_file(tmp_path / "file")
    check_file(tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    for wrong, said in (
        (tmp_path, "is a folder; name a file"),
        (tmp_path / "new" / "below", "its folder is not there; make it"),
        (tmp_path / "file" / "below", "its folder is not there; make it|is no folder"),
    ):
        with pytest.raises(ValueError, match=said):
            check_file(wrong)
        with pytest.raises(typer.BadParameter, match=said):
            refuse_file(wrong)
