"""A machine and a row, as a benchmark would record them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ulysses_ops.tools.results import Machine, Row
from ulysses_ops.tools.shapes import PRODUCTION
from ulysses_ops.tools.timing import Summary

MACHINE = Machine("node", "NVIDIA H200", 2, "580.1", "2.11.0", "13.0", "2.28.9", "3.12.3")


def a_row(**changes: Any) -> Row:
    row = Row.of_times(
        "scatter",
        PRODUCTION[0],
        world_size=2,
        transport="ce",
        mode="graph",
        times=Summary(100.0, 120.0, (99.0, 101.0), 40),
        exact=True,
        bytes_per_peer=1_000_000,
        percent_of_flat=95.0,
        nccl_us=230.0,
        x_nccl_eager=2.4,
        x_nccl_graph=2.3,
        details={"variant": "ours"},
    )
    return replace(row, **changes)
