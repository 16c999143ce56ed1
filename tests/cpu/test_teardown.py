"""Ranks leave in any order and by any exit: the status is right, in time, and with no warning."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import leaving_ranks
import pytest

pytestmark = pytest.mark.long

HERE = Path(__file__).resolve().parent
EXIT_S = 10.0  # for an interpreter to end on a busy machine
# Exit statuses by rank, and what rank 0 says last.
EXPECTED: dict[str, tuple[tuple[int, int], str]] = {
    "raise in exchange": ((1, 1), "KeyError: 'of the caller'"),
    "leave by exit": ((3, 3), ""),
    "one raises": ((1, 1), "PeerTimeoutError: complete: rank 0 of "),
    "one is killed": ((1, -9), "PeerTimeoutError: complete: rank 0 of "),
    "one is killed before a meeting": ((1, -9), "AgreementError: reserve: rank 0 waited 4 s for"),
    "SIGTERM": ((-15, -15), ""),
    "SIGTERM with a handler": ((143, 143), ""),
    "SIGINT": ((-2, -2), "KeyboardInterrupt"),
    "SIGINT in an exchange": ((-2, -2), "KeyboardInterrupt"),
    "SIGINT in a meeting": ((-2, -2), "KeyboardInterrupt"),
}
# What no interpreter may say while it ends.
UNWANTED = (
    "Warning",
    "Exception ignored",
    "leaked",
    "Fatal Python error",
    "core dumped",
    "destroy_",
)

Ended = dict[str, Any]


@pytest.fixture(scope="module")
def ended() -> dict[str, list[Ended]]:
    """Every case once, in one run."""
    done = subprocess.run(
        [sys.executable, str(HERE.parent / "leaving_ranks.py")],
        capture_output=True,
        text=True,
        timeout=220,
        cwd=HERE.parents[1],
        env={**os.environ, "PYTHONPATH": str(HERE.parents[1]), "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, list[Ended]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("case", leaving_ranks.CASES)
def test_every_exit_is_clean(ended: dict[str, list[Ended]], case: str) -> None:
    statuses, last_words = EXPECTED.get(case, ((0, 0), ""))
    ranks = ended[case]
    assert tuple(rank["exit"] for rank in ranks) == statuses, ranks
    for rank in ranks:
        text = rank["stderr"]
        assert not [sign for sign in UNWANTED if sign in text], text
        if last_words == "":
            assert text == ""
    lines = ranks[0]["stderr"].strip().splitlines()
    assert last_words in (lines[-1] if lines else "")


@pytest.mark.parametrize("case", [name for name in leaving_ranks.CASES if name.startswith("SIG")])
def test_a_signal_ends_a_rank_in_time(ended: dict[str, list[Ended]], case: str) -> None:
    """Though the limit of what it waits for is 60 s."""
    for rank in ended[case]:
        assert rank["seconds"] < EXIT_S


def test_control_what_is_unwanted_is_seen() -> None:
    """An interpreter that ends with a thread's warning, and one that a signal does not end."""
    script = "import warnings; warnings.warn('leaked')"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert [sign for sign in UNWANTED if sign in done.stderr]
    deaf = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); print(flush=True);"
    with subprocess.Popen(
        [sys.executable, "-c", f"{deaf} time.sleep(60)"], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1.0)
        process.kill()
