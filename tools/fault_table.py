"""How the fault matrix, and what the models found, read in Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ulysses_ops.tools.markdown import Record, markdown, number


def faults_table(record: Record) -> str:
    """A fault a line, a step a column: outcomes, the slowest cell, and how many there were."""
    cells = record.content.get("cells", [])
    if not cells:
        return ""
    faults = list(dict.fromkeys(cell["fault"] for cell in cells))
    steps = list(dict.fromkeys(cell["step"] for cell in cells))
    lines = [
        (fault, *(_summary(cells, fault, step) for step in sorted(steps, key=_place)))
        for fault in faults
    ]
    limit = f"limit {record.content['limit_s']:g} s, W={record.content['world_size']}"
    head = (f"{record.content['transport']}, {limit}", *sorted(steps, key=_place))
    return markdown(head, lines)


def _place(step: str) -> int:
    return ("construction", "reserve", "exchange", "capture", "replay", "teardown").index(step)


def _summary(cells: Sequence[dict[str, Any]], fault: str, step: str) -> str:
    chosen = [cell for cell in cells if (cell["fault"], cell["step"]) == (fault, step)]
    if not chosen:
        return ""
    outcomes = " / ".join(sorted({cell["outcome"] for cell in chosen}))
    slowest = max(cell["seconds"] for cell in chosen)
    return f"{outcomes}, {number(slowest, 1)} s ({len(chosen)})"


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
