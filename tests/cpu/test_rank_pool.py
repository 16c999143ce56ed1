"""The harness: what one reads of a failure on some rank, and that the next test is served."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankError, RankPool


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2, env={"RANK_POOL_WORD": "heard"}) as pool:
        yield pool


def report(rank: int, world_size: int, word: str) -> tuple[int, int, str, str | None, int]:
    total = torch.tensor([rank + 1])
    dist.all_reduce(total)
    return rank, world_size, word, os.environ.get("RANK_POOL_WORD"), int(total)


def raise_on_one(rank: int, world_size: int) -> None:
    if rank == 1:
        raise LookupError("only here")
    dist.barrier()  # where the other one waits


def hang_on_one(rank: int, world_size: int) -> None:
    if rank == 1:
        time.sleep(3600)


def die_on_one(rank: int, world_size: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def return_what_cannot_be_pickled(rank: int, world_size: int) -> object:
    return lambda: None


def is_running(pid: int | None) -> bool:
    assert pid is not None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def check_service(pool: RankPool) -> list[int | None]:
    expected = [(rank, 2, "said", "heard", 3) for rank in range(2)]
    assert pool.run(report, "said", timeout_s=30) == expected
    return pool.pids()


def test_values_come_by_rank_and_the_processes_stay(pool: RankPool) -> None:
    first = check_service(pool)
    assert check_service(pool) == first
    assert os.environ.get("RANK_POOL_WORD") is None


def test_a_rank_that_raises_is_shown_with_its_traceback(pool: RankPool) -> None:
    before = check_service(pool)
    with pytest.raises(RankError) as failure:
        pool.run(raise_on_one, timeout_s=30)
    text = str(failure.value)
    assert "rank 1: raised" in text
    assert "LookupError: only here" in text
    assert "in raise_on_one" in text
    assert "rank 0: did not finish" in text
    assert "in barrier" in text  # where the other one is
    assert not any(map(is_running, before))
    check_service(pool)


def test_a_rank_that_hangs_is_reported_within_the_limit(pool: RankPool) -> None:
    before = check_service(pool)
    start = time.monotonic()
    with pytest.raises(RankError, match=r"(?s)rank 0: finished.*rank 1: did not finish .limit 1 s"):
        pool.run(hang_on_one, timeout_s=1)
    assert time.monotonic() - start < 8
    assert not any(map(is_running, before))
    check_service(pool)


def test_a_rank_that_dies_is_reported_at_once(pool: RankPool) -> None:
    check_service(pool)
    start = time.monotonic()
    with pytest.raises(RankError, match=r"(?s)rank 0: finished.*rank 1: died with exit code -9"):
        pool.run(die_on_one, timeout_s=60)
    assert time.monotonic() - start < 20
    check_service(pool)


def test_a_value_that_cannot_be_pickled_is_a_failure(pool: RankPool) -> None:
    with pytest.raises(RankError, match="return_what_cannot_be_pickled"):
        pool.run(return_what_cannot_be_pickled, timeout_s=30)
    check_service(pool)


def test_closing_leaves_no_process() -> None:
    pool = RankPool(2, env={"RANK_POOL_WORD": "heard"})
    pids = check_service(pool)
    pool.close()
    pool.close()
    assert pool.pids() == []
    assert not any(map(is_running, pids))
