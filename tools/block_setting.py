"""What a variant of the block is built from."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from torch import Tensor

from ulysses_ops.communicator import UlyssesCommunicator
from ulysses_ops.tools import zero_cta
from ulysses_ops.tools.block import Block
from ulysses_ops.tools.launch import RankContext

Outputs = Tensor | tuple[Tensor, ...]
Run = Callable[[Tensor], Outputs]


@dataclass(frozen=True)
class Setting:
    """What a variant is built from.

    Attributes:
        context: This rank.
        comm: Communicator of this shape.
        block: What is computed.
        zero_cta: Memory and group for NCCL on copy engines, where that works.
        closing: Closes what a variant opens, when the shape is done.
    """

    context: RankContext
    comm: UlyssesCommunicator
    block: Block
    zero_cta: zero_cta.ZeroCta | None
    closing: ExitStack
