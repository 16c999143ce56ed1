"""Noise that every rank can make for every rank."""

from __future__ import annotations

import torch
from torch import Tensor

from ulysses_ops.tools.launch import RankContext

SEED = 1234


def random_values(shape: tuple[int, ...], context: RankContext, rank: int, salt: int) -> Tensor:
    """bf16 noise that depends on shape, rank and salt alone."""
    generator = torch.Generator(context.device).manual_seed(SEED + 1000 * salt + rank)
    return torch.randn(shape, generator=generator, dtype=torch.bfloat16, device=context.device)
