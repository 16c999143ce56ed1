"""Measured constants of a machine, which the planner of schedules computes with.

The package holds one file of them, ``constants.json``; ``tools/measure_constants.py`` writes it.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from dataclasses import asdict, dataclass, fields
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

FILE = "constants.json"

# (size in GFLOP after tile quantisation, TFLOP/s reached), sizes rising
RateTable = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Constants:
    """What one GPU and its links do. Times in microseconds, rates in 1e9 bytes/s or TFLOP/s.

    Attributes:
        device: GPU that they are of.
        source: How they were obtained.
        num_sms: Streaming multiprocessors.
        gemm_tile: Rows and columns of the output that an SM works on at a time.
        attention_tile_rows: Query rows of one head that an SM works on at a time.
        gemm_rates: Rate by size, both counting the idle part of the last wave of tiles as work.
        attention_rates: The same for attention.
        elementwise_gbs: Rate of norm and RoPE, bytes read and bytes written.
        own_copy_gbs: Rate of a copy inside the GPU, bytes copied.
        peer_copy_gbs: Rate of a long copy to a peer.
        copy_launch_us: What a copy costs besides its bytes.
        handshake_us: One half of a round: signals, waits, resets.
    """

    device: str
    source: str
    num_sms: int
    gemm_tile: tuple[int, int]
    attention_tile_rows: int
    gemm_rates: RateTable
    attention_rates: RateTable
    elementwise_gbs: float
    own_copy_gbs: float
    peer_copy_gbs: float
    copy_launch_us: float
    handshake_us: float

    def __post_init__(self) -> None:
        """Refuse what cannot be computed with.

        Raises:
            ValueError: a table is empty or not rising, or a number is not positive.
        """
        for name in ("gemm_rates", "attention_rates"):
            table: RateTable = getattr(self, name)
            sizes = [size for size, _ in table]
            if not table or sizes != sorted(set(sizes)) or min(min(row) for row in table) <= 0:
                message = f"Constants: {name} must be rows (size, rate) above 0, sizes rising"
                raise ValueError(message)
        positive = (
            *("num_sms", "attention_tile_rows", "elementwise_gbs", "own_copy_gbs"),
            "peer_copy_gbs",
        )
        for name in positive:
            if not getattr(self, name) > 0:
                message = f"Constants: {name}={getattr(self, name)} must be above 0"
                raise ValueError(message)
        if min(self.gemm_tile) <= 0 or min(self.copy_launch_us, self.handshake_us) < 0:
            message = (
                f"Constants: gemm_tile={self.gemm_tile}, copy_launch_us={self.copy_launch_us}, "
                f"handshake_us={self.handshake_us}: tiles must be above 0, times not below it"
            )
            raise ValueError(message)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Constants:
        """The constants of :meth:`to_json`.

        Raises:
            ValueError: a field is missing or unknown, or a value cannot be computed with.
        """
        names = {field.name for field in fields(cls)}
        if set(record) != names:
            differing = sorted(set(record) ^ names)
            message = f"Constants: fields {differing} are missing or unknown; measure them again"
            raise ValueError(message)
        tables = {
            name: tuple((float(size), float(rate)) for size, rate in record[name])
            for name in ("gemm_rates", "attention_rates")
        }
        rows, columns = record["gemm_tile"]
        return cls(**{**record, **tables, "gemm_tile": (int(rows), int(columns))})


def rate_at(table: RateTable, size: float) -> float:
    """Rate between two rows of the table, linearly; beyond its ends that of the end."""
    index = bisect_left(table, (size, 0.0))
    if index == 0:
        return table[0][1]
    if index == len(table):
        return table[-1][1]
    (low, low_rate), (high, high_rate) = table[index - 1], table[index]
    return low_rate + (high_rate - low_rate) * (size - low) / (high - low)


def read_constants(path: Path) -> Constants:
    """Constants that a file holds.

    Raises:
        OSError: it cannot be read.
        ValueError: it holds something else.
    """
    return Constants.from_json(json.loads(path.read_text(encoding="utf-8")))


@cache
def shipped_constants() -> Constants:
    """The constants that come with the package; their ``source`` says what they are of."""
    text = resources.files(__package__).joinpath(FILE).read_text(encoding="utf-8")
    return Constants.from_json(json.loads(text))
