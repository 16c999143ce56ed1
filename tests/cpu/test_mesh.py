"""Ranks in a mesh: groups that reach each other, the closest inside, none where there are none."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from fake_nvml import FakeNvml, full_mesh, group_topologies, islands, machine
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_pool import RankPool

from ulysses_ops import TopologyError, UlyssesCommunicator, scatter
from ulysses_ops.facts import Topology
from ulysses_ops.mesh import build_mesh, order_ranks

Ranks = Callable[[int], RankPool]


def in_islands(groups: list[tuple[int, ...]]) -> list[Topology]:
    count = sum(map(len, groups))
    return group_topologies(FakeNvml(machine(count), islands(count, groups)))


@given(st.permutations(range(8)), st.sampled_from([(4, 1), (2, 2), (1, 4), (2, 1), (1, 1)]))
@settings(deadline=None, max_examples=25)
def test_groups_lie_within_islands(order: list[int], shape: tuple[int, int]) -> None:
    sp, tp = shape
    parts = [tuple(sorted(order[:4])), tuple(sorted(order[4:]))]
    found = order_ranks(in_islands(parts), sp, tp)
    flat = [rank for group in found for part in group for rank in part]
    assert sorted(flat) == list(range(8))
    assert {(len(group), *map(len, group)) for group in found} == {(sp, *(tp,) * sp)}
    for group in found:
        members = {rank for part in group for rank in part}
        assert any(members <= set(part) for part in parts)


def test_of_a_full_mesh_any_shape_can_be_made() -> None:
    assert order_ranks(full_mesh(4), 2, 2) == (((0, 1), (2, 3)),)
    assert order_ranks(full_mesh(4), 1, 1) == (((0,),), ((1,),), ((2,),), ((3,),))


def test_groups_that_cannot_be_made_are_refused() -> None:
    with pytest.raises(TopologyError, match=r"of 4 ranks, 0 groups of 4 .* choose smaller"):
        order_ranks(in_islands([(0, 1), (2, 3)]), 4, 1)
    with pytest.raises(TopologyError, match=r"of 6 ranks, 2 groups of 2 that all reach"):
        order_ranks(in_islands([(0, 1, 2), (3, 4, 5)]), 2, 1)
    with pytest.raises(ValueError, match="sp=3 times tp=1 must divide the 4 ranks"):
        order_ranks(full_mesh(4), 3, 1)


def exchange_in_a_mesh(rank: int, world_size: int) -> tuple[int, int]:
    """Ranks 0 and 2 share a sequence, and so do 1 and 3."""
    mesh = build_mesh((((0,), (2,)), ((1,), (3,))), "cpu")
    group = mesh.get_group("sp")
    with UlyssesCommunicator(group, name="sp", timeout_s=10) as comm:
        y = scatter(torch.full((1, 1, 2, 1), float(rank)), comm)
        assert y.flatten().tolist() == [rank % 2, rank % 2 + 2]
        found = comm.rank, comm.world_size
    dist.barrier()
    return found


def test_a_communicator_of_the_sequence_dimension(ranks: Ranks) -> None:
    by_rank = ranks(4).run(exchange_in_a_mesh, timeout_s=30)
    assert by_rank == [(0, 2), (0, 2), (1, 2), (1, 2)]
