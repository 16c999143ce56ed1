"""The planner: properties of its clocks, its choices at known shapes, refusals, the constants."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ulysses_ops.constants import rate_at, read_constants, shipped_constants
from ulysses_ops.forecast import forecast_after, forecast_before, forecast_gemms
from ulysses_ops.norm_rope_checks import NORMS, ROPES
from ulysses_ops.part_norm_rope import NormRope
from ulysses_ops.planner import PACKED_BELOW_US, plan_schedule
from ulysses_ops.schedule import PEERS_FIRST, PLAIN, Problem, Schedule, peer_groups

H200 = shipped_constants()
# Rates that do not depend on size: what is left of a split's price is its tiles.
FLAT = replace(H200, gemm_rates=((1.0, 700.0),), attention_rates=((1.0, 500.0),))
FREE_LINK = replace(
    FLAT, peer_copy_gbs=math.inf, own_copy_gbs=math.inf, copy_launch_us=0.0, handshake_us=0.0
)


def problem(
    seq: int,
    heads: int,
    world_size: int = 2,
    norm_rope: NormRope = NormRope("per_head", "interleaved"),  # noqa: B008
    **sizes: int,
) -> Problem:
    width = heads * 128
    values: dict[str, Any] = {
        "batch": 1,
        "kv_heads": heads,
        "head_dim": 128,
        "width": width,
        "out_width": width,
        "itemsize": 2,
        **sizes,
    }
    values["may_pack"] = True
    return Problem(seq=seq, heads=heads, world_size=world_size, norm_rope=norm_rope, **values)


FLUX, WAN, H3 = problem(4608, 24), problem(32760, 40), problem(37888, 56)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    world_size = draw(st.sampled_from([1, 2, 3, 4, 8]))
    kv_heads = draw(st.integers(1, 6)) * world_size
    heads = kv_heads * draw(st.sampled_from([1, 2, 4]))
    return Problem(
        batch=draw(st.integers(1, 2)),
        seq=draw(st.integers(1, 6000)) * world_size,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([64, 128])),
        width=draw(st.integers(1, 8192)),
        out_width=draw(st.integers(1, 8192)),
        world_size=world_size,
        itemsize=draw(st.sampled_from([2, 4])),
        norm_rope=NormRope(draw(st.sampled_from(NORMS)), draw(st.sampled_from(ROPES))),
        may_pack=draw(st.booleans()),
    )


@given(problems())
@settings(max_examples=60, deadline=None)
def test_the_choice_is_the_shortest_candidate(p: Problem) -> None:
    plan = plan_schedule(p, H200)
    chosen = plan.schedule
    before = plan.before[chosen.projection]
    after = plan.after[chosen.attention, chosen.output, chosen.head_chunks]
    least = [min(f.total_us for f in plans.values()) for plans in (plan.before, plan.after)]
    assert [before.total_us, after.total_us] == pytest.approx(least, abs=2e-6)
    assert plan.total_us == before.total_us + after.total_us
    assert "whole" in plan.before
    assert ("whole", "whole", 1) in plan.after
    assert plan.explanation.count("->") == 2
    assert plan.explanation.count(" us, ") == len(plan.before) + len(plan.after)
    assert plan_schedule(p, H200) == plan  # ranks that ask the same agree


@given(problems())
@settings(max_examples=60, deadline=None)
def test_splitting_never_computes_less(p: Problem) -> None:
    """With flat rates, parts have at least the tiles of the whole, and their own last waves."""
    plan = plan_schedule(p, FREE_LINK)
    for split in plan.before:
        forecast = forecast_before(p, FREE_LINK, split)
        assert forecast.computed_us >= plan.before["whole"].computed_us * (1 - 1e-9)
        assert forecast.waited_us == pytest.approx(0, abs=1e-6)
    for after in plan.after.values():
        assert after.computed_us >= plan.after["whole", "whole", 1].computed_us * (1 - 1e-9)


@given(problems())
@settings(max_examples=30, deadline=None)
def test_nothing_is_split_where_there_is_nothing_to_hide(p: Problem) -> None:
    """Packed weights alone may still pay: two GEMMs of a rank instead of three."""
    schedule = plan_schedule(p, FREE_LINK).schedule
    parts = replace(schedule, projection="whole", qkv_weights="apart", norm_rope="apart")
    assert parts == PLAIN
    assert (schedule.projection == "whole") is (schedule.qkv_weights == "apart")


@given(problems(), st.floats(1.0, 500.0))
@settings(max_examples=60, deadline=None)
def test_a_slower_link_never_helps(p: Problem, gbs: float) -> None:
    fast, slow = (replace(FLAT, peer_copy_gbs=rate) for rate in (gbs, gbs / 2))
    faster, slower = plan_schedule(p, fast), plan_schedule(p, slow)
    assert slower.total_us >= faster.total_us - 1e-6
    for split, forecast in slower.before.items():
        assert forecast.total_us >= faster.before[split].total_us - 1e-6


@given(problems())
@settings(max_examples=30, deadline=None)
def test_one_rank_waits_for_nobody(p: Problem) -> None:
    plan = plan_schedule(replace(p, world_size=1), H200)
    assert all(forecast.waited_us == 0 for forecast in plan.before.values())
    assert all(forecast.waited_us == 0 for forecast in plan.after.values())


def test_a_last_wave_is_what_a_split_costs() -> None:
    """132 tiles of a GEMM are one wave; halves of 66 tiles are two."""
    tiles = replace(FREE_LINK, num_sms=132, elementwise_gbs=1e12)
    # 11 x 12 tiles of 128 x 256: M = 1408 rows, N = 24 heads of 128
    p = problem(2816, 24, norm_rope=NormRope())
    wave_us = 2 * 132 * 128 * 256 * p.width / 700e12 * 1e6
    assert forecast_before(p, tiles, "whole").total_us == pytest.approx(3 * wave_us, rel=1e-6)
    assert forecast_before(p, tiles, "peers").total_us == pytest.approx(6 * wave_us, rel=1e-6)


def test_what_waits_is_the_last_transfer() -> None:
    """Whole projections: nothing is left to compute behind Q, whose copy is waited for."""
    constants = replace(FLAT, handshake_us=5.0, copy_launch_us=2.0, peer_copy_gbs=400.0)
    copy_us = 2304 * 12 * 128 * 2 / 400e3
    own_us = 2304 * 12 * 128 * 2 / (constants.own_copy_gbs * 1e3)
    waited = forecast_before(FLUX, constants, "whole").waited_us
    assert waited == pytest.approx(copy_us + 2.0 + 5.0 - own_us, abs=1e-6)
    assert forecast_before(FLUX, constants, "peers").waited_us == 0


def test_two_ranks_at_known_shapes() -> None:
    """Large shapes hide the gather behind the own slab; small ones split the rows."""
    for p in (FLUX, WAN, H3):
        plan = plan_schedule(p, H200)
        assert plan.schedule.projection == "peers"
        after = plan.after[plan.schedule.attention, plan.schedule.output, 1]
        assert after.waited_us < 0.02 * after.total_us
    plan = plan_schedule(H3, H200)
    assert (plan.schedule.attention, plan.schedule.output) == ("whole", "slabs")


def test_a_norm_across_heads_multiplies_k_and_q_whole() -> None:
    across = replace(WAN, norm_rope=NormRope("across_heads", "interleaved"))
    only_v_split = forecast_before(across, FREE_LINK, "peers").computed_us
    all_split = forecast_before(WAN, FREE_LINK, "peers").computed_us
    statistics_us = 2 * 16380 * 5120 * 2 / (FREE_LINK.elementwise_gbs * 1e3)
    assert only_v_split <= all_split + statistics_us + 1e-6
    assert forecast_after(across, FLAT, ("whole", "whole", 1)) == forecast_after(
        WAN, FLAT, ("whole", "whole", 1)
    )


def test_weights_are_packed_where_the_gemms_are_short() -> None:
    for p, is_short in ((FLUX, True), (problem(6240, 40), True), (WAN, False), (H3, False)):
        gemms_us = forecast_gemms(p, H200)
        plan = plan_schedule(p, H200)
        assert (gemms_us < PACKED_BELOW_US) is is_short
        assert plan.schedule.qkv_weights == ("packed" if is_short else "apart")
        assert plan.packed_bytes == (3 * p.width * p.width * 2 if is_short else 0)
        line = plan.explanation.splitlines()[-1]
        assert f"whole GEMMs of {gemms_us:.1f} us are" in line
        assert (f"held twice, {plan.packed_bytes} bytes more" in line) is is_short


def test_packed_parts_are_fewer_gemms() -> None:
    """One for each group of peers and two for the own heads; not so across heads."""
    p = replace(FLUX, norm_rope=NormRope("per_head", "interleaved"))
    apart, packed = (forecast_before(p, H200, "peers", w) for w in ("apart", "packed"))
    assert packed.computed_us < apart.computed_us
    across = replace(p, norm_rope=NormRope("across_heads", "interleaved"))
    assert forecast_before(across, H200, "peers", "packed") == forecast_before(
        across, H200, "peers"
    )
    assert forecast_before(p, H200, "whole", "packed") == forecast_before(p, H200, "whole")


def test_one_kernel_is_chosen_where_it_fits_and_pays() -> None:
    """Heads of 128 in 16 bit, no norm across heads, short GEMMs."""
    for p in (FLUX, replace(FLUX, kv_heads=8)):
        chosen = plan_schedule(p, H200)
        assert (chosen.schedule.qkv_weights, chosen.schedule.norm_rope) == ("packed", "epilogue")
        assert "norm and RoPE in the epilogue" in chosen.explanation.splitlines()[-1]
        packed = forecast_before(p, H200, "peers", "packed")
        one = forecast_before(p, H200, "peers", "packed", "epilogue")
        assert one == chosen.before["peers"]
        assert one.computed_us < packed.computed_us
    across = NormRope("across_heads", "interleaved")
    for p in (
        problem(6240, 40),
        replace(FLUX, norm_rope=across),
        replace(FLUX, itemsize=4),
        replace(FLUX, heads=48, kv_heads=48, head_dim=64),
        replace(FLUX, may_pack=False),
        replace(FLUX, width=3076),
        replace(FLUX, world_size=12, heads=24, kv_heads=24),
    ):
        assert plan_schedule(p, H200).schedule.norm_rope == "apart"


def test_the_gemms_alone_are_those_of_whole_projections() -> None:
    plain = replace(FLUX, norm_rope=NormRope(), world_size=1)
    whole = forecast_before(plain, H200, "whole").total_us
    assert forecast_gemms(plain, H200) == pytest.approx(whole)


def test_what_packing_needs_and_what_it_holds() -> None:
    """Not without a kernel, not for whole projections; across heads V is not held twice."""
    slow = replace(H200, peer_copy_gbs=100.0)
    bare = plan_schedule(replace(FLUX, norm_rope=NormRope()), slow)
    whole = plan_schedule(replace(FLUX, world_size=1), H200)
    assert (bare.schedule.qkv_weights, whole.schedule.qkv_weights) == ("apart", "apart")
    assert "there is no fused kernel" in bare.explanation
    unasked = plan_schedule(replace(WAN, may_pack=False), H200)
    assert unasked.schedule.qkv_weights == "apart"
    assert "pack_weights is not given" in unasked.explanation
    assert "whole projections need no copy" in whole.explanation
    grouped = replace(FLUX, kv_heads=8, norm_rope=NormRope("across_heads", "interleaved"))
    across, per_head = (
        plan_schedule(replace(grouped, norm_rope=NormRope(norm, "interleaved")), slow)
        for norm in ("across_heads", "per_head")
    )
    assert across.packed_bytes == (24 + 8) * 128 * FLUX.width * 2
    assert per_head.packed_bytes == (24 + 8 + 8) * 128 * FLUX.width * 2


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_groups_hold_every_peer_once_in_rotated_order(world_size: int) -> None:
    for rank in range(world_size):
        rotated = [(rank + step) % world_size for step in range(1, world_size)]
        for split in ("peers", "destinations"):
            groups = peer_groups(world_size, rank, split)
            assert [peer for group in groups for peer in group] == rotated
            assert all(groups)
        assert len(peer_groups(world_size, rank, "peers")) <= 2


# ---- refusals, constants -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({"projection": "rows"}, "projection='rows' must be one of"),
        ({"qkv_weights": "paired"}, "qkv_weights='paired' must be one of"),
        ({"norm_rope": "before"}, "norm_rope='before' must be one of"),
        ({"norm_rope": "epilogue"}, "norm_rope='epilogue' goes with qkv_weights='packed'"),
        ({"output": "heads"}, "output='heads' must be one of"),
        ({"attention": "heads", "output": "slabs"}, "'heads' goes with output='slabs' and 2"),
        ({"attention": "heads", "head_chunks": 2}, "'heads' goes with output='slabs' and 2"),
        ({"head_chunks": 2}, "head_chunks=2"),
    ],
)
def test_schedules_that_mean_nothing_are_refused(values: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Schedule(**values)


def test_sizes_that_cannot_be_split_are_refused() -> None:
    with pytest.raises(ValueError, match="must be divisible by world_size=2"):
        problem(4609, 24)
    with pytest.raises(ValueError, match="all sizes at least 1"):
        problem(4608, 24, batch=0)
    assert PEERS_FIRST != PLAIN


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({"gemm_rates": ()}, "gemm_rates must be rows"),
        ({"attention_rates": ((2.0, 1.0), (1.0, 1.0))}, "attention_rates must be rows"),
        ({"gemm_rates": ((1.0, 0.0),)}, "gemm_rates must be rows"),
        ({"peer_copy_gbs": 0.0}, "peer_copy_gbs=0.0 must be above 0"),
        ({"handshake_us": -1.0}, "handshake_us=-1.0"),
    ],
)
def test_constants_that_cannot_be_computed_with(values: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        replace(H200, **values)


def test_constants_there_and_back(tmp_path: Path) -> None:
    path = tmp_path / "constants.json"
    path.write_text(json.dumps(H200.to_json()))
    assert read_constants(path) == H200
    path.write_text(json.dumps({"device": "x"}))
    with pytest.raises(ValueError, match="missing or unknown; measure them again"):
        read_constants(path)
    assert H200.source
    assert H200.device


def test_rates_between_rows_and_beyond_them() -> None:
    table = ((10.0, 100.0), (20.0, 200.0))
    rates = [rate_at(table, size) for size in (1.0, 10.0, 15.0, 20.0, 99.0)]
    assert rates == [100.0, 100.0, 150.0, 200.0, 200.0]
