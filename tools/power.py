"""Power and clock of the GPUs while a step runs over and over.

At the power limit a step takes the longer the more energy it needs: the clock falls for all of its
kernels, where what is sent is hidden too. Cycles tell such a step from one that waits:

    cycles = time of a step * SM clock

Power and clock are those that torch reads from NVML.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ulysses_ops.tools.launch import RankContext

POWER = "power"
SECONDS = 1.5  # NVML averages power over a second
CHUNK_S = 0.03  # between two looks


@dataclass(frozen=True)
class Power:
    """What running a step over and over came to, mean of the ranks.

    Attributes:
        step_us: Time of a step.
        watts: Power of a GPU.
        sm_mhz: Clock of its SMs.
    """

    step_us: float
    watts: float
    sm_mhz: float

    @property
    def cycles(self) -> float:
        """SM cycles of a step."""
        return self.step_us * self.sm_mhz


def measure_power(
    context: RankContext, run: Callable[[], object], step_us: float, what: str
) -> Power:
    """Run a step of about ``step_us`` for a while, on all ranks. Collective."""
    device = context.device
    a_chunk = math.ceil(CHUNK_S * 1e6 / step_us)
    chunks = math.ceil(SECONDS * 1e6 / (a_chunk * step_us))
    looks: list[int] = []
    watts = 0.0
    ahead: deque[torch.cuda.Event] = deque()
    context.line_up(f"power of {what}")
    start = torch.cuda.Event(enable_timing=True)
    for chunk in range(chunks):
        if chunk == chunks // 2:  # clocks have settled by then
            start.record()
        for _ in range(a_chunk):
            run()
        ahead.append(torch.cuda.Event(enable_timing=True))
        ahead[-1].record()
        if len(ahead) > 2:
            context.finish(f"power of {what}", ahead.popleft())
            watts, sm_mhz = torch.cuda.power_draw(device) / 1e3, torch.cuda.clock_rate(device)
            looks.append(sm_mhz)
    context.finish(f"power of {what}", ahead[-1])
    step_us = start.elapsed_time(ahead[-1]) * 1e3 / (a_chunk * (chunks - chunks // 2))
    mine = (step_us, watts, statistics.fmean(looks[len(looks) // 2 :]))
    return Power(*map(statistics.fmean, zip(*context.gather(mine), strict=True)))
