"""Fixtures of all suites."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_pool import RankPool, on_gpus, on_shared_gpus

from ulysses_ops.tools.results import read_machine, write_results

PoolOf = Callable[[int], RankPool]
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
GPU_FOLDERS = ("gpu", "multigpu")


def pytest_addoption(parser: pytest.Parser) -> None:
    """``pytest tests/model --record-model docs/results`` keeps what the searches found."""
    parser.getgroup("ulysses", "record of the models").addoption(
        "--record-model", metavar="DIR", help="folder of results to write handshake_model.json in"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs GPUs that are not there.

    Ranks may share a GPU, so one is enough for all that is not marked ``two_gpus``.
    """
    there = torch.cuda.device_count()
    for item in items:
        for folder in GPU_FOLDERS:
            if folder in item.path.parts:
                item.add_marker(getattr(pytest.mark, folder))
                needed = 2 if item.get_closest_marker("two_gpus") else 1
                if there < needed:
                    item.add_marker(pytest.mark.skip(reason=f"needs {needed} GPUs, not {there}"))


@pytest.fixture(scope="session")
def recorded(request: pytest.FixtureRequest) -> Iterator[list[dict[str, Any]]]:
    """What a search of a model found; written when the session ends, if that was asked for."""
    models: list[dict[str, Any]] = []
    yield models
    folder = request.config.getoption("--record-model")
    if folder:
        machine = read_machine(torch.device("cpu"), 0)
        write_results(Path(folder), "handshake_model", machine, None, {"models": models})


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """Pools of CPU ranks by world size, started when first used and kept for the session."""
    with ExitStack() as stack:
        pools: dict[int, RankPool] = {}

        def pool_of(world_size: int) -> RankPool:
            if world_size not in pools:
                pools[world_size] = stack.enter_context(RankPool(world_size, env=NO_GPU))
            return pools[world_size]

        yield pool_of


@pytest.fixture(scope="session")
def compiling_ranks() -> Iterator[RankPool]:
    """Two CPU ranks that compile anew each time: caches do not see that tags changed."""
    with RankPool(2, env={**NO_GPU, "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}) as pool:
        yield pool


@pytest.fixture(scope="session")
def pair() -> Iterator[RankPool]:
    """Two ranks on GPUs: see :func:`rank_pool.on_gpus`."""
    with on_gpus(2) as pool:
        yield pool


@pytest.fixture(scope="session")
def crowd() -> Iterator[PoolOf]:
    """Pools of more ranks than GPUs, over gloo: correct, never fast."""
    with ExitStack() as stack:
        pools: dict[int, RankPool] = {}

        def pool_of(world_size: int) -> RankPool:
            if world_size not in pools:
                pools[world_size] = stack.enter_context(on_shared_gpus(world_size))
            return pools[world_size]

        yield pool_of
