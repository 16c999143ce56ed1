"""Traces of a profiler, read: what is hidden, what is exposed, what was launched."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ulysses_ops.tools.timeline import ON_GPU, STEP, Timeline, merged, overlap, read_trace


def event(name: str, cat: str, start: float, end: float, stream: int = 7) -> dict[str, Any]:
    args = {"stream": stream} if cat in ("kernel", "gpu_memcpy") else {}
    call = {"ph": "X", "name": name, "cat": cat, "ts": start, "dur": end - start, "args": args}
    return call if cat in ON_GPU else {**call, "tid": 1}


def a_trace(*more: dict[str, Any]) -> dict[str, Any]:
    """A step from 1000: a GEMM, a copy to the peer half under it, the rest of it exposed."""
    return {
        "traceEvents": [
            {"ph": "M", "name": "process_name", "args": {}},
            event(STEP, "user_annotation", 100, 150),
            event("cudaGraphLaunch", "cuda_runtime", 110, 120),
            event("gemm", "kernel", 200, 300),
            event(STEP, "user_annotation", 1000, 1050),
            event("cudaGraphLaunch", "cuda_runtime", 1010, 1020),
            event("cudaEventRecord", "cuda_runtime", 1021, 1022),
            event("cudaDeviceSynchronize", "cuda_runtime", 1060, 1900),
            event("gemm", "kernel", 1100, 1200),
            event("Memcpy PtoP (Device -> Device)", "gpu_memcpy", 1150, 1250, 9),
            event("attention", "kernel", 1300, 1400),
            *more,
        ]
    }


def test_a_step_is_split_into_what_hides_and_what_does_not() -> None:
    line = read_trace(a_trace())
    assert [(a.name[:11], a.kind, a.stream, a.span) for a in line.activities] == [
        ("gemm", "kernel", 7, (0.0, 100.0)),
        ("Memcpy PtoP", "exchange", 9, (50.0, 150.0)),
        ("attention", "kernel", 7, (200.0, 300.0)),
    ]
    assert line.launches == 1  # of the last step alone, and no event, and no synchronisation
    assert line.numbers() == {
        "step_us": 300.0,
        "compute_us": 200.0,
        "exchange_us": 100.0,
        "hidden_us": 50.0,
        "exposed_us": 50.0,
        "idle_us": 50.0,
    }


@pytest.mark.parametrize(
    ("name", "cat", "kind"),
    [
        ("ncclDevKernel_SendRecv(...)", "kernel", "exchange"),
        ("Memcpy DtoD (Device -> Device)", "gpu_memcpy", "copy"),
        ("triton_red_fused_norm", "kernel", "kernel"),
    ],
)
def test_kinds_follow_from_names(name: str, cat: str, kind: str) -> None:
    line = read_trace(a_trace(event(name, cat, 1500, 1600)))
    assert line.activities[-1].kind == kind


def test_an_exchange_under_another_exchange_is_not_hidden() -> None:
    line = read_trace(a_trace(event("Memcpy PtoP", "gpu_memcpy", 1210, 1260, 11)))
    assert line.numbers()["exchange_us"] == 110.0
    assert line.numbers()["exposed_us"] == 60.0


def test_launches_of_every_kind_count() -> None:
    calls = ["cudaLaunchKernelExC", "cuLaunchKernel", "cudaMemcpy2DAsync", "cuStreamBatchMemOp_v2"]
    more = [event(name, "cuda_runtime", 1030, 1031) for name in calls]
    others = [event(name, "cuda_driver", 1032, 1033) for name in ("cuStreamWaitEvent", "cuCtxGetX")]
    beside = [{**event(name, "cuda_runtime", 1034, 1035), "tid": 2} for name in calls]
    assert read_trace(a_trace(*more, *others, *beside)).launches == 1 + len(calls)


def test_a_trace_without_a_mark_is_refused() -> None:
    with pytest.raises(ValueError, match=f"no range named '{STEP}'"):
        read_trace({"traceEvents": [event("gemm", "kernel", 0, 1)]})


def test_a_step_without_gpu_has_no_length() -> None:
    line = read_trace({"traceEvents": [event(STEP, "user_annotation", 0, 5)]})
    assert line.activities == ()
    assert set(line.numbers().values()) == {0.0}


def test_timelines_survive_json() -> None:
    line = read_trace(a_trace())
    assert Timeline.from_json(json.loads(json.dumps(line.to_json()))) == line


def test_spans_are_merged_and_overlaid() -> None:
    assert merged([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0), (3.0, 4.0)]) == [(0.0, 4.0), (5.0, 6.0)]
    assert overlap([(0.0, 4.0)], [(1.0, 2.0), (3.0, 5.0)]) == [(1.0, 2.0), (3.0, 4.0)]
    assert overlap([(0.0, 1.0)], [(1.0, 2.0)]) == []
