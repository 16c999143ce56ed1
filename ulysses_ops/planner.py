"""Chooses a schedule from shapes and measured constants. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import get_args

from .constants import Constants
from .forecast import AfterSplit, Forecast, forecast_after, forecast_before, forecast_gemms
from .kinds import whole_numbers
from .qkv_projection import fits_kernel
from .schedule import (
    NormRopePlace,
    OutputSplit,
    Problem,
    ProjectionSplit,
    QkvWeights,
    Schedule,
)

HEAD_CHUNKS = (2, 4)
# Packed weights pay where the GEMMs of V, K and Q take 190 and 640 us, and not at 3450 us, on two
# H200 (docs/design/schedule.md).
PACKED_BELOW_US = 1000.0
# One kernel for them, norm and RoPE included, pays at 190 us and not at 640 us (the same page).
EPILOGUE_BELOW_US = 400.0


@dataclass(frozen=True)
class Plan:
    """What the planner chose, and why.

    Attributes:
        schedule: The choice.
        explanation: Every candidate with its prediction, as text.
        before: Forecasts from the input to Q, K and V on every rank, by candidate.
        after: Forecasts from there to the layer's output.
        packed_bytes: Memory of weights held twice by the choice, biases aside.
    """

    schedule: Schedule
    explanation: str
    before: dict[ProjectionSplit, Forecast]
    after: dict[AfterSplit, Forecast]
    packed_bytes: int

    @property
    def total_us(self) -> float:
        """Prediction for the chosen schedule."""
        chosen = self.schedule
        after = self.after[chosen.attention, chosen.output, chosen.head_chunks]
        return self.before[chosen.projection].total_us + after.total_us


@lru_cache(maxsize=256)
def plan_schedule(problem: Problem, constants: Constants) -> Plan:
    """Predict every candidate and choose the shortest; of equals, the one that splits least.

    Pure: ranks that give the same sizes and constants get the same plan.
    """
    # With one peer, its part and that of all peers are the same; with none there is no part.
    splits = get_args(ProjectionSplit)[: min(problem.world_size, 3)]
    gemms_us = forecast_gemms(problem, constants)
    fits = problem.may_pack and not problem.norm_rope.is_identity
    packs = fits and gemms_us < PACKED_BELOW_US
    parts: QkvWeights = "packed" if packs else "apart"
    sizes = (problem.head_dim, problem.width, problem.norm_rope.norm, problem.world_size)
    is_one = (
        packs and problem.itemsize == 2 and fits_kernel(*sizes) and gemms_us < EPILOGUE_BELOW_US
    )
    place: NormRopePlace = "epilogue" if is_one else "apart"
    before = {split: forecast_before(problem, constants, split, parts, place) for split in splits}
    candidates: list[AfterSplit] = [
        (attention, output, 1) for attention, output in product(splits, get_args(OutputSplit))
    ]
    candidates += [
        ("heads", "slabs", n) for n in HEAD_CHUNKS if problem.can_chunk(n) and len(splits) > 1
    ]
    after = {split: forecast_after(problem, constants, split) for split in candidates}
    # To the picosecond: sums of the same parts in another order differ in their last bits.
    projection = min(before, key=lambda split: round(before[split].total_us, 6))
    rest = min(after, key=lambda split: round(after[split].total_us, 6))
    weights, place = (parts, place) if projection != "whole" else ("apart", "apart")
    schedule = Schedule(projection, *rest, qkv_weights=weights, norm_rope=place)
    copied = _packed_bytes(problem) if weights == "packed" else 0
    why = _explain_weights(problem, schedule, gemms_us)
    explanation = _explain(problem, constants, schedule, before, after)
    return Plan(schedule, f"{explanation}\n{why}", before, after, copied)


def planned_shape(shape: object) -> tuple[int, int, int]:
    """The shape that a plan is asked for.

    Raises:
        ValueError: it is not three whole numbers of at least 1.
    """
    what = "(B, S_local, width), whole numbers of at least 1"
    sizes = whole_numbers("UlyssesAttention.plan", "shape", shape, what)
    if len(sizes) != 3 or min(sizes) < 1:
        message = f"UlyssesAttention.plan: shape={list(sizes)} must be {what}"
        raise ValueError(message)
    batch, rows, width = sizes
    return batch, rows, width


def _packed_bytes(p: Problem) -> int:
    """Weights of Q, K and V, or of Q and K where V is multiplied by itself."""
    num_kv = 1 if p.norm_rope.norm == "across_heads" else 2
    return (p.heads + num_kv * p.kv_heads) * p.head_dim * p.width * p.itemsize


def _explain_weights(p: Problem, schedule: Schedule, gemms_us: float) -> str:
    if schedule.projection == "whole":
        return "weights apart: whole projections need no copy of them"
    if not p.may_pack:
        return "weights apart: pack_weights is not given"
    if p.norm_rope.is_identity:
        return "weights apart: without norm and RoPE there is no fused kernel to go with a copy"
    if schedule.qkv_weights == "apart":
        return (
            f"weights apart: whole GEMMs of {gemms_us:.1f} us are not under the "
            f"{PACKED_BELOW_US:.0f} us below which a packed copy pays"
        )
    one = (
        f"; under {EPILOGUE_BELOW_US:.0f} us also with norm and RoPE in the epilogue of their GEMM"
        if schedule.norm_rope == "epilogue"
        else ""
    )
    names = "Q and K" if p.norm_rope.norm == "across_heads" else "Q, K and V"
    return (
        f"weights packed: whole GEMMs of {gemms_us:.1f} us are under {PACKED_BELOW_US:.0f} us; "
        f"where the fused kernel fits, the weights of {names} are held twice, "
        f"{_packed_bytes(p)} bytes more{one}"
    )


def _explain(
    p: Problem,
    constants: Constants,
    schedule: Schedule,
    before: dict[ProjectionSplit, Forecast],
    after: dict[AfterSplit, Forecast],
) -> str:
    chosen = (schedule.attention, schedule.output, schedule.head_chunks)
    titled = {
        f"attention {attention}, output {output}" + (f", {n} chunks" if n > 1 else ""): forecast
        for (attention, output, n), forecast in after.items()
    }
    marks = [split == chosen for split in after]
    lines = [
        f"B={p.batch} S={p.seq} H={p.heads} H_kv={p.kv_heads} D={p.head_dim} W={p.world_size}",
        f"width {p.width} to {p.out_width}, norm {p.norm_rope.norm}, rope {p.norm_rope.rope}",
        f"constants of {constants.device}: {constants.source}",
        "from the input to Q, K and V on every rank:",
        *_table(
            {f"projection {split}": f for split, f in before.items()},
            [split == schedule.projection for split in before],
        ),
        "from there to the output:",
        *_table(titled, marks),
    ]
    return "\n".join(lines)


def _table(forecasts: dict[str, Forecast], marks: list[bool]) -> list[str]:
    return [
        f"{'->' if marked else '  '} {title}: {forecast.total_us:.1f} us, "
        f"{forecast.computed_us:.1f} of computing and {forecast.waited_us:.1f} of waiting"
        for marked, (title, forecast) in zip(marks, forecasts.items(), strict=True)
    ]
