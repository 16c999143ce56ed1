"""Power and clock of the GPUs while a step runs over and over.

At the power limit a step takes the longer the more energy it needs: the clock falls for all of its
kernels, where what is sent is hidden too. Cycles tell such a step from one that waits:

    cycles = time of a step * SM clock

Links that carry nothing for a while save power, and leave it to the SMs; so part of what an
exchange costs is that the links are awake.

Power, clock and links are those that NVML tells.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ulysses_ops.tools.launch import RankContext
from ulysses_ops.tools.link_power import LinkPower, read_link_power

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
        links_awake: The part of its NVLinks that saved no power, 0 to 1; ``None`` where unknown.
        links_sleep_after_us: Idle time after which a link saves power; likewise.
    """

    step_us: float
    watts: float
    sm_mhz: float
    links_awake: float | None = None
    links_sleep_after_us: int | None = None

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
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    clocks: list[int] = []
    links: list[LinkPower | None] = []
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
            watts = torch.cuda.power_draw(device) / 1e3
            clocks.append(torch.cuda.clock_rate(device))
            links.append(read_link_power(uuid))
    context.finish(f"power of {what}", ahead[-1])
    step_us = start.elapsed_time(ahead[-1]) * 1e3 / (a_chunk * (chunks - chunks // 2))
    settled = len(clocks) // 2
    mine = (step_us, watts, statistics.fmean(clocks[settled:]))
    seen = [(one.awake, one.sleep_after_us) for one in links[settled:] if one is not None]
    by_rank = context.gather((mine, seen))
    looks = [look for _, of_rank in by_rank for look in of_rank]
    means = map(statistics.fmean, zip(*(figures for figures, _ in by_rank), strict=True))
    step_us, watts, sm_mhz = means
    return Power(
        step_us,
        watts,
        sm_mhz,
        links_awake=statistics.fmean(awake for awake, _ in looks) if looks else None,
        links_sleep_after_us=looks[0][1] if looks else None,
    )
