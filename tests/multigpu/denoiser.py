"""A small denoiser whose sequence is sharded, and a loop of denoising steps around it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ulysses_ops import UlyssesCommunicator, ulysses_attention

HEADS, DIM = 4, 32
WIDTH = HEADS * DIM


class Block(nn.Module):
    """Self-attention over the whole sequence, cross-attention to a prompt that all ranks hold."""

    def __init__(self, comm: UlyssesCommunicator) -> None:
        super().__init__()
        self._comm = comm
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.cross = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor, prompt: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(2, (3, HEADS, DIM)).unbind(2)
        x = x + self.out(ulysses_attention(q, k, v, self._comm).flatten(2))
        query = self.cross(x).unflatten(2, (HEADS, DIM)).transpose(1, 2)
        keys = prompt.unflatten(2, (HEADS, DIM)).transpose(1, 2)
        where = None if mask is None else mask[:, None, None, :]
        attended = F.scaled_dot_product_attention(query, keys, keys, attn_mask=where)
        x = x + attended.transpose(1, 2).flatten(2)
        out: Tensor = x + self.mlp(x)
        return out


class Denoiser(nn.Module):
    """Velocity of the latents; the same weights on every rank."""

    def __init__(self, comm: UlyssesCommunicator, layers: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(comm) for _ in range(layers))
        self.to(comm.device).requires_grad_(False)

    def forward(
        self, latents: Tensor, time: Tensor, prompt: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        x = latents + torch.cos(time)
        for block in self.blocks:
            x = block(x, prompt, mask)
        return torch.tanh(x)


def step_of(model: Callable[..., Tensor], scale: float = 3.0) -> Callable[..., Tensor]:
    """One step: both branches of the guidance, and Euler's update."""

    def step(latents: Tensor, sigmas: dict[str, Tensor], prompts: list[Tensor]) -> Tensor:
        wanted, unwanted = (model(latents, sigmas["now"], prompt) for prompt in prompts)
        velocity = unwanted + scale * (wanted - unwanted)
        return latents + (sigmas["next"] - sigmas["now"]) * velocity

    return step


def batched_step_of(model: Callable[..., Tensor], scale: float = 3.0) -> Callable[..., Tensor]:
    """The same with both branches as a batch of two."""

    def step(latents: Tensor, sigmas: dict[str, Tensor], prompts: list[Tensor]) -> Tensor:
        both = model(torch.cat([latents, latents]), sigmas["now"], torch.cat(prompts))
        wanted, unwanted = both.chunk(2)
        velocity = unwanted + scale * (wanted - unwanted)
        return latents + (sigmas["next"] - sigmas["now"]) * velocity

    return step


def denoise(step: Callable[..., Any], latents: Tensor, prompts: list[Tensor], count: int) -> Tensor:
    """The loop; sigmas are tensors, as numbers would be baked in."""
    schedule = torch.linspace(1.0, 0.0, count + 1, device=latents.device)
    for number in range(count):
        latents = step(latents, {"now": schedule[number], "next": schedule[number + 1]}, prompts)
    return latents


def latents_of(rank: int, rows: int, seed: int = 0) -> Tensor:
    """This rank's shard of noise."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randn((1, rows, WIDTH), generator=generator).cuda()


def prompt_of(length: int, seed: int = 0) -> Tensor:
    """A prompt, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((1, length, WIDTH), generator=generator).cuda()
