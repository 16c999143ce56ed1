"""How fast is each pair? Copies as an exchange makes them, one way and both ways at once.

A delay on the device holds the copies back until all of them are enqueued, and both directions
start at one event, so that the host's pace is not measured. GB/s are 1e9 bytes of one direction.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations, permutations

import torch
from torch import Tensor

from ulysses_ops.asking import attempt
from ulysses_ops.tools.cuda_runtime import RowCopy
from ulysses_ops.tools.pair_check import Connect

MIB = 1 << 20
ROUNDS = 5
COPIES = 8
DELAY_CYCLES = 2_000_000  # about a millisecond: longer than enqueueing takes
SOURCE_PITCH = 3  # rows: as in the view of a fused projection of Q, K and V

Way = tuple[int, int]


@dataclass(frozen=True)
class Form:
    """``rows`` rows of ``row_bytes``, packed at the target; one row is a flat copy."""

    rows: int
    row_bytes: int

    @property
    def total_bytes(self) -> int:
        """Bytes that one copy moves."""
        return self.rows * self.row_bytes

    @property
    def title(self) -> str:
        """Name of a column."""
        if self.rows == 1:
            return f"{self.row_bytes // MIB} MiB"
        return f"rows {self.row_bytes} B"


FLAT = Form(1, 64 * MIB)
FORMS = (
    *(Form(1, size * MIB) for size in (1, 8)),
    FLAT,
    Form(1, 256 * MIB),
    *(Form(64 * MIB // row_bytes, row_bytes) for row_bytes in (256, 512, 1024, 5120, 10240)),
)


@dataclass(frozen=True)
class PairRate:
    """Measured rate of one direction of a pair.

    Attributes:
        source: CUDA number of the GPU that sends.
        target: CUDA number of the GPU that owns the memory.
        rows: Rows of a copy.
        row_bytes: Bytes of a row.
        both_ways: Whether the other direction ran at the same time.
        gbs: Median over rounds, in 1e9 bytes a second.
        lowest_gbs: Slowest round.
        highest_gbs: Fastest round.
    """

    source: int
    target: int
    rows: int
    row_bytes: int
    both_ways: bool
    gbs: float
    lowest_gbs: float
    highest_gbs: float


@dataclass(frozen=True)
class Unmeasured:
    """A directed pair, by CUDA number, that has no rate of some form, and why."""

    source: int
    target: int
    what: str

    def __str__(self) -> str:
        """Say it in one sentence."""
        return f"not measured {self.source}->{self.target}: {self.what}"


TimeCopies = Callable[[Sequence[Way], Form, int], list[float]]  # seconds of all copies, by way


def runs_of(count: int, forms: Sequence[Form] = FORMS) -> Iterator[tuple[Form, tuple[Way, ...]]]:
    """Every run: for each pair each form, one way, the other way and both ways."""
    for a, b in combinations(range(count), 2):
        for form in forms:
            for ways in (((a, b),), ((b, a),), ((a, b), (b, a))):
                yield form, ways


def measure_run(form: Form, ways: Sequence[Way], time_copies: TimeCopies) -> list[PairRate]:
    """Measure one run: a warm-up, then rounds."""
    time_copies(ways, form, 1)
    rounds = [time_copies(ways, form, COPIES) for _ in range(ROUNDS)]
    found = []
    for way, seconds in zip(ways, zip(*rounds, strict=True), strict=True):
        rates = [COPIES * form.total_bytes / second / 1e9 for second in seconds]
        found.append(
            PairRate(
                *way,
                rows=form.rows,
                row_bytes=form.row_bytes,
                both_ways=len(ways) > 1,
                gbs=round(statistics.median(rates), 2),
                lowest_gbs=round(min(rates), 2),
                highest_gbs=round(max(rates), 2),
            )
        )
    return found


class PeerTimer:
    """Times copies between GPUs of this process, by events. The pairs have to be connected."""

    def __init__(self, devices: Sequence[torch.device], num_bytes: int) -> None:
        """Take memory for copies of ``num_bytes``."""
        self._copy = RowCopy()
        self._streams = [torch.cuda.Stream(device) for device in devices]
        room = SOURCE_PITCH * num_bytes
        self._sources = [torch.zeros(room, dtype=torch.uint8, device=d) for d in devices]
        self._targets = [torch.zeros(num_bytes, dtype=torch.uint8, device=d) for d in devices]
        for device in devices:
            torch.cuda.synchronize(device)

    def time_copies(self, ways: Sequence[Way], form: Form, copies: int) -> list[float]:
        """Seconds that ``copies`` copies took on each way; the ways run at the same time."""
        streams = [self._streams[source] for source, _ in ways]
        blocks = [self._block(way, form) for way in ways]
        gate = torch.cuda.Event()
        with torch.cuda.stream(streams[0]):
            torch.cuda._sleep(DELAY_CYCLES)
            gate.record()
        marks = []
        for stream, (target, source) in zip(streams, blocks, strict=True):
            with torch.cuda.stream(stream):
                stream.wait_event(gate)
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                for _ in range(copies):
                    self._copy(target, source)
                end.record()
            marks.append((start, end))
        for stream in streams:
            stream.synchronize()
        return [start.elapsed_time(end) * 1e-3 for start, end in marks]

    def _block(self, way: Way, form: Form) -> tuple[Tensor, Tensor]:
        source, target = self._sources[way[0]], self._targets[way[1]]
        pitch = form.row_bytes * (SOURCE_PITCH if form.rows > 1 else 1)
        strided = source.narrow(0, 0, form.rows * pitch).view(form.rows, pitch)
        packed = target.narrow(0, 0, form.total_bytes).view(form.rows, form.row_bytes)
        return packed, strided[:, : form.row_bytes]


def measure_pairs(
    devices: Sequence[torch.device],
    connect: Connect,
    time_copies: TimeCopies,
    *,
    forms: Sequence[Form] = FORMS,
    advance: Callable[[str], None] = lambda text: None,
) -> tuple[list[PairRate], list[Unmeasured]]:
    """Measure every pair of ``devices`` that can be connected, and say which could not be.

    Args:
        devices: GPUs of this process, in the order of their numbers.
        connect: Makes the memory of its second argument reachable for the first.
        time_copies: Copies and times.
        forms: What is copied.
        advance: Is told of each run that is done, or passed over.
    """
    found: list[PairRate] = []
    missing: dict[Way, str] = {}
    for way in permutations(range(len(devices)), 2):
        _, why = attempt(partial(connect, devices[way[0]], devices[way[1]]))
        if why:
            missing[way] = f"no peer access: {why}"
    for form, ways in runs_of(len(devices), forms):
        if not any(way in missing for way in ways):
            rates, why = attempt(partial(measure_run, form, ways, time_copies))
            found += rates or []
            missing.update(dict.fromkeys(ways if why else (), f"{form.title}: {why}"))
        advance(f"{ways[0][0]} {'<->' if len(ways) > 1 else '->'} {ways[0][1]}, {form.title}")
    return found, [Unmeasured(*way, what) for way, what in sorted(missing.items())]
