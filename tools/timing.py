"""Interleaved timing of variants on all ranks, and the statistics of its samples."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from ulysses_ops.tools.launch import RankContext

LEAD_IN = 2  # calls ahead of the first event: they absorb what the line-up left of skew
MIN_COUNT = 3
LONG_US = 20_000.0  # beside a run this long that skew is nothing: one call ahead, and two timed
VERY_LONG_US = 300_000.0  # whole steps of large models: each is timed alone
MAX_COUNT = 500

Rounds = list[list[float]]  # microseconds a call: rounds of samples


@dataclass(frozen=True)
class Variant:
    """Something to time.

    Attributes:
        run: Enqueues it on the current stream; on every rank alike.
        calls: Calls of the operator in one run; times are for one call.
        prepare: Done ahead of each batch of runs, and not timed. Collective.
    """

    run: Callable[[], object]
    calls: int = 1
    prepare: Callable[[], object] | None = None

    def ready(self) -> None:
        """Prepare the next batch."""
        if self.prepare is not None:
            self.prepare()


@dataclass(frozen=True)
class Effort:
    """How long to measure.

    Attributes:
        rounds: Rounds; every variant is timed once in each.
        batch_ms: Time to spend on a variant in one round, in milliseconds.
        min_rounds: Rounds that are measured even when the time is up.
        until: When to stop, by ``time.monotonic``, which all processes share; never by default.
    """

    rounds: int = 10
    batch_ms: float = 60.0
    min_rounds: int = 3
    until: float | None = None

    def is_over(self, rounds_done: int) -> bool:
        """Whether the time is up and enough has been measured."""
        enough = rounds_done >= min(self.min_rounds, self.rounds)
        return enough and self.until is not None and time.monotonic() >= self.until

    def share(self, parts: int) -> Effort:
        """The first of ``parts`` equal parts of the time that is left."""
        if self.until is None:
            return self
        now = time.monotonic()
        return replace(self, until=now + (self.until - now) / parts)


@dataclass(frozen=True)
class Summary:
    """One variant over all ranks, in microseconds a call.

    Attributes:
        median_us: Median of the slowest rank.
        p99_us: 99th percentile of the slowest rank.
        round_us: Median of each round, of the rank that was slowest in it.
        samples: Samples of a rank.
        slowest_rank: The rank whose median that is.
    """

    median_us: float
    p99_us: float
    round_us: tuple[float, ...]
    samples: int
    slowest_rank: int = 0

    @property
    def spread_us(self) -> tuple[float, float]:
        """Smallest and largest median of a round."""
        return (min(self.round_us), max(self.round_us))


def percentile(values: Sequence[float], percent: float) -> float:
    """Nearest-rank percentile: the smallest value that at least ``percent`` % do not exceed.

    Raises:
        ValueError: there are no values, or ``percent`` is not in (0, 100].
    """
    if not values or not 0 < percent <= 100:
        message = (
            f"percentile: {percent} of {len(values)} values; needs 0 < percent <= 100 and values"
        )
        raise ValueError(message)
    return sorted(values)[math.ceil(len(values) * percent / 100) - 1]


def summarise(by_rank: Sequence[Rounds]) -> Summary:
    """Put the samples of all ranks together; the slowest rank counts.

    Raises:
        ValueError: no rank, no round, or a rank with another number of rounds.
    """
    counts = {len(rounds) for rounds in by_rank}
    if len(counts) != 1 or 0 in counts:
        message = (
            f"summarise: the ranks measured {sorted(counts)} rounds; needs the same, at least 1"
        )
        raise ValueError(message)
    flat = [[sample for samples in rounds for sample in samples] for rounds in by_rank]
    by_round = zip(*by_rank, strict=True)
    medians = [statistics.median(samples) for samples in flat]
    return Summary(
        median_us=max(medians),
        p99_us=max(percentile(samples, 99) for samples in flat),
        round_us=tuple(max(statistics.median(s) for s in samples) for samples in by_round),
        samples=len(flat[0]),
        slowest_rank=medians.index(max(medians)),
    )


def paired_ratio(slow: Summary, fast: Summary) -> float:
    """Median over rounds of ``slow / fast``: what moves both between rounds cancels.

    Raises:
        ValueError: they were not measured in the same rounds.
    """
    return statistics.median(a / b for a, b in zip(slow.round_us, fast.round_us, strict=True))


def measure(
    context: RankContext, variants: Mapping[str, Variant], effort: Effort, what: str
) -> dict[str, Summary]:
    """Time all variants in turn, round after round, and summarise over the ranks. Collective.

    Each round has an order of its own, alike on all ranks. Where power limits the clock, a variant
    is faster behind one that leaves the GPU idle: in a fixed order the same one would always be.
    """
    batches = {name: _agree_batch(context, variants[name], effort, name) for name in variants}
    rounds: dict[str, Rounds] = {name: [] for name in variants}
    for number in range(effort.rounds):
        if context.gather(effort.is_over(number))[0]:  # one rank's clock decides for all
            break
        context.progress(f"{what}: round {number + 1} of {effort.rounds}")
        for name in random.Random(number).sample(list(variants), len(variants)):
            variant = variants[name]
            variant.ready()
            context.line_up(f"{what}, {name}")
            lead_in, count = batches[name]
            samples = time_runs(context, variant.run, count, f"{what}, {name}", lead_in)
            rounds[name].append([sample / variant.calls for sample in samples])
    by_rank = context.gather(rounds)
    return {name: summarise([rank[name] for rank in by_rank]) for name in variants}


def _agree_batch(
    context: RankContext, variant: Variant, effort: Effort, name: str
) -> tuple[int, int]:
    """Runs ahead, and runs in a batch: the same on every rank, or one would wait for ever."""
    variant.ready()
    context.line_up(f"estimate of {name}")
    first_us: float = max(context.gather(time_runs(context, variant.run, 1, name, lead_in=0)[0]))
    if first_us >= VERY_LONG_US:
        return 0, 1
    context.line_up(f"estimate of {name}")
    estimate_us = min(time_runs(context, variant.run, 2, name, lead_in=1))
    slowest_us: float = max(context.gather(estimate_us))
    wanted = math.ceil(effort.batch_ms * 1e3 / max(slowest_us, 1e-3))
    if slowest_us >= LONG_US:
        return 1, max(2, wanted)
    return LEAD_IN, max(MIN_COUNT, min(MAX_COUNT, wanted))


def time_runs(
    context: RankContext,
    run: Callable[[], object],
    count: int,
    what: str,
    lead_in: int = LEAD_IN,
) -> list[float]:
    """Microseconds of each of ``count`` runs, one right after the other."""
    for _ in range(lead_in):
        run()
    if context.device.type == "cpu":
        stamps = [time.perf_counter()]
        for _ in range(count):
            run()
            stamps.append(time.perf_counter())
        return [(after - before) * 1e6 for before, after in pairwise(stamps)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    context.finish(what)
    return [before.elapsed_time(after) * 1e3 for before, after in pairwise(events)]
