"""Whole denoising steps of the benchmark on CPU ranks: variants, generations, tables, refusals."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from recorded import MACHINE, a_row
from torch import Tensor, nn

from ulysses_ops.diffusers_attention import Forward
from ulysses_ops.tools import plots, step_bench, step_job
from ulysses_ops.tools.benchmark_job import run_rank
from ulysses_ops.tools.benchmark_plan import Choice, plan_benchmark, plan_functional
from ulysses_ops.tools.denoising_step import (
    DenoisingStep,
    NoiseLevels,
    denoise_by_euler,
    step_arguments,
)
from ulysses_ops.tools.launch import Launch, RankContext, RankError, run_ranks
from ulysses_ops.tools.markdown import Record
from ulysses_ops.tools.models import build
from ulysses_ops.tools.report import Outcome
from ulysses_ops.tools.results import Row, rows_to_json, write_results
from ulysses_ops.tools.step_cases import DEFAULT_MODELS, TINY_CASES, case_of
from ulysses_ops.tools.step_job import StepJob, counted
from ulysses_ops.tools.step_table import generation_table, graphs_table, step_table
from ulysses_ops.tools.step_variants import STEP_VARIANTS, StepVariant
from ulysses_ops.tools.timeline import Timeline
from ulysses_ops.tools.timing import Effort

WAN, FLUX = TINY_CASES
LAUNCH = Launch(2, "cpu", 0, 150.0, 60.0)
EFFORT = Effort(2, 0.5)
CPU = torch.device("cpu")

needs_diffusers = pytest.mark.skipif(
    importlib.util.find_spec("diffusers") is None,
    reason="diffusers is not installed: pip install -e .[diffusers]",
)


# ---- a step --------------------------------------------------------------------------------------


class Recorder(nn.Module):
    """Takes the place of a model, and keeps what it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[dict[str, Any]] = []

    def forward(self, **given: Any) -> tuple[Tensor]:
        self.calls.append(given)
        return (given["hidden_states"] * len(self.calls),)


@needs_diffusers
@pytest.mark.parametrize("case", TINY_CASES, ids=lambda case: case.model.key)
def test_a_step_is_what_its_equation_says(case: Any) -> None:
    levels = NoiseLevels.of_flow_matching(10, CPU)
    model = Recorder()
    step = DenoisingStep(model, case.model, torch.float32)
    args = step_arguments(
        case.model, case.resolution, levels.at(4), branches=2, dtype=torch.float32, seed=3
    )
    latents, noise, prompts = args
    x = step(*args)
    # The first call gave x, the second 2 x: guided, 2 x + 5 (x - 2 x).
    expected = latents + (levels.sigmas[5] - levels.sigmas[4]) * (-3 * latents)
    torch.testing.assert_close(x, expected)
    wanted, unwanted = model.calls
    scale = 1 if case.model.is_video else 1000
    assert torch.equal(wanted["timestep"] * scale, noise["timestep"])
    assert wanted["encoder_hidden_states"] is prompts[0]["encoder_hidden_states"]
    assert not torch.equal(wanted["encoder_hidden_states"], unwanted["encoder_hidden_states"])


@needs_diffusers
def test_steps_one_by_one_are_the_loop_of_the_scheduler() -> None:
    """Bit for bit, whatever step of which schedule was taken before; other levels are seen."""
    model = build(WAN.model, device="cpu", dtype=torch.float32)
    step = DenoisingStep(model, WAN.model, torch.float32)
    levels = NoiseLevels.of_flow_matching(6, CPU)
    latents, _, prompts = step_arguments(
        WAN.model, WAN.resolution, levels.at(0), branches=2, dtype=torch.float32, seed=0
    )
    with torch.no_grad():
        expected = denoise_by_euler(
            lambda x, time: step.velocity(x, time, prompts), latents, steps=6
        )
        step(latents, NoiseLevels.of_flow_matching(3, CPU).at(2), prompts)
        one_by_one = wrong = latents
        for number in range(6):
            one_by_one = step(one_by_one, levels.at(number), prompts)
            wrong = step(wrong, levels.at(min(number, 4)), prompts)
    assert torch.equal(one_by_one, expected)
    assert not torch.equal(wrong, expected)


# ---- the job -------------------------------------------------------------------------------------


@needs_diffusers
@pytest.mark.slow
def test_steps_run_on_two_cpu_ranks() -> None:
    jobs = [StepJob(case, EFFORT, steps=2) for case in TINY_CASES]
    outcome: Outcome = run_ranks(run_rank, jobs, LAUNCH)[0]
    for case in TINY_CASES:
        for part in ("step", "generation", "graphs", "launches"):
            assert f"{part}/{case.model.key}" in outcome.finished
    steps = [row for row in outcome.rows if row.op == "step"]
    assert len(steps) == len(TINY_CASES) * 4
    for row in steps:
        name = (row.details or {})["variant"]
        assert row.exact is (None if name == "compute" else True)
        assert (row.tax_percent is None) is (name == "compute")
        assert row.host_us is not None
        assert (row.details or {})["layers"] == (row.details or {})["published_layers"]
    loops = [row for row in outcome.rows if row.op == "generation"]
    assert {(row.details or {})["variant"] for row in loops} == {
        "euler, eager",
        "euler, stepwise",
        "unipc, eager",
    }
    assert all(row.exact for row in loops)
    held = [row for row in outcome.rows if row.op == "graphs"]
    assert [row.exact for row in held] == [True, True]
    assert outcome.not_run == {}


class OneElementOff(Forward):
    """Ours, with a single wrong element on one rank."""

    def replicate(self, x: Tensor) -> Tensor:
        rows = super().replicate(x)
        if self.comm.rank == 1:
            rows.view(-1)[3] += 1
        return rows


class Broken(Forward):
    def replicate(self, x: Tensor) -> Tensor:
        message = "no rows today"
        raise ValueError(message)


def _with_faults(context: RankContext, job: StepJob) -> Outcome:
    """Ours gives a wrong element, and the fallback does not run."""
    faults: dict[str, type[Forward]] = {"ours": OneElementOff, "fallback": Broken}

    def faulty(variant: StepVariant) -> StepVariant:
        if variant.name not in faults:
            return variant
        kind = faults[variant.name]
        return replace(variant, forward=lambda comms, context: kind(comms[variant.name]))

    variants = tuple(faulty(variant) for variant in STEP_VARIANTS)
    with (
        mock.patch.object(step_job, "select_step_variants", return_value=variants),
        mock.patch.object(step_job, "WEIGHTS", {"step": 1.0}),
    ):
        return run_rank(context, [job])


@needs_diffusers
def test_a_wrong_element_is_seen_and_what_breaks_has_a_reason() -> None:
    outcome = run_ranks(_with_faults, StepJob(WAN, EFFORT), LAUNCH)[0]
    exact = {(row.details or {})["variant"]: row.exact for row in outcome.rows}
    assert exact == {"compute": None, "ours": False, "nccl": True}
    (reason,) = outcome.not_run.values()
    assert reason == "rank 0, 1: ValueError: no rows today"


def _with_a_blind_model(context: RankContext, job: StepJob) -> Outcome:
    """A model in which nothing depends on what is exchanged."""
    with mock.patch.object(step_bench, "same_bits", return_value=True):
        return run_rank(context, [job])


@needs_diffusers
def test_a_comparison_that_sees_nothing_is_an_error() -> None:
    with pytest.raises(RankError, match="BLIND: compute/eager, which exchanges nothing"):
        run_ranks(_with_a_blind_model, StepJob(WAN, EFFORT), LAUNCH)


def _without_diffusers(context: RankContext, job: StepJob) -> Outcome:
    def missing() -> bool:
        message = "No module named 'diffusers'"
        raise ImportError(message)

    with mock.patch.object(step_job, "_import_diffusers", missing):
        return run_rank(context, [job])


def test_without_diffusers_there_is_a_reason() -> None:
    outcome = run_ranks(_without_diffusers, StepJob(FLUX, EFFORT), LAUNCH)[0]
    assert outcome.rows == []
    assert outcome.not_run == {
        "step/tiny-flux": "rank 0, 1: ImportError: No module named 'diffusers'"
    }


# ---- cases and plans -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["wan-14b", "wan-1.3b", "flux", "qwen-image"])
def test_ten_shapes_of_a_model_differ_and_two_ranks_can_share_each(name: str) -> None:
    case = case_of(name)
    lengths = [case.shape(resolution).seq for resolution in case.resolutions]
    assert len(set(lengths)) == 10
    assert lengths == sorted(lengths, reverse=True)
    sizes = (case.resolution, case.loop_resolution, *case.resolutions)
    assert all(case.shape(resolution).fits(2) for resolution in sizes)


def test_layers_that_run_are_counted_in_the_published_proportion() -> None:
    assert (case_of("flux", 4).num_layers, case_of("flux").num_layers) == (12, 57)
    assert case_of("wan-14b", 3).num_layers == 3


def test_whole_models_are_launched_when_they_are_named() -> None:
    launch = Launch(2, "cuda", 2)
    plans = plan_benchmark(launch, Choice(only="step"), EFFORT)
    assert [plan.name for plan in plans] == [f"step_{name}" for name in DEFAULT_MODELS.split(",")]
    assert "step_flux" not in [plan.name for plan in plan_benchmark(launch, Choice(), EFFORT)]
    (cut,) = plan_benchmark(launch, Choice(only="step", models="wan-14b", layers=4), EFFORT)
    assert cut.jobs[0].case.num_layers == 4
    functional = plan_functional(2, 0, 100.0, Choice(only="step"))
    assert [job.case for job in functional.jobs] == list(TINY_CASES)
    for wrong in (Choice(only="step", models="best"), Choice(only="step", variants="packed")):
        with pytest.raises(ValueError, match="unknown"):
            plan_benchmark(launch, wrong, EFFORT)


# ---- tables and pictures -------------------------------------------------------------------------


def _step_row(variant: str, tax: float | None, **changes: Any) -> Row:
    return replace(
        a_row(
            op="step",
            model="Wan 2.1 14B 832x480, 81 frames",
            median_us=1_500_000.0,
            exact=None if tax is None else True,
            tax_percent=tax,
            tax_quartiles=None if tax is None else (tax - 1, tax + 1),
            host_us=61.2,
            peak_bytes=5_000_000_000,
            details={
                "variant": variant,
                "layers": 4,
                "published_layers": 40,
                "host_p99_us": 88.0,
            },
        ),
        **changes,
    )


ROWS = [_step_row("compute", None), _step_row("ours", 3.0), _step_row("nccl", 9.0)]


def test_launches_are_added_to_the_row_that_they_are_of() -> None:
    case = case_of("wan-14b")
    lines = {"ours/graph": Timeline((), 1), "nccl/eager": Timeline((), 4000)}
    found = [counted(row, case, lines) for row in ROWS]
    assert [row.launches for row in found] == [None, 1, None]
    assert (found[1].details or {})["profile"]["exposed_us"] == 0


def test_steps_have_a_table() -> None:
    rows = [replace(row, launches=1) if row is ROWS[1] else row for row in ROWS]
    table = step_table(Record("h200-x2", "step_wan", {"rows": rows_to_json(rows)}))
    assert table.splitlines()[2] == (
        "| Wan 2.1 14B 832x480, 81 frames, S=32760, H=40, graph | 4 of 40 | 1,500.00 "
        "| +3.0 % (2.0 to 4.0) | +9.0 % (8.0 to 10.0) | 61 / 88 | 1 | 5,000 | yes |"
    )
    wrong = [*ROWS[:2], replace(ROWS[2], exact=False)]
    assert "**no**" in step_table(Record("h200-x2", "step_wan", {"rows": rows_to_json(wrong)}))
    assert step_table(Record("h200-x2", "other", {"rows": []})) == ""


def test_generations_and_graphs_have_tables() -> None:
    layers = {"layers": 40, "published_layers": 40}
    loop = {"variant": "euler, graph", "steps": 50, "guidance_branches": 2, **layers}
    held = {
        "variant": "one pool",
        "graphs": 2,
        "sequences": [4608, 4352],
        "bytes_of_each": [3_000_000, 1_000_000],
        "total_bytes": 4_000_000,
        **layers,
    }
    rows = [a_row(op="generation", details=loop), a_row(op="graphs", details=held)]
    record = Record("h200-x2", "step_flux", {"rows": rows_to_json(rows)})
    assert generation_table(record).splitlines()[2] == (
        "| Wan 480p, 50 steps, Euler in the graph | 40 | 2 | 0.10 |  | yes |"
    )
    assert graphs_table(record).splitlines()[2] == (
        "| Wan 480p, one pool | 40 | 2 | 4608 to 4352 | 3 1 | 4 |  |  | yes |"
    )


def test_steps_of_several_files_are_drawn_together(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    others = [replace(row, model="FLUX.1-dev 1024x1024") for row in ROWS]
    for name, rows in (("step_wan-14b", ROWS), ("step_flux", others)):
        path = write_results(tmp_path, name, MACHINE, "abc", Outcome(MACHINE, rows, "ce").content())
    assert json.loads(path.read_text())["rows"]
    written = plots.draw_results(path.parent, tmp_path / "pictures")
    assert [picture.name for picture in written] == ["step_time.png", "step_tax.png"]
    assert all(picture.read_bytes().startswith(b"\x89PNG") for picture in written)
