"""What is checked out: the commit, and the trees of the tested code."""

from __future__ import annotations

import subprocess
from pathlib import Path

DIRTY = "-dirty"  # behind a commit: files differ from it
TREES = ("csrc", "ulysses_ops", "graphs")


def read_commit() -> str | None:
    """The commit that is checked out, with ``-dirty`` where files differ; ``None`` without git."""
    head = _git("rev-parse", "HEAD")
    if head is None or _git("rev-parse", "HEAD:csrc") is None:  # none, or some other repository
        return None
    return f"{head}{DIRTY}" if _git("status", "--porcelain", "--untracked-files=no") else head


def read_trees() -> dict[str, str] | None:
    """Git tree ids of the tested code in the commit that is checked out; ``None`` without git."""
    ids = {name: _git("rev-parse", f"HEAD:{name}") for name in TREES}
    return {name: tree for name, tree in ids.items() if tree is not None} or None


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments],
            cwd=Path(__file__).resolve().parent,
            capture_output=True,
            check=False,
            text=True,
            timeout=20,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
