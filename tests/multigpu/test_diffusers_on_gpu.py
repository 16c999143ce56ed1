"""Wan and FLUX of diffusers at their published widths, on two GPUs: one rank, eager, captured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from denoising import denoise
from on_gpu import communicator, settle
from rank_pool import RankPool
from torch import Tensor

from ulysses_ops import UlyssesCommunicator
from ulysses_ops.diffusers_models import parallelize
from ulysses_ops.graphs import CapturedStep, capture_step
from ulysses_ops.joint import JointSequence
from ulysses_ops.tools.models import Resolution, build, inputs

pytest.importorskip("diffusers", reason="diffusers is not installed: pip install -e .[diffusers]")

# 1280 and 1024 image rows, where the published resolutions have 32760 and 4096.
REDUCED = {"wan-14b": Resolution(256, 256, 17), "flux": Resolution(512, 512)}
CHANGING = ("hidden_states", "timestep", "encoder_hidden_states")
# Of the norm of the difference to the norm of the output. Matrix products of half the rows may run
# in another kernel, which sums in another order; bf16 keeps 8 bits.
LIMIT = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
CASES = [("wan-14b", 512), ("flux", 128), ("flux", 77)]  # text that is sharded, and replicated


def call_with(name: str, text_rows: int, dtype: torch.dtype, seed: int) -> dict[str, Any]:
    return inputs(name, resolution=REDUCED[name], text_rows=text_rows, dtype=dtype, seed=seed)


def output(model: Any, given: dict[str, Any]) -> Tensor:
    with torch.no_grad():
        result: Tensor = model(**given)[0]
    return result


def relative(got: Tensor, expected: Tensor) -> float:
    got, expected = got.double(), expected.double()
    return float((got - expected).norm() / expected.norm())


def attend_alone(
    comm: UlyssesCommunicator,
    v: Callable[[], Tensor],
    k: Callable[[], Tensor],
    q: Callable[[], Tensor],
    *,
    joint: JointSequence | None,
    attention: Callable[..., Tensor],
    mask: Tensor | None,
    copy_out: bool,
) -> Tensor:
    """The exchanges left out: each rank attends to its own rows."""
    return attention(q(), k(), v())


def against_one_rank(
    rank: int, world_size: int, name: str, text_rows: int, dtype: torch.dtype
) -> tuple[float, float]:
    model = build(name, layers=2, dtype=dtype)
    given = call_with(name, text_rows, dtype, seed=1)
    expected = output(model, given)
    with communicator() as comm, parallelize(model, comm):
        got = output(model, given)
        again = output(model, given)
        with mock.patch("ulysses_ops.diffusers_attention.attend_as_computed", attend_alone):
            wrong = output(model, given)
        settle()
        assert torch.equal(got, again)
    assert torch.equal(output(model, given), expected)  # given back as it was
    assert bool(expected.isfinite().all())
    return relative(got, expected), relative(wrong, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "text_rows"), CASES)
def test_output_is_that_of_one_rank(
    pair: RankPool, name: str, text_rows: int, dtype: torch.dtype
) -> None:
    for difference, control in pair.run(against_one_rank, name, text_rows, dtype, timeout_s=120):
        print(f"{name}, {text_rows} text rows, {dtype}: {difference:.1e}, control {control:.1e}")
        assert difference < LIMIT[dtype]
        if dtype == torch.float32:
            assert control > 100 * LIMIT[dtype], f"BLIND: {control}"


def captured(
    comm: UlyssesCommunicator, model: Any, given: dict[str, Any]
) -> tuple[CapturedStep, Callable[..., Tensor]]:
    """The whole model as a step, captured, and the same step to be called eagerly."""
    fixed = {name: value for name, value in given.items() if name not in CHANGING}

    def step(*changing: Tensor) -> Tensor:
        return output(model, {**fixed, **dict(zip(CHANGING, changing, strict=True))})

    return capture_step(comm, step, [given[name] for name in CHANGING]), step


def replays(rank: int, world_size: int, name: str, text_rows: int, is_compiled: bool) -> None:
    """New inputs each time; replays and eager calls mixed, and bit for bit the same."""
    dtype = torch.bfloat16
    model: Any = build(name, layers=1 if is_compiled else 2, dtype=dtype)
    given = call_with(name, text_rows, dtype, seed=1)
    with communicator(timeout_s=100.0) as comm, parallelize(model, comm):
        called = torch.compile(model, fullgraph=True) if is_compiled else model
        graph, step = captured(comm, called, given)
        previous = None
        for seed in range(2, 8):
            new = [call_with(name, text_rows, dtype, seed)[key] for key in CHANGING]
            expected = step(*new)
            stale = graph.replay().clone()
            got = graph.replay(*new)
            assert torch.equal(got, expected)
            assert not torch.equal(stale, expected), "BLIND"
            if previous is not None:
                assert torch.equal(stale, previous)
            previous = expected
        settle()
        graph.close()


@pytest.mark.parametrize(("name", "text_rows"), CASES)
def test_a_captured_model_is_the_eager_one(pair: RankPool, name: str, text_rows: int) -> None:
    pair.run(replays, name, text_rows, False, timeout_s=120)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "text_rows"), CASES[:2])
def test_a_compiled_model_can_be_captured(pair: RankPool, name: str, text_rows: int) -> None:
    pair.run(replays, name, text_rows, True, timeout_s=300)


def whole_loop(rank: int, world_size: int, name: str, steps: int) -> None:
    """Every step of a generation by replays, and once more eagerly: the same picture."""
    dtype = torch.bfloat16
    model: Any = build(name, layers=2, dtype=dtype)
    given = call_with(name, 128, dtype, seed=1)
    text, unit = given["encoder_hidden_states"], 1.0 if name == "wan-14b" else 1e-3
    with communicator() as comm, parallelize(model, comm):
        graph, step = captured(comm, model, given)

        def velocity(call: Callable[..., Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
            def found(latents: Tensor, time: Tensor) -> Tensor:
                return call(latents, (time * unit).to(given["timestep"].dtype), text)

            return found

        by_replays = denoise(velocity(graph.replay), given["hidden_states"], steps)
        eagerly = denoise(velocity(step), given["hidden_states"], steps)
        settle()
        assert torch.equal(by_replays, eagerly)
        assert bool(by_replays.isfinite().all())
        assert relative(by_replays, given["hidden_states"]) > 0.01
        graph.close()


@pytest.mark.parametrize("name", ["wan-14b", "flux"])
def test_fifty_steps_by_replays(pair: RankPool, name: str) -> None:
    pair.run(whole_loop, name, 50, timeout_s=120)
