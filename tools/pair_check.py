"""Does what one GPU writes arrive where the other reads it?

A pair may be advertised as connected and still lose writes, where a PCIe bridge or an IOMMU stands
in the way. So one side writes, with the copy call of an exchange, and the owner of the memory
reads: each direction alone, then both at once; in one piece, and in rows with room between them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations

import torch
from torch import Tensor

from ulysses_ops.asking import attempt

RowCopyCall = Callable[[Tensor, Tensor], None]  # target, source: uint8, (rows, row bytes)
Connect = Callable[[torch.device, torch.device], None]

UNTOUCHED = 255  # in no pattern
PATTERN = 251  # prime: no power of two repeats it


@dataclass(frozen=True)
class Block:
    """Rows of bytes, ``pitch`` bytes apart."""

    rows: int
    row_bytes: int
    pitch: int

    def __str__(self) -> str:
        """Say its form in words."""
        if self.rows == 1:
            return f"one piece of {self.row_bytes} bytes"
        return f"{self.rows} rows of {self.row_bytes} bytes"


BLOCKS = (
    Block(1, 1 << 20, 1 << 20),
    Block(1024, 256, 768),
    Block(64, 5120, 15360),
)


@dataclass(frozen=True)
class PairFailure:
    """A directed pair, by CUDA number, whose data did not arrive, and what was seen."""

    source: int
    target: int
    what: str

    def __str__(self) -> str:
        """Say it in one sentence."""
        return f"failed data check {self.source}->{self.target}: {self.what}"


def check_pairs(
    devices: Sequence[torch.device],
    copy: RowCopyCall,
    connect: Connect,
    *,
    blocks: Sequence[Block] = BLOCKS,
    progress: Callable[[str], None] = lambda text: None,
) -> list[PairFailure]:
    """Check every pair of ``devices`` and return the first failure of each direction.

    Args:
        devices: GPUs of this process, in the order of their numbers.
        copy: Enqueues a copy on the source's device.
        connect: Makes the memory of its second argument reachable for the first.
        blocks: What is sent.
        progress: Is told what comes next.
    """
    failures: dict[tuple[int, int], str] = {}
    for a, b in combinations(range(len(devices)), 2):
        progress(f"data check {a} <-> {b}")
        for way in ((a, b), (b, a)):
            _, why = attempt(partial(connect, devices[way[0]], devices[way[1]]))
            if why:
                failures[way] = f"no peer access: {why}"
        for round_number, block in enumerate(blocks):
            for ways in (((a, b),), ((b, a),), ((a, b), (b, a))):
                able = [way for way in ways if way not in failures]
                for way, what in _send(devices, able, copy, block, round_number).items():
                    both = ", both ways at once" if len(able) > 1 else ""
                    failures.setdefault(way, f"{block}{both}: {what}")
    return [PairFailure(*way, what) for way, what in sorted(failures.items())]


def _send(
    devices: Sequence[torch.device],
    ways: Sequence[tuple[int, int]],
    copy: RowCopyCall,
    block: Block,
    round_number: int,
) -> dict[tuple[int, int], str]:
    """Send a block on each way at once and return what is wrong where."""
    sources, targets, wrong = {}, {}, {}
    for way in ways:
        source, target = (devices[number] for number in way)
        sources[way] = _padded(_pattern(source, block, way, round_number), block)
        targets[way] = torch.full((block.rows, block.pitch), UNTOUCHED, dtype=torch.uint8).to(
            target
        )
    _finish(devices, ways)
    for way in ways:
        width = block.row_bytes
        _, why = attempt(partial(copy, targets[way][:, :width], sources[way][:, :width]))
        if why:
            wrong[way] = f"the copy failed: {why}"
    _finish(devices, ways)
    for way in ways:
        if way not in wrong:
            expected = _padded(
                _pattern(devices[way[1]], block, way, round_number), block, UNTOUCHED
            )
            count = int((targets[way] != expected).sum())
            if count:
                wrong[way] = f"{count} of {expected.numel()} bytes are wrong"
    return wrong


def _pattern(device: torch.device, block: Block, way: tuple[int, int], round_number: int) -> Tensor:
    """Bytes that tell the way, the round and the place apart."""
    salt = 17 * way[0] + 41 * way[1] + 101 * round_number
    count = torch.arange(block.rows * block.row_bytes, device=device) + salt
    return (count % PATTERN).to(torch.uint8).view(block.rows, block.row_bytes)


def _padded(rows: Tensor, block: Block, between: int = 0) -> Tensor:
    return torch.nn.functional.pad(rows, (0, block.pitch - block.row_bytes), value=between)


def _finish(devices: Sequence[torch.device], ways: Sequence[tuple[int, int]]) -> None:
    for number in {number for way in ways for number in way}:
        if devices[number].type == "cuda":
            torch.cuda.synchronize(devices[number])
