"""Keeps what the searches found: ``pytest tests/model --record-model docs/results``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ulysses_ops.tools.results import read_machine, write_results

Found = dict[str, Any]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("ulysses", "record of the models").addoption(
        "--record-model", metavar="DIR", help="folder of results to write handshake_model.json in"
    )


@pytest.fixture(scope="session")
def recorded(request: pytest.FixtureRequest) -> Iterator[list[Found]]:
    """What is appended is written when the session ends, if that was asked for."""
    models: list[Found] = []
    yield models
    folder = request.config.getoption("--record-model", default=None)
    if folder:
        machine = read_machine(torch.device("cpu"), 0)
        write_results(Path(folder), "handshake_model", machine, None, {"models": models})
