"""The block of the benchmark: its parts, its variants on CPU ranks, and those that fail."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ulysses_ops.attention import sdpa
from ulysses_ops.communicator import UlyssesCommunicator
from ulysses_ops.reference import gather_reference, scatter_reference
from ulysses_ops.tools import block_trial, projection_variants
from ulysses_ops.tools.benchmark_job import run_rank
from ulysses_ops.tools.block import (
    EPS,
    Block,
    BlockWeights,
    WeightStore,
    block_flops,
    norm_rope,
    rope_tables,
)
from ulysses_ops.tools.block_job import BlockJob
from ulysses_ops.tools.block_rows import BlockSite, block_rows
from ulysses_ops.tools.block_setting import Run, Setting
from ulysses_ops.tools.block_trial import TrialJob, Tried, try_rank, try_variants
from ulysses_ops.tools.block_variants import (
    COMPUTE,
    NAIVE,
    OURS,
    BlockVariant,
    naive,
    select_variants,
)
from ulysses_ops.tools.launch import Launch, RankContext, RankError, run_ranks
from ulysses_ops.tools.layer_variants import (
    EPILOGUE,
    HANDSHAKES_ALONE,
    LINKS_AWAKE,
    PACKED,
    SCHEDULES,
    SPLIT_ALONE,
)
from ulysses_ops.tools.projection_variants import GEMMS, PROJECTIONS, QKV
from ulysses_ops.tools.report import Outcome
from ulysses_ops.tools.results import Row
from ulysses_ops.tools.shapes import BLOCKS, FUNCTIONAL_BLOCKS, Shape
from ulysses_ops.tools.timing import Effort

TINY, BATCH = FUNCTIONAL_BLOCKS
EFFORT = Effort(2, 0.5)
BLIND = {SPLIT_ALONE, HANDSHAKES_ALONE, LINKS_AWAKE}
RUN_ON_CPU = {COMPUTE, OURS, NAIVE, "packed", "overlapped", *SCHEDULES, *BLIND}


def cpu_ranks() -> Launch:
    return Launch(2, "cpu", 0, 120.0, 60.0)


# ---- parts ---------------------------------------------------------------------------------------


def _place(rank: int, device: torch.device) -> Any:
    """As much of a rank as rotation looks at."""
    return SimpleNamespace(world_size=2, rank=rank, device=device)


def _pairs_turned(x: Tensor, weight: Tensor, first_row: int) -> Tensor:
    """Norm and rotation by complex numbers: another way to the same."""
    wide = x.double()
    normed = wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
    dim = x.shape[-1]
    frequencies = 10_000.0 ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angles = (torch.arange(x.shape[1]) + first_row)[:, None, None] * frequencies
    turned = torch.view_as_complex(normed.unflatten(-1, (-1, 2))) * torch.polar(
        torch.ones_like(angles), angles
    )
    return torch.view_as_real(turned).flatten(-2)


@pytest.mark.parametrize("rank", [0, 1])
def test_norm_and_rotation_are_those_of_complex_numbers(rank: int) -> None:
    context = _place(rank, torch.device("cpu"))
    x = torch.randn((2, TINY.seq // 2, 4, 32))
    weight = torch.randn(32)
    found = norm_rope(x, weight, *rope_tables(TINY, context))
    expected = _pairs_turned(x, weight, rank * TINY.seq // 2)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    other = _pairs_turned(x, weight, 1 + rank * TINY.seq // 2)  # one row off is seen
    assert not torch.allclose(found.double(), other, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("shape", BLOCKS, ids=lambda shape: shape.key)
def test_flops_are_those_of_the_products(shape: Shape) -> None:
    rows, width = shape.seq // 2, shape.heads * shape.head_dim
    products = 4 * [(width, width)] + [(width, 4 * width), (4 * width, width)]
    gemms = sum(2 * rows * inner * outer for inner, outer in products)
    attention = 2 * 2 * shape.seq**2 * shape.head_dim * shape.heads // 2
    assert block_flops(shape, 2) == pytest.approx(gemms + attention)


def _outputs(context: RankContext, shape: Shape) -> dict[str, Tensor]:
    """The naive variant's output, and that of one rank that has everything."""
    weights = BlockWeights.random(shape.heads * shape.head_dim, shape.head_dim, context)
    block = Block.prepare(shape, context, weights, sdpa)
    local = shape.local_source(2)
    shards = [
        torch.randn((*local[:2], local[2] * local[3]), generator=torch.Generator().manual_seed(r))
        for r in range(2)
    ]
    shards = [shard.bfloat16() for shard in shards]
    tables = [rope_tables(shape, _place(rank, context.device)) for rank in range(2)]
    others = [replace(block, cosines=cosines, sines=sines) for cosines, sines in tables]
    q, k, v = (
        scatter_reference([getattr(b, part)(x) for b, x in zip(others, shards, strict=True)])
        for part in ("queries", "keys", "values")
    )
    attended = gather_reference([sdpa(*heads) for heads in zip(q, k, v, strict=True)])
    with UlyssesCommunicator(device=context.device, name="test.block") as comm, ExitStack() as end:
        setting = Setting(context, comm, block, None, end)
        found = naive(setting)(shards[context.rank])
        assert isinstance(found, Tensor)
        found = found.clone()
        stage = [part.clone() for part in projection_variants.naive(setting)(shards[context.rank])]
    return {
        "found": found,
        "expected": block.finish(attended[context.rank]),
        "stage": torch.stack(stage),
        "expected stage": torch.stack([part[context.rank] for part in (v, k, q)]),
    }


@pytest.mark.parametrize("shape", FUNCTIONAL_BLOCKS, ids=lambda shape: shape.key)
def test_what_all_are_compared_with_is_the_block_of_one_rank(shape: Shape) -> None:
    for outputs in run_ranks(_outputs, shape, cpu_ranks()):
        assert torch.equal(outputs["found"], outputs["expected"])
        assert torch.equal(outputs["stage"], outputs["expected stage"])


# ---- rows ----------------------------------------------------------------------------------------


def test_blocks_run_on_two_cpu_ranks() -> None:
    job = BlockJob((TINY, BATCH), EFFORT, not_run={"flashinfer": "needs GPUs"}, launches={})
    outcomes: list[Outcome] = run_ranks(run_rank, [job], cpu_ranks())
    outcome = outcomes[0]
    assert outcome.finished == ("block/tiny", "block/batch")
    by_shape = {
        shape.title: [r for r in outcome.rows if r.model == shape.title] for shape in (TINY, BATCH)
    }
    for rows in by_shape.values():
        assert {(row.details or {})["variant"] for row in rows} == RUN_ON_CPU
        for row in rows:
            details = row.details or {}
            name = details["variant"]
            assert row.exact is (None if name in {COMPUTE, *BLIND, *SCHEDULES} else True)
            assert (details["relative_error"] is not None) is (name in SCHEDULES)
            assert (row.tax_percent is None) is (name == COMPUTE)
            assert row.host_us is not None and row.spread_us is not None
    assert outcome.not_run["block: flashinfer"] == "needs GPUs"
    assert outcome.not_run["block: zero-CTA"] == "needs GPUs and NCCL"


def test_the_stage_before_attention_runs_on_two_cpu_ranks() -> None:
    job = BlockJob((TINY, BATCH), EFFORT, op=QKV)
    outcome: Outcome = run_ranks(run_rank, [job], cpu_ranks())[0]
    assert outcome.finished == ("qkv/tiny", "qkv/batch")
    assert len(outcome.rows) == 2 * len(PROJECTIONS)
    compared = {variant.name: variant.compares_bits for variant in PROJECTIONS}
    blind = {variant.name for variant in PROJECTIONS if variant.is_blind}
    for row in outcome.rows:
        details = row.details or {}
        name = details["variant"]
        assert row.op == QKV
        assert row.exact is (True if name not in blind and compared[name] else None)
        assert (details["relative_error"] is not None) is (
            name in {"peers first", PACKED, EPILOGUE}
        )
        assert (details["ratio_to_gemm"] == 1.0) is (name == GEMMS)
        assert details["ratio_to_gemm"] > 0
        assert (row.bytes_per_peer == 0) is (name in blind)


def _one_part_wrong(context: RankContext, argument: None) -> dict[str, bool | None]:
    def wrong(setting: Setting) -> Run:
        right = projection_variants.naive(setting)

        def run(x: Tensor) -> tuple[Tensor, ...]:
            v, k, q = right(x)
            if context.rank == 1:  # a single element of the last part, on one rank
                q.view(-1)[7] += 1
            return v, k, q

        return run

    variants = (*select_variants(NAIVE, PROJECTIONS), BlockVariant("wrong", wrong, "nobody"))
    site = BlockSite(context, WeightStore())
    with torch.no_grad(), UlyssesCommunicator(device=context.device, name="test.stage") as comm:
        rows = block_rows(site, comm, TINY, variants, EFFORT, {}, QKV)
    return {(row.details or {})["variant"]: row.exact for row in rows}


def test_a_wrong_part_of_the_stage_is_seen() -> None:
    for exact in run_ranks(_one_part_wrong, None, cpu_ranks()):
        assert (exact[NAIVE], exact["wrong"]) == (True, False)


def _one_wrong_and_one_broken(
    context: RankContext, argument: None
) -> tuple[list[Row], dict[str, str]]:
    def wrong(setting: Setting) -> Run:
        right = naive(setting)

        def run(x: Tensor) -> Tensor:
            y = right(x)
            assert isinstance(y, Tensor)
            y = y.clone()
            if context.rank == 1:  # a single element, on one rank
                y.view(-1)[7] += 1
            return y

        return run

    def far_off(setting: Setting) -> Run:
        right = naive(setting)

        def run(x: Tensor) -> Tensor:
            y = right(x)
            assert isinstance(y, Tensor)
            return y * (1.02 if context.rank == 1 else 1.0)

        return run

    def broken(setting: Setting) -> Run:
        if context.rank == 1:
            message = "no such kernel\nand a long explanation"
            raise RuntimeError(message)
        return setting.block.compute_only

    def breaks_later(setting: Setting) -> Run:
        def run(x: Tensor) -> Tensor:
            if context.rank == 0:
                message = "refused"
                raise ValueError(message)
            return x

        return run

    variants = (
        *select_variants(NAIVE),
        BlockVariant("wrong", wrong, "nobody"),
        BlockVariant("far off", far_off, "nobody", compares_bits=False),
        BlockVariant("broken", broken, "nobody"),
        BlockVariant("breaks later", breaks_later, "nobody"),
    )
    not_run: dict[str, str] = {"skipped": "known before"}
    site = BlockSite(context, WeightStore())
    with torch.no_grad(), UlyssesCommunicator(device=context.device, name="test.rows") as comm:
        return block_rows(site, comm, TINY, variants, EFFORT, not_run), not_run


def test_a_wrong_output_is_seen_and_a_broken_variant_has_a_reason_and_no_row() -> None:
    by_rank = run_ranks(_one_wrong_and_one_broken, None, cpu_ranks())
    for rows, not_run in by_rank:
        exact = {(row.details or {})["variant"]: row.exact for row in rows}
        assert exact == {COMPUTE: None, NAIVE: True, "wrong": False}
        assert not_run.pop("far off/eager").startswith("its output is off by 2.")
        assert not_run == {
            "skipped": "known before",
            "broken": "rank 1: RuntimeError: no such kernel",
            "breaks later/eager": "rank 0: ValueError: refused",
        }


# ---- trials --------------------------------------------------------------------------------------


def test_a_trial_runs_on_cpu_ranks() -> None:
    names = tuple(v.name for v in select_variants("all") if not v.is_risky)
    parts: list[Tried] = []
    run_ranks(try_rank, TrialJob(TINY, names), cpu_ranks(), on_part=parts.append)
    assert [part.name for part in parts if part.is_done] == list(names)
    assert all(part.not_run == {} for part in parts)
    assert all(set(part.timelines) == {"eager"} for part in parts if part.is_done)


class Ranks:
    """Ranks that hang at what they are told to, in a trial or in its profile."""

    def __init__(self, *hangs: str) -> None:
        self.hangs = hangs
        self.launches: list[tuple[str, ...]] = []

    def __call__(self, work: Any, job: TrialJob, launch: Launch, **calls: Any) -> None:
        self.launches.append(job.names)
        for name in job.names:
            if name in self.hangs:
                message = f"ranks 0, 1 (at '{name}') of 2 were ended after 45 s"
                raise RankError(message)
            if job.is_profiled:
                calls["on_part"](Tried(name, is_done=False))
                if f"profile of {name}" in self.hangs:
                    message = f"ranks 0, 1 (at 'profile of {name}') of 2 were ended"
                    raise RankError(message)
            calls["on_part"](Tried(name))


NAMES = (COMPUTE, OURS, NAIVE, "zero-CTA", "flashinfer")


def _try(monkeypatch: pytest.MonkeyPatch, ranks: Ranks, limit_s: float = 100.0) -> dict[str, Tried]:
    monkeypatch.setattr(block_trial, "run_ranks", ranks)
    return try_variants(TrialJob(TINY, NAMES), replace(cpu_ranks(), limit_s=limit_s))


def test_what_hangs_in_its_trial_costs_itself_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks("zero-CTA")
    tried = _try(monkeypatch, ranks)
    assert set(tried) == set(NAMES)
    assert tried["zero-CTA"].not_run["zero-CTA"].startswith("did not survive its trial: ranks 0, 1")
    assert all(tried[name].not_run == {} for name in NAMES if name != "zero-CTA")
    assert ranks.launches == [NAMES, ("flashinfer",)]


def test_a_profile_that_hangs_is_no_reason_to_leave_a_variant_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks = Ranks(f"profile of {OURS}")
    tried = _try(monkeypatch, ranks)
    assert set(tried[OURS].not_run) == {f"{OURS}/profile"}
    assert ranks.launches == [NAMES, NAMES[2:]]  # and no more profiles, which would hang alike


@pytest.mark.parametrize(("hang", "limit_s"), [(COMPUTE, 100.0), ("", 0.0)])
def test_what_is_risky_and_was_not_tried_is_not_run(
    monkeypatch: pytest.MonkeyPatch, hang: str, limit_s: float
) -> None:
    tried = _try(monkeypatch, Ranks(hang), limit_s)
    assert set(tried) == {"zero-CTA", "flashinfer"}  # ours and plain NCCL are run all the same
    assert all(one.not_run[name] for name, one in tried.items())


def test_variants_are_selected_by_name_beside_those_of_comparison() -> None:
    assert [v.name for v in select_variants("ours")] == [COMPUTE, OURS, NAIVE]
    with pytest.raises(ValueError, match=r"variants: \['best'\] are unknown"):
        select_variants("best")
