"""The benchmark of all-gathers on CPU ranks: exact, uneven shards too; judged; in a table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from recorded import MACHINE, a_row

from ulysses_ops.communicator import UlyssesCommunicator
from ulysses_ops.tools import readme_tables
from ulysses_ops.tools.all_gather_rows import LARGE_BYTES, all_gather_rows, judged
from ulysses_ops.tools.baselines import NcclAllGather
from ulysses_ops.tools.benchmark_job import BenchmarkJob, run_rank
from ulysses_ops.tools.benchmark_plan import ALL_GATHER, Choice, plan_benchmark, plan_functional
from ulysses_ops.tools.launch import Launch, RankContext, run_ranks
from ulysses_ops.tools.markdown import read_records
from ulysses_ops.tools.report import Outcome
from ulysses_ops.tools.results import Row, rows_to_json, write_results
from ulysses_ops.tools.shapes import FUNCTIONAL_GATHERED, GATHERED, Shape
from ulysses_ops.tools.timing import Effort

EFFORT = Effort(2, 0.5)
ON_CPU = Launch(2, "cpu", 0, 90.0)
UNEVEN = FUNCTIONAL_GATHERED[1]


def test_a_functional_run_is_exact() -> None:
    plan = plan_functional(2, 0, 90.0, Choice(only=ALL_GATHER))
    outcomes: list[Outcome] = run_ranks(run_rank, plan.jobs, plan.launch)
    rows = outcomes[0].rows
    assert [(row.model, (row.details or {})["variant"]) for row in rows] == [
        (shape.title, variant) for shape in FUNCTIONAL_GATHERED for variant in ("ours", "baseline")
    ]
    assert all(row.exact and row.op == "all_gather" for row in rows)
    assert rows[0].bytes_per_peer == 16 * 72 * 2  # a whole shard, not the part of some heads
    assert rows[-1].bytes_per_peer == 15 * 2 * 16 * 2  # of the rank that has a row more
    assert all(row.x_nccl_eager is not None for row in rows[::2])


def _rows_by_wrong_ranks(context: RankContext, argument: None) -> list[tuple[Any, Any]]:
    """The backend of rank 1 delivers the shards in the wrong order."""
    right: Callable[..., torch.Tensor] = NcclAllGather.result

    def wrong(gathered: NcclAllGather) -> torch.Tensor:
        return right(gathered).flip(1) if context.rank == 1 else right(gathered)

    with (
        mock.patch.object(NcclAllGather, "result", wrong),
        UlyssesCommunicator(device=context.device, name="test.all_gather") as comm,
    ):
        rows = all_gather_rows(context, comm, UNEVEN, Effort(1, 0.5))
    return [((row.details or {})["variant"], row.exact) for row in rows]


def test_rows_in_the_wrong_order_are_seen_by_all_ranks() -> None:
    for exact in run_ranks(_rows_by_wrong_ranks, None, ON_CPU):
        assert exact == [("ours", False), ("baseline", False)]


def _batches(context: RankContext, argument: None) -> bool:
    """Two of a batch, uneven: what is padded on the way is not in the result."""
    shape = Shape("batch", "batch of 2", 7, 1, 3, batch=2)
    whole = torch.arange(42, dtype=torch.float32).view(shape.dims)
    shard = whole.split([4, 3], dim=1)[context.rank].contiguous()
    gather = NcclAllGather(shape, context, torch.float32)
    gather.clear()
    with mock.patch.object(dist, "all_gather_single", None, create=True):
        by_older_name = torch.equal(gather(shard), whole)
    return by_older_name and torch.equal(gather(shard), whole)


def test_the_baseline_pads_and_unpacks() -> None:
    assert run_ranks(_batches, None, ON_CPU) == [True, True]


# ---- what is planned -----------------------------------------------------------------------------


def test_it_has_shapes_and_a_file_of_its_own() -> None:
    launch = Launch(2, "cuda", 2)
    (plan,) = plan_benchmark(launch, Choice(only="all_gather"), EFFORT)
    (job,) = plan.jobs
    assert isinstance(job, BenchmarkJob)
    assert (plan.name, job.shapes, job.sections) == ("all_gather", GATHERED, (ALL_GATHER,))
    (one,) = plan_benchmark(launch, Choice("indexer-8k", "all_gather"), EFFORT)
    assert [shape.key for shape in one.jobs[0].shapes] == ["indexer-8k"]
    assert ALL_GATHER not in [plan.name for plan in plan_benchmark(launch, Choice(), EFFORT)]
    with pytest.raises(ValueError, match=r"'flux' has none of what \['all_gather'\] measures"):
        plan_benchmark(launch, Choice("flux", "all_gather"), EFFORT)


def test_shapes_reach_from_one_megabyte_to_sixty_four() -> None:
    sizes = [shape.seq // 2 * shape.heads * shape.head_dim * 2 for shape in GATHERED]
    assert min(sizes) < 1.2e6
    assert sum(size >= LARGE_BYTES for size in sizes) >= 3
    assert [shape.key for shape in GATHERED if shape.seq % 2] == ["latents-uneven"]


# ---- what is said of the rows --------------------------------------------------------------------


def gathered(**changes: Any) -> Row:
    return a_row(op="all_gather", model="latents", **{"bytes_per_peer": LARGE_BYTES, **changes})


def test_only_ours_in_a_graph_is_judged_and_only_where_it_is_large() -> None:
    fast, slow = judged(gathered(percent_of_flat=90.0)), judged(gathered(percent_of_flat=89.9))
    assert [(row.details or {})["is_fast_enough"] for row in (fast, slow)] == [True, False]
    for row in (
        gathered(bytes_per_peer=LARGE_BYTES - 1),
        gathered(mode="eager"),
        gathered(percent_of_flat=None),
        gathered(details={"variant": "flat"}),
    ):
        assert judged(row) is row


def test_the_table_says_what_is_needed(tmp_path: Path) -> None:
    rows = [
        judged(gathered()),
        judged(gathered(percent_of_flat=60.0, exact=False)),
        gathered(mode="eager", bytes_per_peer=1_000_000),
        gathered(details={"variant": "baseline"}),
    ]
    write_results(tmp_path, "all_gather", MACHINE, "abc", {"rows": rows_to_json(rows)})
    on_cpu = replace(MACHINE, gpu="cpu", gpu_count=0)
    write_results(tmp_path, "all_gather", on_cpu, "abc", {"rows": rows_to_json(rows)})
    table = readme_tables.render("all_gather", read_records(tmp_path))
    shape = "[1, 32760, 40, 128]"
    large = f"| latents, graph | {shape} | 64.0 | 100.0 | 120.0 | 10 |"
    assert table.splitlines()[4:] == [
        f"{large} 95 % | 90 %: yes | 2.30 | yes |",
        f"{large} 60 % | 90 %: **no** | 2.30 | **no** |",
        f"| latents, eager | {shape} | 1.0 | 100.0 | 120.0 | 10 | 95 % |  | 2.40 | yes |",
    ]
