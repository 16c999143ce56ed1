"""One denoising step of a ``diffusers`` model, scheduler included, that a graph can hold.

NOTE [the scheduler inside a graph]: ``FlowMatchEulerDiscreteScheduler`` counts its steps in Python
and reads the noise levels of the step from a table. A graph would bake both in. Here its own code
runs on a table of two entries, the noise level now and the next, which is an input of the step: the
arithmetic is the scheduler's, the table changes with every replay. ``UniPCMultistepScheduler`` has
its table on the host and waits for a small system to be solved, and so runs between replays.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ulysses_ops.tools.models import PublishedModel, Resolution, inputs

SHIFT = 3.0  # of the noise levels, as the pipelines have it at these resolutions
GUIDANCE = 5.0
# In order of preference; cuDNN's is the fastest on Hopper.
ATTENTION = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]

# What the model is called with for one prompt, but for latents and time: tensors and constants.
Prompt = dict[str, Any]
# (latents, noise, prompts) of a step; captured and replayed with other values.
StepArgs = tuple[Tensor, dict[str, Tensor], list[Prompt]]


@dataclass(frozen=True)
class NoiseLevels:
    """Tables of a scheduler for one generation.

    Attributes:
        timesteps: What the model is told, ``(steps,)``.
        sigmas: Noise levels, ``(steps + 1,)``, the last one 0.
    """

    timesteps: Tensor
    sigmas: Tensor

    @classmethod
    def of_flow_matching(cls, steps: int, device: torch.device) -> NoiseLevels:
        """Those of the scheduler of ``diffusers``."""
        scheduler = _euler()
        scheduler.set_timesteps(steps, device=device)
        return cls(scheduler.timesteps, scheduler.sigmas)

    def at(self, step: int) -> dict[str, Tensor]:
        """What step number ``step`` takes."""
        return {
            "timestep": self.timesteps[step : step + 1],
            "sigmas": self.sigmas[step : step + 2],
        }


class DenoisingStep:
    """``latents -> latents``: the model for every prompt, guidance, and the scheduler's update.

    ``x' = x + (sigma' - sigma) v``, with ``v = model(x, t, prompt)``, or with two prompts
    ``v = v1 + 5 (v0 - v1)``. Latents are float32, as the scheduler keeps them.
    """

    def __init__(self, model: nn.Module, published: PublishedModel, dtype: torch.dtype) -> None:
        """Wrap a model, parallel or not."""
        self._model = model
        self._published = published
        self._dtype = dtype
        self._scheduler = _euler()
        self._scheduler.set_begin_index(0)

    def velocity(self, latents: Tensor, timestep: Tensor, prompts: list[Prompt]) -> Tensor:
        """What the model makes of the latents, guided; float32."""
        x = latents.to(self._dtype)
        time = timestep.expand(latents.shape[0])
        if not self._published.is_video:
            time = (time / 1000).to(self._dtype)
        found: list[Tensor] = []
        with sdpa_kernel(ATTENTION, set_priority=True):
            for prompt in prompts:
                output = self._model(hidden_states=x, timestep=time, **prompt)[0]
                found.append(output.float())
        if len(found) == 1:
            return found[0]
        wanted, unwanted = found
        guided: Tensor = unwanted + GUIDANCE * (wanted - unwanted)
        return guided

    def __call__(self, latents: Tensor, noise: dict[str, Tensor], prompts: list[Prompt]) -> Tensor:
        """One step."""
        velocity = self.velocity(latents, noise["timestep"], prompts)
        scheduler = copy.copy(self._scheduler)
        scheduler.sigmas = noise["sigmas"]
        stepped: Tensor = scheduler.step(velocity, noise["timestep"], latents, return_dict=False)[0]
        return stepped


def step_arguments(
    published: PublishedModel,
    resolution: Resolution,
    noise: dict[str, Tensor],
    *,
    branches: int,
    dtype: torch.dtype,
    seed: int,
) -> StepArgs:
    """Random latents and prompts, the same on every rank; with 2 branches there is guidance."""
    device = noise["sigmas"].device
    given = [
        inputs(
            published, resolution=resolution, device=device, dtype=dtype, seed=1000 * branch + seed
        )
        for branch in range(branches)
    ]
    latents: Tensor = given[0]["hidden_states"].float()
    own = ("hidden_states", "timestep")
    prompts = [{key: value for key, value in one.items() if key not in own} for one in given]
    return latents, noise, prompts


Velocity = Callable[[Tensor, Tensor], Tensor]  # (latents, timestep) -> velocity


def denoise_by_euler(velocity: Velocity, latents: Tensor, steps: int) -> Tensor:
    """A whole generation by the scheduler as it comes, its count and its table its own."""
    return _denoise(_euler(), velocity, latents, steps)


def denoise_by_unipc(velocity: Velocity, latents: Tensor, steps: int) -> Tensor:
    """The same by the multistep scheduler of the Wan pipelines."""
    from diffusers import UniPCMultistepScheduler

    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=SHIFT
    )
    return _denoise(scheduler, velocity, latents, steps)


def _denoise(scheduler: Any, velocity: Velocity, latents: Tensor, steps: int) -> Tensor:
    scheduler.set_timesteps(steps, device=latents.device)
    for time in scheduler.timesteps:
        found = velocity(latents, time.float().view(1))
        latents = scheduler.step(found, time, latents, return_dict=False)[0]
    return latents


def _euler() -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler

    return FlowMatchEulerDiscreteScheduler(shift=SHIFT)
