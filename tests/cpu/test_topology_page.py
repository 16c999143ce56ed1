"""The page on terminals of any width, and the picture."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest
from machine_library import MACHINES
from rich.console import Console

from ulysses_ops.tools.page import Side, print_matrix, print_rows
from ulysses_ops.tools.pair_bandwidth import FLAT, Form, PairRate, Unmeasured
from ulysses_ops.tools.topology_table import print_rates, print_topology, print_unmeasured
from ulysses_ops.tools.topology_verdict import judge

WIDTHS = [24, 40, 60, 80, 110, 200]


def shown(print_it: Callable[[Console], None], width: int) -> list[str]:
    file = io.StringIO()
    print_it(Console(file=file, width=width, color_system=None, force_terminal=False))
    return [line.rstrip() for line in file.getvalue().splitlines()]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["v100-x16-two-baseboards", "h100-x8", "h100-x2-prohibited"])
def test_a_narrow_page_says_the_same(name: str, width: int) -> None:
    topology = MACHINES[name]()

    def page(console: Console) -> None:
        print_topology(console, topology, judge(topology))

    lines = shown(page, width)
    assert all(len(line) <= width for line in lines)
    text = "\n".join(lines)
    for gpu in topology.gpus:
        assert gpu.pci_bus_id is not None
        assert text.count(gpu.pci_bus_id[4:]) == 1  # in one piece
        assert str(gpu.cuda_ordinal) in text
    count = len(topology.gpus)
    cells = [word for line in matrix_lines(lines) for word in line.split()]
    joined = sum(word.startswith("NV") for word in cells)
    apart = cells.count("no")
    assert joined + apart == count * (count - 1)
    assert cells.count("-") == count


def matrix_lines(lines: list[str]) -> list[str]:
    """The rows of the pair matrix, without heads."""
    first = next(i for i, line in enumerate(lines) if line.startswith("from"))
    last = next(i for i, line in enumerate(lines) if line.startswith("row: "))
    rows = [line for line in lines[first:last] if not line.startswith("from")]
    return [line.strip().split(" ", 1)[1] for line in rows]


def test_a_table_is_a_table_where_it_fits() -> None:
    columns: list[tuple[str, Side]] = [("CUDA", "right"), ("GPU", "left"), ("state", "left")]
    rows = [["0", "H200", "ok"], ["1", "H200", "no persistence, fabric not started"]]
    assert shown(lambda c: print_rows(c, columns, rows), 80)[0].split() == ["CUDA", "GPU", "state"]
    wrapped = shown(lambda c: print_rows(c, columns, rows), 34)
    assert wrapped[0].split() == ["CUDA", "GPU", "state"]
    assert len(wrapped) == 4  # the last column wraps first
    narrow = shown(lambda c: print_rows(c, columns, rows), 20)
    assert narrow[0] == "CUDA 0 GPU H200,"
    assert all(len(line) <= 20 for line in narrow)


def test_a_matrix_is_cut_between_columns() -> None:
    labels = [str(i) for i in range(5)]
    cells = [[f"{a}:{b}" for b in range(5)] for a in range(5)]
    whole = shown(lambda c: print_matrix(c, "from", labels, cells), 60)
    assert len(whole) == 6
    cut = shown(lambda c: print_matrix(c, "from", labels, cells), 14)
    words = [word for line in cut for word in line.split() if ":" in word]
    assert sorted(words) == sorted(cell for row in cells for cell in row)


def rates(count: int, *, both: bool = True) -> list[PairRate]:
    return [
        PairRate(a, b, form.rows, form.row_bytes, both_ways, 380.0 + a, 370.0, 390.0)
        for form in (FLAT, Form(1024, 256))
        for a in range(count)
        for b in range(count)
        for both_ways in ((False, True) if both else (False,))
        if a != b
    ]


@pytest.mark.parametrize("width", [30, 80, 200])
def test_rates_at_any_width(width: int) -> None:
    lines = shown(lambda c: print_rates(c, rates(8)), width)
    assert all(len(line) <= width for line in lines)
    assert sum(line.count("38") for line in lines) >= 2 * 56


def test_rates_of_some_pairs_alone() -> None:
    some = [rate for rate in rates(3, both=False) if rate.source == 0]
    text = "\n".join(shown(lambda c: print_rates(c, some), 110))
    assert "380.0" in text
    assert text.rstrip().endswith("-       -") or text.rstrip().endswith("-")
    assert shown(lambda c: print_rates(c, []), 110) == []


def test_pairs_without_a_rate_are_said_by_cause() -> None:
    missing = [
        Unmeasured(0, 2, "no peer access: cuda:0 -> cuda:2: cudaDeviceEnablePeerAccess gave 217"),
        Unmeasured(1, 2, "no peer access: cuda:1 -> cuda:2: cudaDeviceEnablePeerAccess gave 217"),
    ]
    assert shown(lambda c: print_unmeasured(c, missing), 110) == [
        "not measured 0->2 1->2: no peer access: cudaDeviceEnablePeerAccess gave 217"
    ]
