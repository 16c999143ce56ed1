"""A denoising loop with a scheduler of diffusers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

# (latents, timestep in 0 to 1000, one for each sample) -> velocity, like the latents
Velocity = Callable[[Tensor, Tensor], Tensor]


def denoise(velocity: Velocity, latents: Tensor, steps: int) -> Tensor:
    """All steps of flow matching; the state stays in float32, as in the pipelines."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(steps, device=latents.device)
    state = latents.float()
    with torch.no_grad():
        for time in scheduler.timesteps:
            found = velocity(state.to(latents.dtype), time.expand(latents.shape[0]))
            state = scheduler.step(found.float(), time, state, return_dict=False)[0]
    return state
