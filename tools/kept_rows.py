"""Results of runs that are made in pieces: what a run has measured replaces what it measures anew.

Rows of one operation, model and number of ranks belong together: they were measured in turn, and
are compared with each other. A run replaces all of them or none, and leaves the others of the file
as they were. So that it stays known what is of which run, every row carries its commit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ulysses_ops.tools.results import Machine, read_results, write_results
from ulysses_ops.tools.revision import read_commit

SAME = ("gpu", "gpu_count", "driver", "torch", "cuda", "nccl")  # what rows of one file share
UNKNOWN = "unknown"

Entries = list[dict[str, Any]]


def keep_rows(
    folder: Path, name: str, machine: Machine, commit: str | None, content: Mapping[str, Any]
) -> tuple[Path, str]:
    """Write rows into ``<folder>/<gpu>-x<count>/<name>.json``, beside those of other runs.

    Args:
        folder: ``docs/results``, usually.
        name: Name of the file, without suffix.
        machine: Where the rows were measured.
        commit: What was run; read from git when ``None``.
        content: ``rows``, and ``finished`` and ``not_run`` where there are sections.

    Returns:
        The path, and why earlier rows of the file were not kept; empty where they were.

    Raises:
        ValueError: the file is there, and is no file of results.
    """
    path = folder / machine.folder / f"{name}.json"
    commit = commit or read_commit() or UNKNOWN
    mine = stamped(content, commit)
    earlier = read_results(path, needs_rows=True) if path.exists() else None
    why_anew = "" if earlier is None else difference(earlier, machine)
    if earlier is not None and not why_anew:
        mine = merged(stamped(earlier, earlier.get("commit") or UNKNOWN), mine)
    write_results(folder, name, machine, None if commit == UNKNOWN else commit, mine)
    return path, why_anew


def difference(content: Mapping[str, Any], machine: Machine) -> str:
    """In what a file was measured elsewhere, or with other versions; empty where in nothing."""
    other = [
        f"{name} {content.get(name)} there, {getattr(machine, name)} here"
        for name in SAME
        if content.get(name) != getattr(machine, name)
    ]
    return "; ".join(other)


def stamped(content: Mapping[str, Any], commit: str) -> dict[str, Any]:
    """Entries of a file with the commit of every row and finished section."""
    told: dict[str, Any] = {
        **content,
        "rows": [{**row, "commit": row.get("commit") or commit} for row in content["rows"]],
    }
    if "finished" in content:
        told["finished"] = finished_of(content, commit)
    return told


def finished_of(content: Mapping[str, Any], commit: str | None) -> dict[str, str | None]:
    """Commit by finished section; a file of one run only lists them."""
    finished = content.get("finished", {})
    return dict(finished) if isinstance(finished, Mapping) else dict.fromkeys(finished, commit)


def merged(earlier: Mapping[str, Any], mine: Mapping[str, Any]) -> dict[str, Any]:
    """Entries of a file after one more run; both are stamped. Order is that of the first run."""
    told = {**mine, "rows": merge_rows(earlier["rows"], mine["rows"])}
    if "finished" in mine:
        before, now = earlier.get("finished", {}), mine["finished"]
        told["finished"] = before | now
        reasons = {
            key: why
            for key, why in earlier.get("not_run", {}).items()
            if not _is_answered(key, now, before | now)
        }
        new = {key: why for key, why in mine["not_run"].items() if key not in before}
        told["not_run"] = reasons | new
        told["insisted"] = earlier.get("insisted", {}) | mine.get("insisted", {})
    return told


def _is_answered(key: str, now: Mapping[str, Any], ever: Mapping[str, Any]) -> bool:
    """Whether a run has said something newer about what had no rows.

    Keys are sections (``block/flux``), or what is of a section (``block/flux: naive``) or of an
    operation (``block: naive``).
    """
    place = key.partition(": ")[0]
    operations = {section.partition("/")[0] for section in now}
    return place in operations or place in (ever if place == key else now)


def merge_rows(earlier: Sequence[Mapping[str, Any]], mine: Sequence[Mapping[str, Any]]) -> Entries:
    """Rows of a file after one more run."""
    groups = _by_subject(earlier) | _by_subject(mine)
    return [row for rows in groups.values() for row in rows]


def _by_subject(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[Any, ...], Entries]:
    groups: dict[tuple[Any, ...], Entries] = {}
    for row in rows:
        subject = (row["op"], row.get("model", ""), row["world_size"])
        groups.setdefault(subject, []).append(dict(row))
    return groups


def commits_of(content: Mapping[str, Any]) -> list[str]:
    """Commits of a file's rows, in order, or that of its header where they have none."""
    header = content.get("commit") or UNKNOWN
    rows = content.get("rows", [])
    return list(dict.fromkeys(row.get("commit") or header for row in rows)) or [header]


def describe_commits(content: Mapping[str, Any]) -> str:
    """``commit`` or ``commits``, shortened."""
    commits = [commit[:12] for commit in commits_of(content)]
    return f"commit{'s' if len(commits) > 1 else ''} {', '.join(commits)}"
