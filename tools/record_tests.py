"""A pytest plugin that keeps a run of the suite as ``docs/results/<gpu>-x<count>/tests.json``.

::

    pytest -p ulysses_ops.tools.record_tests --record-tests docs/results tests/gpu tests/multigpu
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ulysses_ops.tools.out_folder import check_folder
from ulysses_ops.tools.results import read_machine, write_results
from ulysses_ops.tools.revision import TREES, read_trees


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the options."""
    group = parser.getgroup("ulysses", "record of the run")
    group.addoption(
        "--record-tests", metavar="DIR", help="folder of results to write tests.json in"
    )
    group.addoption(
        "--record-name", default="tests", help="name of that file, where one run has several parts"
    )
    group.addoption("--record-commit", metavar="ID", help="tested commit, where git cannot tell")
    group.addoption(
        "--record-trees",
        metavar="NAME=ID,...",
        help=f"git tree ids of {', '.join(TREES)}, where git cannot tell",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Record if asked to."""
    folder = config.getoption("--record-tests")
    if folder:
        try:
            check_folder(Path(folder))
        except ValueError as error:
            message = f"--record-tests: {error}"
            raise pytest.UsageError(message) from error
        given = config.getoption("--record-trees")
        recorder = Recorder(
            Path(folder),
            config.getoption("--record-commit"),
            parse_trees(given) if given else read_trees(),
            " ".join(config.args),
            config.getoption("--record-name"),
        )
        config.pluginmanager.register(recorder, "ulysses-recorder")


def parse_trees(text: str) -> dict[str, str]:
    """Read ``csrc=ID,ulysses_ops=ID,graphs=ID``.

    Raises:
        pytest.UsageError: a name is missing or unknown.
    """
    pairs = dict(part.strip().split("=", 1) for part in text.split(",") if "=" in part)
    if set(pairs) != set(TREES):
        message = f"--record-trees={text!r} must give an id for each of {', '.join(TREES)}"
        raise pytest.UsageError(message)
    return pairs


class Recorder:
    """Notes the outcome of every test and writes them when the session ends."""

    def __init__(
        self,
        folder: Path,
        commit: str | None,
        trees: dict[str, str] | None,
        selection: str,
        name: str,
    ) -> None:
        """Start with nothing noted."""
        self._folder = folder
        self._commit = commit
        self._trees = trees
        self._selection = selection
        self._name = name
        self._passed: list[str] = []
        self._failed: dict[str, str] = {}
        self._skipped: dict[str, str] = {}
        self._collected: list[str] = []

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note what could not be collected, or was skipped as a whole."""
        if report.failed:
            self._failed[report.nodeid] = _last_line(str(report.longrepr))
        elif report.skipped:
            self._skipped[report.nodeid] = _reason(report.longrepr)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Note what is to run: a session may be cut before its end."""
        self._collected = [item.nodeid for item in session.items]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note the outcome of one phase of a test."""
        if report.failed:
            self._failed[report.nodeid] = f"{report.when}: {_crash(report)}"
        elif report.skipped:
            expected = getattr(report, "wasxfail", None)
            reason = (
                _reason(report.longrepr) if expected is None else f"fails as expected: {expected}"
            )
            self._skipped[report.nodeid] = reason
        elif report.when == "call":
            self._passed.append(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        """Write the record."""
        has_gpu = torch.cuda.is_available()
        device = torch.device("cuda", 0) if has_gpu else torch.device("cpu")
        machine = read_machine(device, torch.cuda.device_count() if has_gpu else 0)
        ended = {*self._passed, *self._failed, *self._skipped}
        content: dict[str, Any] = {
            "selection": self._selection,
            "trees": self._trees,
            "passed": [test for test in self._passed if test not in self._failed],
            "failed": self._failed,
            "skipped": self._skipped,
            "not_run": [test for test in self._collected if test not in ended],
        }
        write_results(self._folder, self._name, machine, self._commit, content)


def _crash(report: pytest.TestReport) -> str:
    """What went wrong, in one line."""
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is None:
        return _last_line(report.longreprtext)
    return str(crash.message).splitlines()[0][:500]


def _reason(longrepr: object) -> str:
    """Why a test was skipped, without where."""
    if isinstance(longrepr, tuple) and len(longrepr) == 3:
        return str(longrepr[2]).removeprefix("Skipped: ")
    return _last_line(str(longrepr))


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1][:500] if lines else ""
