"""One step under torch's profiler."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from ulysses_ops.tools.launch import RankContext
from ulysses_ops.tools.timeline import STEP, Timeline, read_trace

STEPS = 3  # the first ones pay for what the profiler sets up


def profile_step(context: RankContext, run: Callable[[], object], what: str) -> Timeline:
    """Run a few steps under the profiler and return the last. Collective.

    The profiler stays in the process and slows down what the host does there: nothing is timed
    after it.
    """
    activities = [ProfilerActivity.CPU]
    if context.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    context.line_up(f"profile of {what}")
    with profile(activities=activities) as profiler:
        for _ in range(STEPS):
            with record_function(STEP):
                run()
            context.line_up(f"profile of {what}")
        if context.device.type == "cuda":
            torch.cuda.synchronize(context.device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return read_trace(json.loads(path.read_text()))
