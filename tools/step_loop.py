"""Whole generations: the scheduler's own eager loop, and replays, compared bit for bit."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

from torch import Tensor

from ulysses_ops.diffusers_attention import Forward
from ulysses_ops.graphs import CapturedStep, capture_step
from ulysses_ops.graphs.signature import same_bits
from ulysses_ops.graphs.step import can_capture
from ulysses_ops.tools.block_variants import OURS
from ulysses_ops.tools.denoising_step import (
    NoiseLevels,
    StepArgs,
    Velocity,
    denoise_by_euler,
    denoise_by_unipc,
)
from ulysses_ops.tools.results import Row
from ulysses_ops.tools.step_rows import StepSite, described_case, slowest
from ulysses_ops.tools.timing import Rounds, Summary, summarise, time_runs

OP = "generation"
ROUNDS = 3
PACE = 10  # replays between two looks at the GPU, so that the queue stays short

Generate = Callable[[], Tensor]
EULER, UNIPC = "euler", "unipc"


class Loops:
    """Loops over one set of arguments, and how long the host takes for each replay in them."""

    def __init__(self, site: StepSite, args: StepArgs, steps: int, closing: ExitStack) -> None:
        """Capture the step, and the model alone, on GPUs. Collective."""
        self._site = site
        self._args = args
        self._steps = steps
        self._step = site.step()
        latents, noise, prompts = args
        self._levels = NoiseLevels.of_flow_matching(steps, latents.device)
        comm = site.comms[OURS]
        self.host_us: list[float] = []
        self.is_captured = can_capture(comm)
        self._whole: CapturedStep | None = None
        self._alone: CapturedStep | None = None
        if self.is_captured:
            self._whole = capture_step(comm, self._step, args, warmup=1)
            closing.callback(self._whole.close)
            alone = (latents, noise["timestep"], prompts)
            self._alone = capture_step(comm, self._step.velocity, alone, warmup=1)
            closing.callback(self._alone.close)

    def by_name(self) -> dict[tuple[str, str], Generate]:
        """Each loop, by scheduler and mode; on CPU ranks every one is eager."""
        latents, steps = self._args[0], self._steps
        loops: dict[tuple[str, str], Generate] = {
            (EULER, "eager"): partial(denoise_by_euler, self._eager_velocity, latents, steps),
            (UNIPC, "eager"): partial(denoise_by_unipc, self._eager_velocity, latents, steps),
        }
        if self.is_captured:
            velocity: Velocity = self._replayed_velocity
            loops[EULER, "graph"] = self._replay_whole_steps
            loops[UNIPC, "graph"] = partial(denoise_by_unipc, velocity, latents, steps)
        else:
            loops[EULER, "stepwise"] = self._call_whole_steps
        return loops

    def _eager_velocity(self, latents: Tensor, timestep: Tensor) -> Tensor:
        return self._step.velocity(latents, timestep, self._args[2])

    def _replayed_velocity(self, latents: Tensor, timestep: Tensor) -> Tensor:
        assert self._alone is not None
        found: Tensor = self._alone.replay(latents, timestep, self._args[2])
        return found.clone()  # multistep schedulers keep what they are given

    def _replay_whole_steps(self) -> Tensor:
        assert self._whole is not None
        latents, _, prompts = self._args
        for number in range(self._steps):
            start = time.perf_counter()
            latents = self._whole.replay(latents, self._levels.at(number), prompts)
            self.host_us.append((time.perf_counter() - start) * 1e6)
            if number % PACE == PACE - 1:
                self._site.context.finish(f"replay {number}")
        return latents.clone()

    def _call_whole_steps(self) -> Tensor:
        latents, _, prompts = self._args
        for number in range(self._steps):
            latents = self._step(latents, self._levels.at(number), prompts)
        return latents


def generation_rows(site: StepSite, steps: int, until: float) -> list[Row]:
    """Run every loop in turn, round after round, and compare each with the eager one. Collective.

    The loops start from the same noise. ``exact``: all rounds of a loop gave the bits of the first
    eager loop with the same scheduler, on every rank.
    """
    context, case = site.context, site.case
    site.shared.use(Forward(site.comms[OURS]))
    args = site.arguments(case.loop_resolution, case.loop_branches)
    with ExitStack() as closing:
        context.progress(f"{case.model.title}: {steps} steps")
        loops = Loops(site, args, steps, closing)
        expected: dict[str, Tensor] = {}
        exact = dict.fromkeys(loops.by_name(), True)
        rounds: dict[tuple[str, str], Rounds] = {key: [] for key in exact}
        for number in range(ROUNDS):
            if number and context.gather(time.monotonic() >= until)[0]:
                break
            for (scheduler, mode), generate in loops.by_name().items():
                what = f"{case.model.title}: {steps} steps, {scheduler}, {mode}"
                context.progress(what)
                context.line_up(what)
                found: list[Tensor] = []
                took = time_runs(context, partial(_append, found, generate), 1, what, lead_in=0)
                rounds[scheduler, mode].append([one / steps for one in took])
                reference = expected.setdefault(scheduler, found[0])
                exact[scheduler, mode] &= context.agree(same_bits(found[0], reference))
        host_us = context.gather(loops.host_us)
        moves = not same_bits(next(iter(expected.values())), args[0])
        by_rank = {key: context.gather(rounds[key]) for key in exact}
    return [
        _row(
            site,
            steps,
            key,
            summarise(by_rank[key]),
            exact[key] and moves,
            host_us,
        )
        for key in exact
    ]


def _append(found: list[Tensor], generate: Generate) -> None:
    found.append(generate())


def _row(
    site: StepSite,
    steps: int,
    key: tuple[str, str],
    times: Summary,
    exact: bool,
    host_us: list[list[float]],
) -> Row:
    scheduler, mode = key
    has_host = scheduler == EULER and mode == "graph"
    median, p99 = slowest(host_us) if has_host else (None, None)
    return Row.of_times(
        OP,
        site.case.shape(site.case.loop_resolution),
        world_size=site.context.world_size,
        transport=site.comms[OURS].transport,
        mode="graph" if mode == "graph" else "eager",
        times=times,
        exact=exact,
        bytes_per_peer=0,
        dtype=site.dtype_name,
        is_exchange=False,
        host_us=median,
        details={
            "variant": f"{scheduler}, {mode}",
            "steps": steps,
            "rounds": len(times.round_us),
            **described_case(site.case),
            "guidance_branches": site.case.loop_branches,
            **(
                {}
                if p99 is None
                else {"host_p99_us": round(p99, 1), "host_samples": len(host_us[0])}
            ),
        },
    )
