"""Whole denoising steps, scheduler included, on two GPUs: one launch each, and the eager bits."""

from __future__ import annotations

import pytest
import torch
from on_gpu import communicator, settle
from rank_pool import RankPool
from torch import Tensor

from ulysses_ops.diffusers_models import parallelize
from ulysses_ops.graphs import capture_step
from ulysses_ops.tools.benchmark_job import run_rank
from ulysses_ops.tools.denoising_step import (
    DenoisingStep,
    NoiseLevels,
    denoise_by_euler,
    step_arguments,
)
from ulysses_ops.tools.launch import Launch, run_ranks
from ulysses_ops.tools.models import build
from ulysses_ops.tools.report import Outcome
from ulysses_ops.tools.results import Row
from ulysses_ops.tools.step_cases import TINY_CASES
from ulysses_ops.tools.step_job import StepJob
from ulysses_ops.tools.timing import Effort

pytest.importorskip("diffusers", reason="diffusers is not installed: pip install -e .[diffusers]")

STEPS = 50
DTYPE = torch.bfloat16


def generations(rank: int, world_size: int, case_number: int, transport: str) -> None:
    """By replays of the whole step, by the scheduler's own loop, and with one level too often."""
    case = TINY_CASES[case_number]
    levels = NoiseLevels.of_flow_matching(STEPS, torch.device("cuda"))
    latents, noise, prompts = step_arguments(
        case.model, case.resolution, levels.at(0), branches=2, dtype=DTYPE, seed=0
    )
    model = build(case.model, dtype=DTYPE)
    with torch.no_grad(), communicator(transport=transport) as comm, parallelize(model, comm):
        assert comm.transport == transport
        step = DenoisingStep(model, case.model, DTYPE)

        def velocity(x: Tensor, time: Tensor) -> Tensor:
            return step.velocity(x, time, prompts)

        graph = capture_step(comm, step, (latents, noise, prompts))
        expected = denoise_by_euler(velocity, latents, STEPS)
        found = wrong = latents
        for number in range(STEPS):
            found = graph.replay(found, levels.at(number), prompts)
        found = found.clone()
        for number in range(STEPS):
            wrong = graph.replay(wrong, levels.at(min(number, STEPS - 2)), prompts)
        wrong = wrong.clone()
        settle()
        assert bool(expected.isfinite().all())
        assert torch.equal(found, expected)
        assert not torch.equal(wrong, expected), "BLIND"
        graph.close()


@pytest.mark.parametrize("transport", ["ce", "nccl"])
@pytest.mark.parametrize("case_number", [0, 1], ids=["wan", "flux"])
def test_fifty_replayed_steps_are_the_loop_of_the_scheduler(
    pair: RankPool, case_number: int, transport: str
) -> None:
    pair.run(generations, case_number, transport, timeout_s=60)


def variant_of(row: Row) -> str:
    return str((row.details or {})["variant"])


def test_the_job_gives_one_launch_and_the_same_bits_by_every_way() -> None:
    """In processes of its own: the profiler, which counts launches, stays in them."""
    jobs = [StepJob(case, Effort(2, 5.0)) for case in TINY_CASES]
    outcome: Outcome = run_ranks(run_rank, jobs, Launch(2, "cuda", 2, 110.0, 60.0))[0]
    assert outcome.not_run == {}
    steps = [row for row in outcome.rows if row.op == "step"]
    assert len(steps) == len(TINY_CASES) * 4 * 2
    for row in steps:
        assert row.exact is (None if variant_of(row) == "compute" else True)
        assert row.launches is not None
        if row.mode == "graph":
            assert row.launches == 1, f"{row.model}, {variant_of(row)}: {row.launches} launches"
        else:
            assert row.launches > 50, "BLIND"
    loops = [row for row in outcome.rows if row.op == "generation"]
    assert {variant_of(row) for row in loops} == {
        f"{scheduler}, {mode}" for scheduler in ("euler", "unipc") for mode in ("eager", "graph")
    }
    assert all(row.exact for row in loops)
    held = [row for row in outcome.rows if row.op == "graphs"]
    assert [(variant_of(row), row.exact) for row in held] == len(TINY_CASES) * [
        ("one pool", True),
        ("a pool each", None),
    ]
