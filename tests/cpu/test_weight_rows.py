"""The benchmark of sharded weights on CPU ranks: every way gives the same bits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from ulysses_ops.tools.launch import Launch, run_ranks
from ulysses_ops.tools.shapes import Shape
from ulysses_ops.tools.timing import Effort
from ulysses_ops.tools.weight_rows import BASELINE, WHOLE, WeightJob, _Step, weight_rows

TINY = Shape("tiny", "tiny", 16, 4, 8)


def test_every_way_is_exact_and_tells_what_it_saves() -> None:
    job = WeightJob((TINY,), 5, Effort(1, 0.1))
    by_rank: Any = run_ranks(weight_rows, job, Launch(2, "cpu", 0, 100.0))
    machine, rows = by_rank[0]
    assert machine.gpu == "cpu"
    assert all(row.exact for row in rows)
    by_way = {row.op.rpartition("weights ")[2]: row for row in rows}
    assert set(by_way) == {WHOLE, "prefetched", "gathered when needed", BASELINE}
    whole_bytes = 32 * 32 * 4
    assert by_way["prefetched"].details["saved_bytes"] == 3 * whole_bytes - 5 * whole_bytes // 2
    assert by_way["prefetched"].bytes_per_peer == whole_bytes // 2
    assert by_way[WHOLE].bytes_per_peer == 0
    assert by_way[WHOLE].details["exposed_us"] == 0


def test_another_weight_gives_another_result() -> None:
    context: Any = SimpleNamespace(device=torch.device("cpu"), world_size=1)
    step = _Step(context, TINY, 3)
    good = step.run(step.weights.__getitem__, lambda layer: None)
    assert torch.equal(good, step.run(step.weights.__getitem__, lambda layer: None))
    wrong = step.run(lambda layer: step.weights[2 - layer], lambda layer: None)
    assert not torch.equal(good, wrong)
