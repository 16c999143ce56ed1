"""Tests under compute-sanitizer, and what it found, as ``sanitizer_<tool>.json`` and its log.

::

    python -m ulysses_ops.tools.sanitize memcheck -- tests/gpu
    python -m ulysses_ops.tools.sanitize racecheck --kernels ulysses_ops -- tests/gpu -k shapes

What stands behind ``--`` goes to pytest.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer

from ulysses_ops.tools.out_folder import refuse_folder
from ulysses_ops.tools.results import read_machine, write_results

SANITIZERS = ("memcheck", "racecheck", "synccheck", "initcheck")
PLACES = ("/usr/local/cuda/bin/compute-sanitizer",)
ERRORS = re.compile(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)")
FAILED_CALL = re.compile(
    r"Program hit (\w+) .*? on CUDA API call to (\w+)\.\s*\n.*\n=+ +Host Frame: ?(.*)"
)
OURS = re.compile(r"ulysses_ops|_C_\w+\.so")
COUNTS = re.compile(r"(\d+) (passed|failed|errors?)\b")
KEPT_LINES = 40  # of the log, in the JSON
FOUND = 9  # exit status of what has errors


def command_of(
    sanitizer: str, log: Path, kernels: str | None, selection: Sequence[str]
) -> list[str]:
    """The whole command.

    Raises:
        FileNotFoundError: compute-sanitizer is not there.
    """
    found = shutil.which("compute-sanitizer") or next(filter(os.path.exists, PLACES), None)
    if found is None:
        message = f"compute-sanitizer is neither in PATH nor in {PLACES}; install the CUDA toolkit"
        raise FileNotFoundError(message)
    only = [] if kernels is None else ["--kernel-regex", f"kns={kernels}"]
    options = ["--target-processes", "all", "--error-exitcode", str(FOUND), "--log-file", str(log)]
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "timeout=0"]
    return [found, "--tool", sanitizer, *only, *options, *tests, *selection]


def errors_of(log: str) -> int | None:
    """All that its summaries count; ``None`` where there is no summary: it did not come to an end.

    Every process has one.
    """
    found = [int(one or other) for one, other in ERRORS.findall(log)]
    return sum(found) if found else None


def failed_calls_of(log: str) -> dict[str, int]:
    """Calls of the driver that failed, and were asked by others than this package.

    The sanitizer counts them among its errors. PyTorch finds out by one whether memory can be
    shared between hosts.
    """
    calls: dict[str, int] = {}
    for status, call, frame in FAILED_CALL.findall(log):
        if not OURS.search(frame):
            what = f"{call}: {status}, by {frame.split('[')[0].strip()}"
            calls[what] = calls.get(what, 0) + 1
    return calls


def counts_of(output: str) -> dict[str, int]:
    """How many tests passed and failed, by what pytest says last."""
    said = [line for line in output.splitlines() if COUNTS.search(line)]
    counts = {"passed": 0, "failed": 0}
    for count, outcome in COUNTS.findall(said[-1] if said else ""):
        counts["passed" if outcome == "passed" else "failed"] += int(count)
    return counts


def run(command: Sequence[str], limit_s: float) -> tuple[int | None, str]:
    """Exit status, ``None`` past the limit, and output. Nothing that it started is left."""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        try:
            output, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return None, process.communicate()[0]
        return process.returncode, output


def main(
    sanitizer: Annotated[str, typer.Argument(help="memcheck, racecheck, synccheck, initcheck.")],
    selection: Annotated[list[str], typer.Argument(help="What pytest runs, behind --.")],
    kernels: Annotated[str | None, typer.Option(help="Only kernels with this in the name.")] = None,
    name: Annotated[str | None, typer.Option(help="Of the results; that of the tool.")] = None,
    limit: Annotated[float, typer.Option(min=1, help="Wall time, in seconds.")] = 540.0,
    out: Annotated[Path, typer.Option(help="Folder of results.")] = Path("docs/results"),
    commit: Annotated[str | None, typer.Option(help="Commit, where git cannot tell.")] = None,
) -> None:
    """Run, and write the log and its summary."""
    if sanitizer not in SANITIZERS:
        message = f"{sanitizer!r} is none of {SANITIZERS}"
        raise typer.BadParameter(message)
    refuse_folder(out)
    label = f"sanitizer_{name or sanitizer}"
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    machine = read_machine(device, torch.cuda.device_count())
    log = out / machine.folder / f"{label}.txt"
    try:
        command = command_of(sanitizer, log, kernels, selection)
    except FileNotFoundError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
    log.parent.mkdir(parents=True, exist_ok=True)
    log.unlink(missing_ok=True)
    begin = time.monotonic()
    status, output = run(command, limit)
    text = log.read_text(errors="replace") if log.exists() else ""
    errors, calls = errors_of(text), failed_calls_of(text)
    if errors is not None:
        errors -= sum(calls.values())
    content = {
        "sanitizer": sanitizer,
        "kernels": kernels,
        "selection": selection,
        "exit": status,
        **counts_of(output),
        "errors": errors,
        "failed_calls": calls,
        "seconds": round(time.monotonic() - begin, 1),
        "log": text.splitlines()[-KEPT_LINES:],
    }
    typer.echo("\n".join(output.splitlines()[-KEPT_LINES:]))
    typer.echo(f"{errors} errors; written: {write_results(out, label, machine, commit, content)}")
    is_done = status == 0 or (status == FOUND and not content["failed"])
    if not is_done or errors != 0 or not content["passed"]:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
