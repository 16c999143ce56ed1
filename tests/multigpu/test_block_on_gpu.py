"""The block of the benchmark on two GPUs: captured, compared, and counted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from ulysses_ops.tools.benchmark_plan import Choice, launch_on_gpus, plan_benchmark
from ulysses_ops.tools.benchmark_run import Keeping, run_plans
from ulysses_ops.tools.block_variants import VARIANTS
from ulysses_ops.tools.timing import Effort

LIMIT_S = 200.0
PLAIN = {variant.name for variant in VARIANTS if not variant.is_risky}
COMPARED = {v.name for v in VARIANTS if v.compares_bits and not v.is_blind}
BOUNDED = {v.name for v in VARIANTS if not v.compares_bits and not v.is_blind}


@pytest.mark.slow
@pytest.mark.two_gpus
def test_every_variant_that_runs_is_exact_eager_and_in_a_graph(tmp_path: Path) -> None:
    launch = launch_on_gpus(2, 2, oversubscribe=False, limit_s=LIMIT_S)
    plans = plan_benchmark(launch, Choice(shapes="flux", only="block"), Effort(3, 10.0))
    finished = run_plans(Console(quiet=True), plans, Keeping(tmp_path, "tested"), LIMIT_S)
    assert finished.failures == []
    (outcome,) = finished.outcomes
    found = {((row.details or {})["variant"], row.mode): row for row in outcome.rows}
    assert {(name, mode) for name in PLAIN for mode in ("eager", "graph")} <= set(found)
    for (name, mode), row in found.items():
        assert row.exact is (True if name in COMPARED else None), (name, mode)
        assert ((row.details or {})["relative_error"] is not None) is (name in BOUNDED), name
        assert row.peak_bytes is not None and row.peak_bytes > 0
    for name in PLAIN:
        in_graph, eager = found[name, "graph"].launches, found[name, "eager"].launches
        assert in_graph is not None and eager is not None and in_graph < eager
    named = {name.partition("/")[0].removeprefix("block: ") for name in outcome.not_run}
    ran = {name for name, _ in found}
    assert {variant.name for variant in VARIANTS} <= ran | named  # no variant without row or reason
    timelines = next(path for path in finished.written if path.stem == "block_timeline")
    exchanged = json.loads(timelines.read_text())["timelines"]["ours/graph"]
    assert exchanged["exchange_us"] > 0
    assert exchanged["exposed_us"] + exchanged["hidden_us"] == pytest.approx(
        exchanged["exchange_us"], abs=0.01
    )
