"""Tables of files that hold several runs, or not all that a run usually has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import typer
from recorded import a_row
from typer.testing import CliRunner

from ulysses_ops.tools import fault_matrix, readme_tables
from ulysses_ops.tools.block_table import block_table, projection_table
from ulysses_ops.tools.llm_tables import weights_table
from ulysses_ops.tools.markdown import Record
from ulysses_ops.tools.readme_tables import attention_table, render
from ulysses_ops.tools.results import Row, rows_to_json
from ulysses_ops.tools.step_table import step_table
from ulysses_ops.tools.weight_rows import OP, PREFETCHED, WHEN_NEEDED, WHOLE


def recorded(rows: Sequence[Row], **more: Any) -> Record:
    content = {"gpu": "NVIDIA H200", "commit": "a" * 40, "rows": rows_to_json(rows), **more}
    return Record("h200-x2", "file", content)


def cells(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]


def of_variants(op: str, variants: Sequence[str], **changes: Any) -> list[Row]:
    details = {"layers": 1, "published_layers": 1, "exposed_us": 1.0, "ratio_to_gemm": 1.0}
    return [a_row(op=op, details={**details, "variant": name}, **changes) for name in variants]


HEADER = {"gpu_count": 2, "torch": "2.11.0", "date": "2026-11-30T00:00:00+00:00"}
STEPS = ("ours", "baseline", "overlapped", "compute")
WAYS = (WHOLE, PREFETCHED, WHEN_NEEDED)


@pytest.mark.parametrize(
    ("make", "op", "variants"),
    [
        (attention_table, "attention_step", STEPS),
        (block_table, "block", ("compute", "ours")),
        (projection_table, "qkv", ("gemms", "ours")),
        (step_table, "step", ("compute", "ours")),
        (weights_table, OP, WAYS),
    ],
)
def test_numbers_of_ranks_in_one_file_have_lines_of_their_own(
    make: Callable[[Record], str], op: str, variants: Sequence[str]
) -> None:
    rows = [
        row
        for world_size, median_us in ((2, 2000.0), (4, 4000.0))
        for row in of_variants(op, variants, world_size=world_size, median_us=median_us)
    ]
    first, second = cells(make(recorded(rows)))
    assert ", W=2" in first[0]
    assert ", W=4" in second[0]
    assert first[1:] != second[1:]
    (alone,) = cells(make(recorded(rows[: len(variants)])))
    assert "W=" not in alone[0]


def test_a_tax_has_its_own_sign_and_every_comparison_counts() -> None:
    rows = of_variants("attention_step", STEPS)
    taxes = (-0.4, None, 3.0, None)
    rows = [
        a_row(**{**vars(row), "tax_percent": tax}) for row, tax in zip(rows, taxes, strict=True)
    ]
    (line,) = cells(attention_table(recorded(rows)))
    assert line[2:5] == ["100 (-0.4 %)", "100", "100 (+3.0 %)"]
    assert line[-1] == "yes"
    rows[2] = a_row(**{**vars(rows[2]), "exact": False})
    assert cells(attention_table(recorded(rows)))[0][-1] == "**no**"
    rows = [a_row(**{**vars(row), "exact": None}) for row in rows]
    assert cells(attention_table(recorded(rows)))[0][-1] == ""


def test_lines_of_several_commits_say_which() -> None:
    one = of_variants("qkv", ("gemms", "ours"), model="one")
    two = of_variants("qkv", ("gemms", "ours"), model="two", commit="b" * 40)
    table = projection_table(recorded([*one, *two]))
    assert table.splitlines()[0].endswith("| commit |")
    assert [line[-1] for line in cells(table)] == ["a" * 12, "b" * 12]
    assert "commit" not in projection_table(recorded(one))


def test_what_a_record_lacks_is_unknown() -> None:
    rows = of_variants(OP, WAYS, exact=None)
    (line,) = cells(weights_table(recorded(rows)))
    assert line[3] == "+1.0"
    assert line[-1] == ""
    rows = [a_row(**{**vars(row), "details": {"variant": row.details["variant"]}}) for row in rows]  # type: ignore[index]
    assert cells(weights_table(recorded(rows)))[0][3] == "unknown"
    (line,) = cells(readme_tables.tests_table(recorded([], trees=None, passed=["a"], skipped={})))
    assert line == ["all", "1", "unknown", "0", "-", "unknown"]


def test_what_a_session_left_out_is_told() -> None:
    half = {"selection": "tests/a.py tests/b.py", "trees": None, "passed": ["tests/a.py::x"]}
    (line,) = cells(readme_tables.tests_table(recorded([], **half)))
    assert line[4] == "all of b.py"
    (line,) = cells(readme_tables.tests_table(recorded([], **half, not_run=["tests/b.py::y"] * 3)))
    assert line[4] == "3"


def test_the_table_of_faults_says_what_its_record_does_not_hold() -> None:
    cells = [{"fault": "late", "step": "replay", "outcome": "right", "seconds": 1.0}]
    more = {"limit_s": 2.0, "world_size": 2, "transport": "ce", "cells": cells}
    whole = render("faults", [recorded([], **HEADER, **more)])
    assert whole.endswith("| late | right, 1.0 s (1) |\n")
    cut = recorded([], **HEADER, **more, cells_left_out=3, parallel=4, one_moment=True, only="late")
    assert render("faults", [cut]) == (
        f"{whole}\nOf this record: 3 cells left out for want of time; these faults alone: late; "
        "one moment of each step; cells side by side: GPU memory not judged.\n"
    )
    nothing = recorded([], **HEADER, **{**more, "cells": []}, cells_left_out=7)
    assert "7 cells left out" in render("faults", [nothing])


@pytest.mark.parametrize("cut", [["--one-moment"], ["--only", "late"], ["--time-limit", "9"]])
def test_a_run_of_some_cells_needs_a_folder_of_its_own(cut: list[str]) -> None:
    app = typer.Typer()
    app.command()(fault_matrix.main)
    with mock.patch.object(fault_matrix, "find_moments") as started:
        done = CliRunner().invoke(app, ["--cpu", *cut])
    assert done.exit_code == 2
    assert not started.called
    assert fault_matrix.chosen_folder(None, "all", False, float("inf")) == fault_matrix.RESULTS


def test_a_file_that_a_table_cannot_be_made_of_is_named() -> None:
    record = recorded([], cells=[{"fault": "killed"}])
    with pytest.raises(ValueError, match=r"h200-x2/file\.json has not what table:faults"):
        render("faults", [record])
