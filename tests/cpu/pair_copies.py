"""Copies and connections between devices that are all the CPU, good ones and bad ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ulysses_ops.tools.pair_bandwidth import Form, Way

CPU = [torch.device("cpu")] * 3


def arrives(target: Tensor, source: Tensor) -> None:
    target.copy_(source)


def is_lost(target: Tensor, source: Tensor) -> None:
    """Peer access is advertised, the call succeeds, and nothing is written."""


def loses_a_row(target: Tensor, source: Tensor) -> None:
    target[:-1].copy_(source[:-1])


def ignores_the_pitch(target: Tensor, source: Tensor) -> None:
    rows, width = source.shape
    whole = target.as_strided((rows * width,), (1,), target.storage_offset())
    whole.copy_(source.reshape(-1))


def no_connection(source: torch.device, target: torch.device) -> None:
    """Nothing is needed between CPU tensors."""


def fixed_rate(gbs: float) -> Callable[[Sequence[Way], Form, int], list[float]]:
    """Copies at ``gbs``; half of it when both ways run."""

    def time_copies(ways: Sequence[Way], form: Form, copies: int) -> list[float]:
        return [copies * form.total_bytes * len(ways) / gbs / 1e9 for _ in ways]

    return time_copies
