"""Ranks on copy engines leave in any order and by any exit; no GPU memory stays behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import leaving_ranks
import pytest
import torch

TESTS = Path(__file__).resolve().parents[1]
# By case: what each rank's exit status may be. A rank that waits in CUDA for a peer that has left
# is told so by its watchdog, which may come before the signal or behind it.
EXPECTED: dict[str, tuple[set[int], set[int]]] = {
    "raise in exchange": ({1}, {1}),
    "leave by exit": ({3}, {3}),
    "one raises": ({1}, {1}),
    "one is killed": ({1}, {-9}),
    "one is killed before a meeting": ({1}, {-9}),
    "SIGTERM": ({-15}, {-15}),
    "SIGTERM with a handler": ({143}, {143}),
    "SIGINT": ({-2}, {-2}),
    "SIGINT in an exchange": ({-2, 1}, {-2}),
    "SIGINT in a meeting": ({-2}, {-2}),
}
UNWANTED = ("Exception ignored", "leaked", "Fatal Python error", "core dumped", "CUDA error")
EXIT_S = 15.0  # to close waits for peers up to 10 s

Ended = dict[str, Any]


def used_bytes() -> list[int]:
    """Memory in use on each GPU, whoever uses it."""
    totals = [torch.cuda.mem_get_info(index) for index in range(torch.cuda.device_count())]
    return [total - free for free, total in totals]


@pytest.fixture(scope="module")
def ended() -> dict[str, list[Ended]]:
    before = used_bytes()
    done = subprocess.run(
        [sys.executable, str(TESTS / "leaving_ranks.py"), "cuda"],
        capture_output=True,
        text=True,
        timeout=230,
        cwd=TESTS.parent,
        env={**os.environ, "PYTHONPATH": str(TESTS.parent)},
    )
    assert done.returncode == 0, done.stderr
    time.sleep(1.0)
    found: dict[str, list[Ended]] = json.loads(done.stdout)
    found["memory"] = [{"more": now - was} for was, now in zip(before, used_bytes(), strict=True)]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("case", leaving_ranks.CASES)
def test_every_exit_is_clean(ended: dict[str, list[Ended]], case: str) -> None:
    statuses = EXPECTED.get(case, ({0}, {0}))
    for rank, allowed in zip(ended[case], statuses, strict=True):
        assert rank["exit"] in allowed, ended[case]
        assert not [sign for sign in UNWANTED if sign in rank["stderr"]], rank["stderr"]
        if allowed == {0}:
            assert rank["stderr"] == ""


@pytest.mark.slow
@pytest.mark.parametrize("case", [name for name in leaving_ranks.CASES if name.startswith("SIG")])
def test_a_signal_ends_a_rank_in_time(ended: dict[str, list[Ended]], case: str) -> None:
    for rank in ended[case]:
        assert rank["seconds"] < EXIT_S


@pytest.mark.slow
def test_no_memory_stays_behind(ended: dict[str, list[Ended]]) -> None:
    for gpu in ended["memory"]:
        assert gpu["more"] < 64 << 20
