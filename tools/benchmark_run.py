"""Runs launches one after the other within one time limit, and keeps what they find at once."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from ulysses_ops.tools.benchmark_job import run_rank
from ulysses_ops.tools.benchmark_plan import Plan
from ulysses_ops.tools.block_job import SECTION as BLOCK
from ulysses_ops.tools.block_job import BlockJob
from ulysses_ops.tools.block_trial import TrialJob, Tried, try_variants, unavailable
from ulysses_ops.tools.block_variants import select_variants
from ulysses_ops.tools.kept_rows import keep_rows
from ulysses_ops.tools.launch import Launch, RankError, run_ranks
from ulysses_ops.tools.report import Outcome
from ulysses_ops.tools.results import write_results
from ulysses_ops.tools.shapes import BLOCKS
from ulysses_ops.tools.timeline import Timeline

TRIAL_PART = 0.4  # of the time of the blocks, at most
TIMELINE_FILE = "block_timeline"

Say = Callable[[str], None]


@dataclass(frozen=True)
class Keeping:
    """Where results are kept; nowhere without a folder."""

    folder: Path | None
    commit: str | None

    def keep(self, name: str, outcome: Outcome) -> tuple[Path | None, str]:
        """Write what was found beside what other runs have; and why these were not kept."""
        if self.folder is None:
            return None, ""
        return keep_rows(self.folder, name, outcome.machine, self.commit, outcome.content())


@dataclass
class Finished:
    """What came of all launches.

    Attributes:
        outcomes: One a launch, also of one that was cut off.
        written: Files.
        failures: Why launches were cut off.
        notes: What else is to be told.
    """

    outcomes: list[Outcome] = field(default_factory=list)
    written: list[Path] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def run_plans(console: Console, plans: list[Plan], keeping: Keeping, limit_s: float) -> Finished:
    """Run every launch; one that fails or is out of time does not keep the next from its share."""
    until = time.monotonic() + limit_s
    finished = Finished()
    columns = (
        SpinnerColumn(),
        BarColumn(bar_width=20),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starting ranks", total=limit_s)

        def say(text: str) -> None:
            done = limit_s - (until - time.monotonic())
            progress.update(task, description=text, completed=done)

        for number, plan in enumerate(plans):
            share = (until - time.monotonic()) / (len(plans) - number)
            _run_plan(plan, max(share, 1.0), keeping, finished, say)
    return finished


def _run_plan(plan: Plan, limit_s: float, keeping: Keeping, finished: Finished, say: Say) -> None:
    until = time.monotonic() + limit_s
    tried = _try_blocks(plan, limit_s * TRIAL_PART, say)
    jobs = [with_trials(job, tried) if _is_block(job) else job for job in plan.jobs]
    parts: list[Outcome] = []

    def keep(part: Outcome) -> None:
        path, why_anew = keeping.keep(plan.name, part)
        if why_anew:
            finished.notes.append(f"{plan.name}: earlier rows are not kept: {why_anew}")
        parts[:] = [part]  # each part holds those before it
        if path is not None and path not in finished.written:
            finished.written.append(path)

    launch = replace(plan.launch, limit_s=max(until - time.monotonic(), 1.0))
    try:
        run_ranks(run_rank, jobs, launch, on_progress=say, on_part=keep)
    except RankError as error:
        finished.failures.append(str(error))
    finished.outcomes += parts
    timelines = timelines_of(tried)
    if parts and timelines and keeping.folder is not None:
        content = {"timelines": {key: line.to_json() for key, line in timelines.items()}}
        machine = parts[0].machine
        path = write_results(keeping.folder, TIMELINE_FILE, machine, keeping.commit, content)
        finished.written.append(path)


def _try_blocks(plan: Plan, limit_s: float, say: Say) -> dict[str, Tried]:
    """Try variants ahead of the launch that times them; on GPUs, where they can do harm."""
    jobs = [job for job in plan.jobs if _is_block(job)]
    if not jobs or not jobs[0].shapes:
        return {}
    (job,) = jobs
    known = unavailable(plan.launch.device(0))
    tried = {name: Tried(name, {name: reason}) for name, reason in known.items()}
    if plan.launch.device_type == "cpu" or not job.trial:
        return tried
    names = tuple(v.name for v in select_variants(job.variants) if v.name not in known)
    # At one shape, whichever are timed: launches and timelines of pieces can be compared.
    trial = TrialJob(BLOCKS[0], names, job.transport, job.mapping, job.signal)
    return tried | try_variants(trial, _trial_launch(plan.launch, limit_s), say)


def _is_block(job: Any) -> bool:
    return isinstance(job, BlockJob) and job.op == BLOCK


def _trial_launch(launch: Launch, limit_s: float) -> Launch:
    return replace(launch, limit_s=limit_s)


def with_trials(job: BlockJob, tried: dict[str, Tried]) -> BlockJob:
    """The job, with what the trials have found."""
    not_run = {key: why for one in tried.values() for key, why in one.not_run.items()}
    launches = {key: line.launches for key, line in timelines_of(tried).items()}
    return replace(job, not_run=not_run, launches=launches)


def timelines_of(tried: dict[str, Tried]) -> dict[str, Timeline]:
    """Timelines by ``variant/mode``."""
    return {
        f"{one.name}/{mode}": line for one in tried.values() for mode, line in one.timelines.items()
    }
