"""Rows of all-gathers along the sequence: latents, keys and values that heads cannot divide.

Beside them stand flat copies of the same bytes and the backend's own all-gather, in one run.
"""

from __future__ import annotations

from dataclasses import replace

from ulysses_ops.communicator import UlyssesCommunicator
from ulysses_ops.tools.exchange_rows import rows_of
from ulysses_ops.tools.exchanged import all_gather_of
from ulysses_ops.tools.launch import RankContext
from ulysses_ops.tools.results import Row
from ulysses_ops.tools.shapes import Shape
from ulysses_ops.tools.timing import Effort

NEEDED_PERCENT = 90.0  # of the speed of flat copies
LARGE_BYTES = 64_000_000  # to a peer, from which on it is needed


def all_gather_rows(
    context: RankContext, comm: UlyssesCommunicator, shape: Shape, effort: Effort
) -> list[Row]:
    """Check and time an all-gather of one shape, and judge it where it is large. Collective."""
    prepared = all_gather_of(context, comm, shape)
    return [judged(row) for row in rows_of(context, comm, prepared, effort)]


def judged(row: Row) -> Row:
    """Ours in a graph, from ``LARGE_BYTES`` on, says whether it is as fast as it has to be."""
    details = row.details or {}
    is_ours = details.get("variant") == "ours" and row.mode == "graph"
    if not is_ours or row.percent_of_flat is None or row.bytes_per_peer < LARGE_BYTES:
        return row
    is_met = row.percent_of_flat >= NEEDED_PERCENT
    told = {"needed_percent_of_flat": NEEDED_PERCENT, "is_fast_enough": is_met}
    return replace(row, details={**details, **told})
