"""Recorded rates of pairs are those that the benchmark's own flat copies reach."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ulysses_ops.tools.pair_bandwidth import PairRate
from ulysses_ops.tools.results import Row, rows_from_json

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"
MACHINES = [path.parent for path in sorted(RESULTS.glob("*/topology.json"))]


def seconds_of(rates: Sequence[PairRate], num_bytes: int) -> float:
    """Time of one flat copy of the slowest direction, both at once, between the sizes measured.

    A copy costs a fixed time and one for each byte, so times are joined by straight lines.
    """
    slowest: dict[int, float] = {}
    for rate in rates:
        if rate.rows == 1 and rate.both_ways:
            took = rate.row_bytes / rate.gbs / 1e9
            slowest[rate.row_bytes] = max(took, slowest.get(rate.row_bytes, 0.0))
    sizes = sorted(slowest)
    low = max(size for size in sizes[:-1] if size <= max(num_bytes, sizes[0]))
    high = sizes[sizes.index(low) + 1]
    share = (num_bytes - low) / (high - low)
    return slowest[low] + share * (slowest[high] - slowest[low])


def differing(rates: Sequence[PairRate], rows: Sequence[Row]) -> list[str]:
    """Flat copies of the benchmark that are 5 % or more off what the pairs reach."""
    found = []
    for row in rows:
        if row.transport == "flat" and row.median_us is not None:
            expected = seconds_of(rates, row.bytes_per_peer) * 1e6
            if abs(row.median_us / expected - 1) >= 0.05:
                found.append(f"{row.bytes_per_peer}: {row.median_us} us, pairs {expected:.1f} us")
    return found


def read(path: Path) -> dict[str, Any]:
    content = json.loads(path.read_text())
    assert isinstance(content, dict)
    return content


@pytest.mark.parametrize("folder", MACHINES, ids=lambda folder: str(folder.name))
def test_pairs_are_as_fast_as_flat_copies_of_the_benchmark(folder: Path) -> None:
    rates = [PairRate(**rate) for rate in read(folder / "topology.json")["bandwidth"]]
    rows = rows_from_json(read(folder / "attention_step.json")["rows"])
    assert any(row.transport == "flat" for row in rows)
    assert differing(rates, rows) == []


def test_a_rate_that_is_off_is_seen() -> None:
    rates = [
        PairRate(a, 1 - a, 1, size << 20, both, 400.0, 400.0, 400.0)
        for a in (0, 1)
        for size in (1, 64)
        for both in (False, True)
    ]
    num_bytes = 32 << 20
    times: dict[str, Any] = {
        "op": "scatter", "shape": (1, 1, 1, 1), "dtype": "bfloat16", "world_size": 2,
        "transport": "flat", "mode": "graph", "p99_us": None, "exact": True,
        "bytes_per_peer": num_bytes,
    }  # fmt: skip
    at_rate = num_bytes / 400e3
    for factor, seen in ((1.0, 0), (1.04, 0), (1.06, 1), (0.9, 1)):
        assert len(differing(rates, [Row(**times, median_us=at_rate * factor)])) == seen
