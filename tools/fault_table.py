"""How the fault matrix, and what the models found, read in Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ulysses_ops.tools.markdown import Record, markdown, number, yes


def faults_table(record: Record) -> str:
    """A fault a line, a step a column: outcomes, the slowest cell, and how many there were.

    Below it, what the record does not hold.
    """
    cells = record.content.get("cells", [])
    notes = _left_out(record)
    if not cells and not notes:
        return ""
    faults = list(dict.fromkeys(cell["fault"] for cell in cells))
    steps = list(dict.fromkeys(cell["step"] for cell in cells))
    lines = [
        (fault, *(_summary(cells, fault, step) for step in sorted(steps, key=_place)))
        for fault in faults
    ]
    limit = f"limit {record.content['limit_s']:g} s, W={record.content['world_size']}"
    head = (f"{record.content['transport']}, {limit}", *sorted(steps, key=_place))
    return markdown(head, lines) + (f"\nOf this record: {'; '.join(notes)}.\n" if notes else "")


def _left_out(record: Record) -> list[str]:
    content = record.content
    if "cells" not in content:
        return []
    left_out = content.get("cells_left_out", 0)
    notes = [f"{left_out} cells left out for want of time"] if left_out else []
    if content.get("only", "all") != "all":
        notes.append(f"these faults alone: {content['only']}")
    if content.get("one_moment"):
        notes.append("one moment of each step")
    if content.get("parallel", 1) > 1 and content.get("gpu") != "cpu":
        notes.append("cells side by side: GPU memory not judged")
    return notes


def _place(step: str) -> int:
    return ("construction", "reserve", "exchange", "capture", "replay", "teardown").index(step)


def _summary(cells: Sequence[dict[str, Any]], fault: str, step: str) -> str:
    chosen = [cell for cell in cells if (cell["fault"], cell["step"]) == (fault, step)]
    if not chosen:
        return ""
    outcomes = " / ".join(sorted({cell["outcome"] for cell in chosen}))
    slowest = max(cell["seconds"] for cell in chosen)
    return f"{outcomes}, {number(slowest, 1)} s ({len(chosen)})"


def deaths_table(record: Record) -> str:
    """Where the others were, a line: from the death of a peer to the errors of those left."""
    deaths = record.content.get("deaths", [])
    lines = []
    for place, limit_s in dict.fromkeys((death["place"], death["limit_s"]) for death in deaths):
        chosen = [one for one in deaths if (one["place"], one["limit_s"]) == (place, limit_s)]
        seconds = [second for one in chosen for second in one["seconds"]]
        lines.append(
            (
                f"{record.content['transport']}, {place}",
                number(limit_s, 1),
                number(len(seconds), 0),
                number(min(seconds), 2),
                number(max(seconds), 2),
                yes(all(one["is_in_time"] for one in chosen)),
            )
        )
    head = ("a peer is killed", "limit, s", "errors", "first, s", "last, s", "within limit + 1 s")
    return markdown(head, lines) if lines else ""


def soak_table(record: Record) -> str:
    """Calls of all pieces together, and lives of communicators."""
    pieces, cycles = record.content.get("pieces", []), record.content.get("cycles", [])
    if not pieces and not cycles:
        return ""
    leaks = sum(bool(any(one["leaks"])) for one in cycles)
    more = [most for one in cycles for most in one["gpu_bytes_more"]]
    line = (
        ", ".join(sorted({piece["transport"] for piece in pieces})),
        number(sum(piece["calls"] for piece in pieces), 0),
        number(sum(piece["eager"] for piece in pieces), 0),
        number(sum(piece["mismatches"] for piece in pieces), 0),
        yes(all(piece["control_mismatches"] for piece in pieces)) if pieces else "",
        number(sum(one["cycles"] for one in cycles), 0),
        number(max(more) / 1e6, 1) if more else "",
        number(leaks, 0),
    )
    head = (
        "transport",
        "replays and calls",
        "of them eager",
        "wrong elements",
        "a wrong one is seen",
        "create and close",
        "GPU MB more",
        "leaks",
    )
    return markdown(head, [line])


def sanitizers_table(record: Record) -> str:
    """A run of compute-sanitizer."""
    content = record.content
    if "sanitizer" not in content:
        return ""
    line = (
        content["sanitizer"],
        " ".join(content["selection"]),
        number(content["passed"], 0),
        number(content["failed"], 0),
        number(content["errors"], 0),
        "; ".join(f"{what} ({count})" for what, count in content.get("failed_calls", {}).items()),
        number(content["seconds"], 0),
    )
    head = ("compute-sanitizer", "tests", "passed", "failed", "errors", "calls that failed")
    return markdown((*head, "seconds"), [line])


def models_table(record: Record) -> str:
    """What was searched, a line: how many scenarios and states, and what was found."""
    models = record.content.get("models", [])
    lines = []
    for name in dict.fromkeys(model["model"] for model in models):
        chosen = [model for model in models if model["model"] == name]
        states = [model["states"] for model in chosen if "states" in model]
        failures = sorted({model["failure"] for model in chosen if model["failure"]})
        sizes = ", ".join(str(size) for size in sorted({m["world_size"] for m in chosen}))
        lines.append(
            (
                name,
                sizes,
                number(len(chosen), 0),
                number(sum(states), 0) if states else "",
                number(max(states), 0) if states else "",
                ", ".join(failures) if failures else "none",
            )
        )
    head = ("model", "W", "scenarios", "states", "of the largest", "failures found")
    return markdown(head, lines) if lines else ""
