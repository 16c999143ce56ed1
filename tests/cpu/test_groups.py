"""Several groups in one world, and group names that come again with other ranks behind them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankPool
from torch import Tensor
from whole_tensors import check_service, numbered

from ulysses_ops import UlyssesCommunicator, scatter


@pytest.fixture(scope="module")
def four() -> Iterator[RankPool]:
    """Ranks of their own, for tests that take process groups down."""
    with RankPool(4, env={"CUDA_VISIBLE_DEVICES": ""}) as pool:
        yield pool


def in_line(world_size: int, size: int) -> list[dist.ProcessGroup]:
    """Groups of neighbours; every rank makes all of them."""
    firsts = range(0, world_size, size)
    return [dist.new_group(list(range(first, first + size))) for first in firsts]


def across(world_size: int, size: int) -> list[dist.ProcessGroup]:
    return [dist.new_group(list(range(first, world_size, size))) for first in range(size)]


def member_of(groups: list[dist.ProcessGroup]) -> dist.ProcessGroup:
    (mine,) = [group for group in groups if isinstance(group, dist.ProcessGroup)]
    return mine


def two_groups(rank: int, world_size: int) -> None:
    """Tensor parallel pairs [0,1], [2,3] across Ulysses pairs [0,2], [1,3], used in turn."""
    tensor_parallel = member_of(in_line(world_size, 2))
    with (
        UlyssesCommunicator(member_of(across(world_size, 2)), timeout_s=10) as ulysses,
        UlyssesCommunicator(tensor_parallel, timeout_s=10) as other,
        UlyssesCommunicator(timeout_s=10) as world,
    ):
        assert (ulysses.rank, other.rank) == (rank // 2, rank % 2)
        assert len({comm.name for comm in (ulysses, other, world)}) == 3
        for _ in range(3):
            check_service(ulysses, 100 * (rank % 2))
            total = torch.tensor([rank])
            dist.all_reduce(total, group=tensor_parallel)
            assert int(total) == (1, 1, 5, 5)[rank]
            check_service(other, 1000 * (rank // 2))
            check_service(world)


def test_two_groups_at_once_in_one_world(four: RankPool) -> None:
    four.run(two_groups, timeout_s=30)


def not_a_member(rank: int, world_size: int) -> None:
    group = dist.new_group([0, 1])
    if rank in (0, 1):
        with UlyssesCommunicator(group, timeout_s=10) as comm:
            check_service(comm)
    else:
        with pytest.raises(ValueError, match="this process is not a rank of the group"):
            UlyssesCommunicator(group, timeout_s=10)


def subgroup_then_world(rank: int, world_size: int, folder: str) -> list[str]:
    """Twice over, the whole of torch.distributed destroyed and initialised in between."""
    names = []
    for life in range(3):
        pairs = in_line(world_size, 2)
        if rank < 2:
            with UlyssesCommunicator(member_of(pairs), timeout_s=10) as comm:
                check_service(comm, life)
                names.append(comm.name)
        world = UlyssesCommunicator(timeout_s=10)
        check_service(world, 10 + life)
        names.append(world.name)
        if life != 1:
            world.close()  # else it is still open when its group goes, and the name comes again
        dist.destroy_process_group()
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/life-{life}", rank=rank, world_size=world_size
        )
    return names


def test_subgroup_then_world_then_all_anew(four: RankPool, tmp_path: Path) -> None:
    by_rank = four.run(subgroup_then_world, str(tmp_path), timeout_s=40)
    names = by_rank[0]
    assert names[2:4] == names[4:]  # names do come again, and mean another group
    four.run(two_groups, timeout_s=30)


def smaller_world(rank: int, world_size: int, folder: str) -> None:
    """The same names once more, with another number of ranks."""
    with UlyssesCommunicator(timeout_s=10) as comm:
        check_service(comm)
    dist.destroy_process_group()
    if rank < 2:
        dist.init_process_group("gloo", init_method=f"file://{folder}/2", rank=rank, world_size=2)
        with UlyssesCommunicator(timeout_s=10) as comm:
            assert comm.world_size == 2
            check_service(comm)
        dist.destroy_process_group()
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/4", rank=rank, world_size=world_size
    )
    with UlyssesCommunicator(timeout_s=10) as comm:
        check_service(comm)


def test_another_number_of_ranks(four: RankPool, tmp_path: Path) -> None:
    four.run(smaller_world, str(tmp_path), timeout_s=40)


def left_open(rank: int, world_size: int, folder: str) -> Tensor:
    """A communicator of a group that is gone does not stand in the way of the next one."""
    old = UlyssesCommunicator(timeout_s=10)
    check_service(old)
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/next", rank=rank, world_size=world_size
    )
    with UlyssesCommunicator(timeout_s=10) as new:
        assert new.name == old.name
        assert old.closed
        check_service(new)
        return scatter(numbered(1, 1, 4, 1), new)


def test_a_communicator_left_open_gives_way(four: RankPool, tmp_path: Path) -> None:
    received = four.run(left_open, str(tmp_path), timeout_s=30)
    for rank, tensor in enumerate(received):
        assert torch.equal(tensor, torch.full((1, 4, 1, 1), float(rank)))


def test_only_members_construct(four: RankPool) -> None:
    four.run(not_a_member, timeout_s=30)
