"""``ulysses-topology``: may this machine use the copy engines, for which GPUs, and if not, why?

The exit status is 0 if the group is eligible, 1 if it is not, 2 if that could not be told, and 130
if the user ended it. Whatever is wrong with the machine is part of the answer, never a traceback.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, Any, cast

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ulysses_ops.facts import Topology
from ulysses_ops.nvml import started
from ulysses_ops.tools.cuda_runtime import RowCopy, enable_peer_access
from ulysses_ops.tools.out_folder import check_file, check_folder
from ulysses_ops.tools.pair_bandwidth import FORMS, PeerTimer, TimeCopies, measure_pairs, runs_of
from ulysses_ops.tools.pair_check import Connect, RowCopyCall, check_pairs
from ulysses_ops.tools.results import read_machine, write_results
from ulysses_ops.tools.topology_picture import draw, to_dot
from ulysses_ops.tools.topology_report import Findings, load, report
from ulysses_ops.tools.topology_table import (
    print_rates,
    print_topology,
    print_unmeasured,
    print_verdict,
)
from ulysses_ops.tools.topology_verdict import Verdict
from ulysses_ops.topology import probe

COULD_NOT_TELL = 2
INTERRUPTED = 130


@dataclass(frozen=True)
class Machinery:
    """What touches GPUs; tests put in their own.

    Attributes:
        look: Probes this machine.
        keep_up: Keeps NVML up while a second probe is timed.
        copy: Makes the copy call of the data check.
        connect: Opens the memory of one GPU to another.
        timer: Makes what times copies between devices, for copies of some bytes.
    """

    look: Callable[[], Topology] = lambda: probe(torch.device("cuda", 0), every_device=True)
    keep_up: Callable[[], AbstractContextManager[None]] = started
    copy: Callable[[], RowCopyCall] = RowCopy
    connect: Connect = enable_peer_access
    timer: Callable[[Sequence[torch.device], int], TimeCopies] = lambda devices, size: (
        PeerTimer(devices, size).time_copies
    )


def check_topology(
    json_out: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
    from_file: Annotated[
        Path | None, typer.Option("--from", help="Judge a topology that was saved by --json.")
    ] = None,
    world_size: Annotated[
        int | None, typer.Option(min=1, help="Ranks of a group; by default one on each GPU.")
    ] = None,
    verify: Annotated[
        bool, typer.Option(help="Send data over every pair and look whether it arrives.")
    ] = False,
    bandwidth: Annotated[bool, typer.Option(help="Measure every pair.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Write <gpu>-x<count>/topology.json below this folder.")
    ] = None,
    dot: Annotated[Path | None, typer.Option(help="Write the links for Graphviz.")] = None,
    picture: Annotated[
        Path | None, typer.Option(help="Draw the links into a PNG file, with matplotlib.")
    ] = None,
    commit: Annotated[
        str | None, typer.Option(help="Commit that is run, where git cannot tell; for --out.")
    ] = None,
) -> None:
    """Say whether this machine may use the copy engines, for which GPUs, and if not, why."""
    options = Options(json_out, from_file, world_size, verify, bandwidth, out, dot, picture, commit)
    console, errors = (Console(file=patient(stream)) for stream in (sys.stdout, sys.stderr))
    raise typer.Exit(run(options, Machinery(), console, errors))


@dataclass(frozen=True)
class Options:
    """What the command line asks for."""

    json_out: bool = False
    from_file: Path | None = None
    world_size: int | None = None
    verify: bool = False
    bandwidth: bool = False
    out: Path | None = None
    dot: Path | None = None
    picture: Path | None = None
    commit: str | None = None


class Patient:
    """An output whose reader may leave early, as ``head`` does: the status stays the answer."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write, or drop what nobody reads any more."""
        self._try(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        """Flush, or drop what nobody reads any more."""
        self._try(self._stream.flush)

    def _try(self, step: Callable[[], Any]) -> None:
        try:
            step()
        except OSError as error:
            # What is left in the stream goes nowhere, or the end of Python would fail at it again.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
            if not isinstance(error, BrokenPipeError):
                raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def patient(stream: IO[str] | None) -> IO[str]:
    """Return ``stream`` as a :class:`Patient` one; one that is closed swallows everything."""
    return cast("IO[str]", Patient(Path(os.devnull).open("w") if stream is None else stream))


def run(options: Options, machinery: Machinery, console: Console, errors: Console) -> int:
    """Do what is asked and return the exit status."""
    try:
        return _run(options, machinery, console, errors)
    except KeyboardInterrupt:
        errors.print("interrupted")
        return INTERRUPTED
    except Exception as error:  # noqa: BLE001  a machine may fail in any way; that is the answer
        _say_why(error, errors)
        return COULD_NOT_TELL


def _run(options: Options, machinery: Machinery, console: Console, errors: Console) -> int:
    measures = options.verify or options.bandwidth or options.out is not None
    if options.from_file is not None and measures:
        message = "--verify, --bandwidth and --out are about this machine, --from is about another"
        raise ValueError(message)
    if options.out is not None:
        check_folder(options.out)
    for path in (options.dot, options.picture):
        if path is not None:
            check_file(path)
    findings = _look(options, machinery)
    verdict = findings.judged(options.world_size)
    if not options.json_out:
        print_topology(console, findings.topology, verdict)
    broken: Exception | None = None
    try:
        _measure(options, machinery, findings, errors)
    except Exception as error:  # noqa: BLE001  what was meant to confirm the verdict failed
        broken = error
        findings.broken = _in_words(error)
    after = findings.judged(options.world_size)
    if options.json_out:
        console.print(json.dumps(report(findings, after), indent=1), markup=False, soft_wrap=True)
    else:
        _print_measured(console, findings, verdict, after)
    _write(options, findings, after, errors)
    if broken is not None:
        _say_why(broken, errors)
    return after.exit_code


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"


def _say_why(error: Exception, errors: Console) -> None:
    errors.print(f"could not tell: {_in_words(error)}", markup=False)


def devices_of(topology: Topology) -> list[torch.device]:
    """The CUDA devices of a topology of this process."""
    return [torch.device("cuda", device.ordinal) for device in topology.devices]


def _look(options: Options, machinery: Machinery) -> Findings:
    if options.from_file is not None:
        return load(options.from_file)
    topology, first_ms = _timed(machinery.look)
    if not topology.devices:
        return Findings(topology, first_ms)
    with machinery.keep_up():
        _, warm_ms = _timed(machinery.look)
    return Findings(topology, first_ms, warm_ms)


def _timed(look: Callable[[], Topology]) -> tuple[Topology, float]:
    start = time.perf_counter()
    topology = look()
    return topology, round((time.perf_counter() - start) * 1e3, 1)


def _measure(options: Options, machinery: Machinery, findings: Findings, errors: Console) -> None:
    devices = devices_of(findings.topology)
    if not (options.verify or options.bandwidth):
        return
    if len(devices) < 2:
        errors.print("nothing to send: there are no two GPUs", markup=False)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), console=errors, transient=True) as progress:
        if options.verify:
            pairs = len(devices) * (len(devices) - 1) // 2
            task = progress.add_task("data check", total=pairs)
            findings.failures = check_pairs(
                devices,
                machinery.copy(),
                machinery.connect,
                progress=lambda text: progress.update(task, description=text, advance=1),
            )
            findings.checked = True
        if options.bandwidth:
            size = max(form.total_bytes for form in FORMS)
            bar = progress.add_task("bandwidth", total=sum(1 for _ in runs_of(len(devices))))
            findings.rates, findings.unmeasured = measure_pairs(
                devices,
                machinery.connect,
                machinery.timer(devices, size),
                advance=lambda text: progress.update(bar, description=text, advance=1),
            )


def _print_measured(console: Console, findings: Findings, before: Verdict, after: Verdict) -> None:
    if findings.checked and not findings.failures:
        console.print("data check: every byte arrived, on every pair and in both directions")
    for failure in findings.failures:
        console.print(str(failure), markup=False, highlight=False)
    print_rates(console, findings.rates)
    print_unmeasured(console, findings.unmeasured)
    if after != before:
        print_verdict(console, after)


def _write(options: Options, findings: Findings, verdict: Verdict, errors: Console) -> None:
    if options.dot is not None:
        options.dot.write_text(to_dot(findings.topology))
    if options.picture is not None:
        try:
            draw(findings.topology, options.picture)
        except ImportError:
            message = "no picture: pip install matplotlib, or use --dot with Graphviz"
            errors.print(message, markup=False)
    if options.out is not None:
        count = len(findings.topology.devices)
        device = torch.device("cuda", 0) if count else torch.device("cpu")
        machine = read_machine(device, count)
        content = report(findings, verdict)
        path = write_results(options.out, "topology", machine, options.commit, content)
        errors.print(f"written: {path}", markup=False)


def main() -> None:
    """Entry point of the console script."""
    typer.run(check_topology)


if __name__ == "__main__":
    main()
