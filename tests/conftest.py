"""Fixtures of all suites."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from rank_pool import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """Pools of gloo ranks by world size, started when first used and kept for the session."""
    with ExitStack() as stack:
        pools: dict[int, RankPool] = {}

        def pool_of(world_size: int) -> RankPool:
            if world_size not in pools:
                pools[world_size] = stack.enter_context(RankPool(world_size))
            return pools[world_size]

        yield pool_of
