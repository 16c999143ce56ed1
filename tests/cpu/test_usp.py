"""Ulysses inside a host and a ring between hosts, over gloo: attention of one process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from fake_nvml import FakeNvml, group_topologies, machine
from rank_pool import RankPool
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from ulysses_ops import PeerTimeoutError, TopologyError, UlyssesCommunicator, sdpa
from ulysses_ops.eligibility import Request, decide
from ulysses_ops.facts import Topology
from ulysses_ops.host import process
from ulysses_ops.ring import RingAttention, attend_with_lse, merged
from ulysses_ops.usp import UspAttention, host_mesh

Ranks = Callable[[int], RankPool]


@contextmanager
def hosts(names: list[str | None]) -> Iterator[None]:
    """Let each rank believe that it runs on the host of this name."""

    def moved() -> Any:
        here = process()
        name = names[dist.get_rank()]
        return replace(here, hostname=str(name), boot_id=replace(here.boot_id, value=name))

    with mock.patch("ulysses_ops.usp.process", moved):
        yield


def qkv(heads: int = 4, kv_heads: int = 4, rows: int = 12) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [
        torch.randn(2, rows, count, 8, dtype=torch.float64, generator=generator)
        for count in (heads, kv_heads, kv_heads)
    ]


# ---- both together -------------------------------------------------------------------------------


def against_one_process(
    rank: int, world_size: int, names: list[str], mesh_shape: list[int], kv_heads: int
) -> list[int]:
    wholes = qkv(kv_heads=kv_heads)
    expected = sdpa(*wholes)
    with hosts(list(names)):
        mesh = host_mesh("cpu", timeout_s=10)
    assert list(mesh.mesh.shape) == mesh_shape
    place = mesh.mesh.flatten().tolist()
    mine = place.index(rank)  # shards in the order of the mesh: a host holds neighbours
    q, k, v = (x.chunk(world_size, dim=1)[mine] for x in wholes)
    with UspAttention(mesh, timeout_s=10) as attention, torch.no_grad():
        assert (attention.ring.world_size, attention.comm.world_size) == tuple(mesh_shape)
        for sign in (1, -1):
            out = attention(sign * q, sign * k, v)
            torch.testing.assert_close(out, expected.chunk(world_size, dim=1)[mine])
        with mock.patch.object(RingAttention, "_pass_on", lambda self, held, is_last: (held, [])):
            wrong = attention(q, k, v)
        if mesh_shape[0] > 1:
            assert not torch.allclose(wrong, out), "BLIND: keys that never travel are as good"
    return list(map(int, place))


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_two_hosts_of_two_ranks(ranks: Ranks, kv_heads: int) -> None:
    names = ["near", "near", "far", "far"]
    places = ranks(4).run(against_one_process, names, [2, 2], kv_heads, timeout_s=30)
    assert places == [[0, 1, 2, 3]] * 4


def test_ranks_that_are_dealt_out_in_turn(ranks: Ranks) -> None:
    names = ["near", "far", "near", "far"]
    places = ranks(4).run(against_one_process, names, [2, 2], 4, timeout_s=30)
    assert places == [[0, 2, 1, 3]] * 4


@pytest.mark.parametrize(
    ("names", "shape"), [(["a", "b", "c", "d"], [4, 1]), (["a", "a", "a", "a"], [1, 4])]
)
def test_one_rank_to_a_host_and_one_host(ranks: Ranks, names: list[str], shape: list[int]) -> None:
    ranks(4).run(against_one_process, names, shape, 4, timeout_s=30)


def compiled(rank: int, world_size: int) -> None:
    """A ring is a graph break, so no rank meets another while it traces."""
    whole = [x.float() for x in qkv()]
    local = [x.chunk(world_size, dim=1)[rank] for x in whole]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "ulysses"))
    with UspAttention(mesh, timeout_s=10) as attention, torch.no_grad():

        def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attention(q * 2, k, v) + 1

        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported):
            torch.compile(step, backend="eager", fullgraph=True)(*local)
        torch._dynamo.reset()
        out = torch.compile(step, backend="aot_eager")(*local)
        expected = sdpa(whole[0] * 2, *whole[1:]).chunk(world_size, dim=1)[rank] + 1
        torch.testing.assert_close(out, expected)


def test_a_ring_is_a_graph_break(ranks: Ranks) -> None:
    ranks(4).run(compiled, timeout_s=60)


def moved(topology: Topology) -> Topology:
    here = topology.process
    return replace(topology, process=replace(here, boot_id=replace(here.boot_id, value="far")))


def test_rows_of_the_mesh_are_what_is_eligible() -> None:
    """Facts of four GPUs, two of them moved to another host: each row is, all of them are not."""
    ranks = group_topologies(FakeNvml(machine(4)))
    request = Request(backends=("nccl",))
    assert decide(ranks, request).transport == "ce"
    two_hosts = [*ranks[:2], *map(moved, ranks[2:])]
    assert decide(two_hosts, request).transport == "nccl"
    assert [decide(row, request).transport for row in (two_hosts[:2], two_hosts[2:])] == ["ce"] * 2


# ---- refusals ------------------------------------------------------------------------------------


def refuse(rank: int, world_size: int) -> list[str]:
    texts = []

    def raises(kind: type[Exception], text: str, call: Callable[[], Any]) -> None:
        with pytest.raises(kind, match=text) as error:
            call()
        texts.append(str(error.value))

    with hosts(["a", "a", "a", "b"]):
        raises(TopologyError, r"hosts have \[3, 1\] ranks", lambda: host_mesh("cpu"))
    with hosts(["a", "a", None, "b"]):
        raises(TopologyError, "rank 2 on None cannot read its boot id", lambda: host_mesh("cpu"))
    flat = init_device_mesh("cpu", (world_size,), mesh_dim_names=("ulysses",))
    raises(ValueError, r"dimensions \['ulysses'\] and must have 'ring'", lambda: UspAttention(flat))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "ulysses"))
    raises(
        ValueError, r"dimensions \['ring', 'ulysses'\], and a", lambda: UlyssesCommunicator(mesh)
    )
    q, k, v = (x.chunk(world_size, dim=1)[rank] for x in qkv())
    with UspAttention(mesh, timeout_s=2) as attention:
        grad = q.clone().requires_grad_()
        raises(ValueError, "a ring has no gradient", lambda: attention(grad, k, v))
        rows = slice(0, 3 if rank < 2 else 2)  # the rows of the second host are fewer
        cut = [x[:, rows] for x in (q, k, v)]
        with pytest.raises(ValueError, match="ranks of the ring differ: ranks"):
            attention(*cut)
        with pytest.raises(ValueError, match="has no gradient; call it under"):
            attention.ring(grad, k, v)
        assert attention(q, k, v).shape == q.shape
    return texts


def test_what_cannot_be_served_is_refused_by_all(ranks: Ranks) -> None:
    first, *others = ranks(4).run(refuse, timeout_s=60)
    assert all(other == first for other in others)


def go_on_behind_a_kernel_that_raised(rank: int, world_size: int) -> None:
    calls = []

    def kernel(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        calls.append(q)
        if len(calls) == 1:
            raise MemoryError("ours")
        return attend_with_lse(q, k, v)

    group = dist.group.WORLD
    assert group is not None
    ring = RingAttention(group, kernel=kernel, timeout_s=10)
    again = RingAttention(group, timeout_s=10)  # over the same ranks, with meetings of its own
    whole = qkv()
    mine = [x.chunk(world_size, dim=1)[rank] for x in whole]
    with pytest.raises(MemoryError, match="ours"):
        ring(*(torch.zeros_like(x) for x in mine))
    expected = sdpa(*whole).chunk(world_size, dim=1)[rank]
    for one in (ring, again):
        torch.testing.assert_close(one(*mine), expected)


def test_a_ring_goes_on_behind_a_kernel_that_raised(ranks: Ranks) -> None:
    ranks(4).run(go_on_behind_a_kernel_that_raised, timeout_s=60)


def late_in_a_ring(rank: int, world_size: int) -> str:
    group = dist.group.WORLD
    assert group is not None
    ring = RingAttention(group, timeout_s=1)
    mine = [x.chunk(world_size, dim=1)[rank] for x in qkv()]
    ring(*mine)
    if rank == 1:  # stays away
        return ""
    begin = time.monotonic()
    messages = []
    for _ in range(2):
        with pytest.raises(PeerTimeoutError, match="longer than 1 s, or one is gone") as told:
            ring(*mine)
        messages.append(str(told.value))
    assert time.monotonic() - begin < 4
    assert messages[0] == messages[1]
    return messages[0]


def test_a_late_neighbour_ends_the_wait() -> None:
    with RankPool(2, env={"CUDA_VISIBLE_DEVICES": ""}) as pool:  # of no use afterwards
        assert "rank 0 of the ring" in pool.run(late_in_a_ring)[0]


# ---- the pieces ----------------------------------------------------------------------------------


def test_log_sum_exp_and_merging() -> None:
    q, k, v = qkv(heads=4, kv_heads=2)
    out, lse = attend_with_lse(q, k, v)
    torch.testing.assert_close(out, sdpa(q, k, v))
    scores = torch.einsum("bqhd,bkhd->bqhk", q, k.repeat_interleave(2, dim=2)) * 8**-0.5
    torch.testing.assert_close(lse, scores.logsumexp(-1, keepdim=True))
    merged_out = merged_lse = None
    for part in (slice(0, 1), slice(1, 5), slice(5, 12)):
        block = attend_with_lse(q, k[:, part], v[:, part])
        merged_out, merged_lse = merged(merged_out, merged_lse, *block)
    assert merged_out is not None and merged_lse is not None
    torch.testing.assert_close(merged_out, out)
    torch.testing.assert_close(merged_lse, lse)


def test_merging_does_not_overflow() -> None:
    one, far = torch.ones(1, 1, 1, 1), torch.full((1, 1, 1, 1), 1e4)
    out, lse = merged(one, far, 2 * one, -far)
    assert (float(out), float(lse)) == (1.0, 1e4)
    out, lse = merged(one, -far, 2 * one, far)
    assert (float(out), float(lse)) == (2.0, 1e4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtypes_stay(dtype: torch.dtype) -> None:
    q, k, v = (x.to(dtype) for x in qkv())
    out, lse = attend_with_lse(q, k, v)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    torch.testing.assert_close(out, sdpa(q, k, v), rtol=2e-2, atol=1e-2)
