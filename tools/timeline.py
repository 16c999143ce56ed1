"""What a GPU did in one step, from the trace of a profiler: by stream, and what hides what.

The trace is the Chrome format that ``torch.profiler`` exports. Of several marked steps the last
counts. What belongs to the exchange is a copy to a peer or a kernel of NCCL; it is *hidden* while
some other kernel runs on the same GPU, and *exposed* else. Waits on signal words leave no event:
they are part of *idle*, where nothing runs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

STEP = "ulysses step"  # the mark around a step
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
ON_HOST = ("cuda_runtime", "cuda_driver")
# Calls that give the GPU something to do; one that other calls make inside is not seen twice.
LAUNCH = re.compile(
    r"^(cuda|cu)(LaunchKernel|LaunchCooperative|GraphLaunch|Memcpy|Memset|StreamBatch)"
)
LONGEST_NAME = 80

Kind = Literal["kernel", "exchange", "copy"]
Span = tuple[float, float]


@dataclass(frozen=True)
class Activity:
    """One kernel or copy.

    Attributes:
        name: As the profiler has it, shortened.
        kind: ``exchange`` for copies to peers and kernels of NCCL, ``copy`` for other copies.
        stream: Number of the stream.
        start_us: Since the first activity of the step.
        end_us: The same.
    """

    name: str
    kind: Kind
    stream: int
    start_us: float
    end_us: float

    @property
    def span(self) -> Span:
        """From when to when."""
        return (self.start_us, self.end_us)


@dataclass(frozen=True)
class Timeline:
    """One step of one rank.

    Attributes:
        activities: By start.
        launches: Calls of the host that gave the GPU something to do.
    """

    activities: tuple[Activity, ...]
    launches: int

    def numbers(self) -> dict[str, float]:
        """Microseconds: the step, its compute, its exchange, hidden, exposed, and idle."""
        busy = merged(activity.span for activity in self.activities)
        compute = merged(a.span for a in self.activities if a.kind != "exchange")
        exchange = merged(a.span for a in self.activities if a.kind == "exchange")
        whole = max((end for _, end in busy), default=0.0)
        hidden = length(overlap(exchange, compute))
        figures = {
            "step_us": whole,
            "compute_us": length(compute),
            "exchange_us": length(exchange),
            "hidden_us": hidden,
            "exposed_us": length(exchange) - hidden,
            "idle_us": whole - length(busy),
        }
        return {name: round(value, 3) for name, value in figures.items()}

    def to_json(self) -> dict[str, Any]:
        """As an entry of a results file."""
        return {
            "launches": self.launches,
            **self.numbers(),
            "activities": [asdict(activity) for activity in self.activities],
        }

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> Timeline:
        """Read what :meth:`to_json` wrote."""
        activities = tuple(Activity(**activity) for activity in entry["activities"])
        return cls(activities, entry["launches"])


def read_trace(trace: Mapping[str, Any]) -> Timeline:
    """The last marked step of a trace.

    Raises:
        ValueError: no step is marked.
    """
    events = [event for event in trace["traceEvents"] if "dur" in event]
    marks = [
        event for event in events if event["name"] == STEP and event["cat"] == "user_annotation"
    ]
    if not marks:
        message = f"timeline: the trace has no range named '{STEP}'; mark the step with one"
        raise ValueError(message)
    mark = max(marks, key=lambda event: float(event["ts"]))
    begin = float(mark["ts"])
    end = begin + float(mark["dur"])
    launched = [
        event
        for event in events
        if event["cat"] in ON_HOST
        and event.get("tid") == mark.get("tid")  # a thread of the watchdog's has calls of its own
        and begin <= float(event["ts"]) <= end
        and LAUNCH.match(event["name"])
    ]
    on_gpu = sorted(
        (event for event in events if event["cat"] in ON_GPU and float(event["ts"]) >= begin),
        key=lambda event: float(event["ts"]),
    )
    origin = float(on_gpu[0]["ts"]) if on_gpu else 0.0
    return Timeline(tuple(_activity(event, origin) for event in on_gpu), len(launched))


def _activity(event: Mapping[str, Any], origin: float) -> Activity:
    name = str(event["name"])
    kind: Kind = "kernel"
    if "PtoP" in name or "nccl" in name.lower():
        kind = "exchange"
    elif event["cat"] != "kernel":
        kind = "copy"
    start = float(event["ts"]) - origin
    stream = int(event.get("args", {}).get("stream", -1))
    end = start + float(event["dur"])
    return Activity(name[:LONGEST_NAME], kind, stream, round(start, 3), round(end, 3))


def merged(spans: Iterable[Span]) -> list[Span]:
    """The same time as spans that do not touch, in order."""
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def overlap(some: Sequence[Span], others: Sequence[Span]) -> list[Span]:
    """The time that is in both; each is merged already."""
    return [
        (max(start, begin), min(end, finish))
        for start, end in some
        for begin, finish in others
        if max(start, begin) < min(end, finish)
    ]


def length(spans: Iterable[Span]) -> float:
    """Microseconds in spans that do not touch."""
    return sum(end - start for start, end in spans)
