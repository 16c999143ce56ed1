"""The ways in which a whole step is exchanged, over the same weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ulysses_ops.communicator import UlyssesCommunicator
from ulysses_ops.diffusers_attention import Forward
from ulysses_ops.tools.block_variants import COMPUTE, OURS
from ulysses_ops.tools.choosing import choose_names
from ulysses_ops.tools.launch import RankContext
from ulysses_ops.tools.step_forwards import NothingSent, OverNccl

NCCL = "nccl"
FALLBACK = "fallback"

Comms = Mapping[str, UlyssesCommunicator]  # by what they are opened for: OURS and FALLBACK


@dataclass(frozen=True)
class StepVariant:
    """One way.

    Attributes:
        name: In rows and tables.
        forward: What moves the rows of the model, made once.
        moved_by: What moves the bytes on GPUs; ours asks its communicator.
        is_ours: Our operators, captured by ``capture_step``.
        is_blind: Exchanges nothing, so that its output means nothing.
    """

    name: str
    forward: Callable[[Comms, RankContext], Forward]
    moved_by: str = ""
    is_ours: bool = False
    is_blind: bool = False

    def transport(self, comms: Comms) -> str:
        """What moves the bytes here."""
        if self.is_blind:
            return "none"
        if self.is_ours:
            return comms[self.name].transport
        return self.moved_by if comms[OURS].device.type == "cuda" else "gloo"


STEP_VARIANTS = (
    StepVariant(COMPUTE, lambda comms, context: NothingSent(comms[OURS]), is_blind=True),
    StepVariant(OURS, lambda comms, context: Forward(comms[OURS]), is_ours=True),
    StepVariant(NCCL, lambda comms, context: OverNccl(comms[OURS], context), moved_by="nccl"),
    # Our operators where the copy engines are not eligible.
    StepVariant(FALLBACK, lambda comms, context: Forward(comms[FALLBACK]), is_ours=True),
)


def select_step_variants(names: str) -> tuple[StepVariant, ...]:
    """Variants named in a comma-separated list, or all; what others are compared with stays.

    Raises:
        ValueError: a name is unknown.
    """
    known = [variant.name for variant in STEP_VARIANTS]
    wanted = choose_names("variants", names, known)
    kept = {COMPUTE, OURS, NCCL, *wanted}
    return tuple(variant for variant in STEP_VARIANTS if variant.name in kept)
