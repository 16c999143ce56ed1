"""A file of docs/results, and how what is in it reads in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ulysses_ops.tools.kept_rows import UNKNOWN, commits_of, describe_commits
from ulysses_ops.tools.results import Row, read_results, rows_from_json


@dataclass(frozen=True)
class Record:
    """One file of docs/results."""

    folder: str
    name: str
    content: dict[str, Any]

    @property
    def rows(self) -> list[Row]:
        """Its rows; none for the record of a test run."""
        return rows_from_json(self.content.get("rows", []))

    def caption(self) -> str:
        """Where, what and when, in one line."""
        content = self.content
        place = "CPU" if content["gpu"] == "cpu" else f"{content['gpu_count']}x {content['gpu']}"
        versions = [
            f"{name} {content[key]}"
            for name, key in (("driver", "driver"), ("CUDA", "cuda"), ("NCCL", "nccl"))
            if content.get(key)
        ]
        told = [place, *versions, f"torch {content['torch']}", describe_commits(content)]
        return f"{', '.join(told)}, {content['date'][:10]} (`{self.folder}/{self.name}.json`):\n\n"


def read_records(results: Path) -> list[Record]:
    """Every file of a results folder, in the order of their paths.

    Raises:
        ValueError: one is no file of results.
    """
    return [
        Record(path.parent.name, path.stem, read_results(path))
        for path in sorted(results.glob("*/*.json"))
    ]


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table; all columns but the first are aligned to the right."""
    rules = ["---", *("---:" for _ in head[1:])]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (head, rules, *lines))


def number(value: float | None, digits: int, suffix: str = "") -> str:
    """A number with so many digits, or nothing."""
    return "" if value is None else f"{value:,.{digits}f}{suffix}"


def yes(exact: bool | None) -> str:
    """Whether it was exact, or nothing."""
    return "" if exact is None else "yes" if exact else "**no**"


def detail(row: Row, key: str) -> Any:
    """An entry of ``details``, or ``None``."""
    return (row.details or {}).get(key)


def all_exact(rows: Iterable[Row]) -> bool | None:
    """Whether all rows that were compared are exact; ``None`` where none was."""
    told = [row.exact for row in rows if row.exact is not None]
    return all(told) if told else None


def ranks_of(row: Row, record: Record) -> str:
    """Number of ranks, behind a name, in a file that has rows of several; else nothing."""
    several = len({entry.get("world_size") for entry in record.content.get("rows", [])}) > 1
    return f", W={row.world_size}" if several else ""


def commits_of_rows(rows: Iterable[Row], record: Record) -> tuple[str, ...]:
    """A cell with the commits of a line, in a file that has rows of several; else no cell."""
    if len(commits_of(record.content)) < 2:
        return ()
    header = record.content.get("commit") or UNKNOWN
    return (", ".join(dict.fromkeys((row.commit or header)[:12] for row in rows)),)


def head_of_commits(record: Record) -> tuple[str, ...]:
    """The head of what :func:`commits_of_rows` makes."""
    return ("commit",) if len(commits_of(record.content)) > 1 else ()
