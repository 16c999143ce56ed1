"""One rank is not like the other: all take one path, or all raise, and a later call works."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from on_gpu import communicator, expected, filled, one_window
from rank_pool import RankPool, on_gpus

from ulysses_ops import TopologyError, UlyssesCommunicator, UlyssesError, mapping, scatter

SHAPE = (1, 64, 8, 64)


def works(comm: UlyssesCommunicator, rank: int) -> None:
    """One good exchange."""
    window = one_window(comm, SHAPE)
    got = scatter(filled(window, rank, 7), comm)
    assert torch.equal(got, expected(window, 7))


def rendezvous_refused(rank: int, world_size: int, kinds: list[str]) -> tuple[str, str | None, str]:
    """Providers of mapped memory whose mapping fails on rank 1 alone."""
    steps = {"symm_mem": "_rendezvous", "ipc": "_open_peers"}

    def refusing(real: Callable[..., object]) -> Callable[..., None]:
        def refuse(*args: object) -> None:
            real(*args)
            raise PermissionError(1, "Operation not permitted")

        return refuse

    with ExitStack() as patches:
        for kind in kinds if rank == 1 else []:
            real = getattr(mapping, steps[kind])
            patches.enter_context(mock.patch.object(mapping, steps[kind], refusing(real)))
        with communicator(transport=None) as comm:
            works(comm, rank)
            result = (comm.transport, comm.mapping, "; ".join(comm.reasons))
    with communicator() as comm:
        works(comm, rank)
    return result


def test_symm_mem_refused_on_one_rank_falls_back_to_ipc(pair: RankPool) -> None:
    for transport, kind, _ in pair.run(rendezvous_refused, ["symm_mem"]):
        assert (transport, kind) == ("ce", "ipc")


def test_absent_at_the_rendezvous_is_bounded() -> None:
    # A pool of its own: torch's counters of rendezvous differ between these ranks afterwards.
    with on_gpus(2) as pool:
        for seconds, kind in pool.run(absent_at_the_rendezvous):
            assert kind == "ipc"
            assert seconds < 15


@pytest.mark.two_gpus
def test_no_mapping_on_one_rank_falls_back_to_nccl(pair: RankPool) -> None:
    first, second = pair.run(rendezvous_refused, ["symm_mem", "ipc"])
    assert first == second
    transport, kind, reasons = first
    assert (transport, kind) == ("nccl", None)
    assert "symm_mem: rendezvous" in reasons
    assert "ipc: opening" in reasons
    assert "rank 1: PermissionError" in reasons


def absent_at_the_rendezvous(rank: int, world_size: int) -> tuple[float, str | None]:
    """Rank 1 does not come to torch's rendezvous at all: the others do not wait for long."""

    def refuse(*args: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    begin = time.monotonic()
    step = refuse if rank == 1 else mapping._rendezvous
    with mock.patch.object(mapping, "_rendezvous", step), communicator(transport=None) as comm:
        works(comm, rank)
        return time.monotonic() - begin, comm.mapping


def library_missing(rank: int, world_size: int) -> tuple[str, str]:
    """The compiled library cannot be loaded on rank 1."""
    from ulysses_ops import communicator as module
    from ulysses_ops._native import NATIVE, NativeLibraries
    from ulysses_ops.topology import probe

    native = NATIVE
    if rank == 1:
        native = NativeLibraries(
            plan=True, plan_reason="", cuda=False, cuda_reason="_C_cuda.so was not built"
        )
    with mock.patch.object(module, "probe", lambda device: probe(device, native=native)):
        with communicator(transport=None) as comm:
            works(comm, rank)
            result = (comm.transport, "; ".join(comm.reasons))
        with pytest.raises(TopologyError) as refused:
            communicator()
    assert "rank 1" in str(refused.value)
    return result


@pytest.mark.two_gpus
def test_library_missing_on_one_rank(pair: RankPool) -> None:
    first, second = pair.run(library_missing)
    assert first == second
    assert first[0] == "nccl"
    assert "rank 1" in first[1]
    assert "_C_cuda.so was not built" in first[1]


def unlike_inputs(rank: int, world_size: int) -> list[str]:
    """Another dtype, another S_local, and no memory, on rank 1 alone: all raise alike."""
    messages = []
    with communicator() as comm:
        works(comm, rank)
        for x in (
            torch.zeros(1, 16, 8, 64, device="cuda", dtype=[torch.float32, torch.float16][rank]),
            torch.zeros(1, [24, 40][rank], 8, 64, device="cuda"),
        ):
            with pytest.raises(ValueError, match="ranks ask for") as refused:
                scatter(x, comm)
            messages.append(str(refused.value))
        real = torch.distributed._symmetric_memory.empty

        def no_memory(*args: object, **kwargs: object) -> torch.Tensor:
            raise torch.OutOfMemoryError("CUDA out of memory")

        patched = no_memory if rank == 1 else real
        with (
            mock.patch("torch.distributed._symmetric_memory.empty", patched),
            pytest.raises(UlyssesError) as full,
        ):
            scatter(torch.zeros(1, 48, 8, 64, device="cuda"), comm)
        messages.append(str(full.value))
        scatter(torch.zeros(1, 48, 8, 64, device="cuda"), comm)
        works(comm, rank)
    return messages


def test_one_rank_is_unlike_the_other(pair: RankPool) -> None:
    first, second = pair.run(unlike_inputs)
    assert first == second
    dtype, rows, memory = first
    assert "torch.float32" in dtype
    assert "torch.float16" in dtype
    assert "[1, 48, 8, 64]" in rows
    assert "[1, 80, 8, 64]" in rows
    assert "rank 1: OutOfMemoryError" in memory


def subgroups(rank: int, world_size: int) -> None:
    """A subgroup, then the world, then both again: names of groups carry nothing over."""
    for _ in range(2):
        alone = [dist.new_group([peer]) for peer in range(world_size)][rank]
        with UlyssesCommunicator(alone, device=f"cuda:{rank}") as comm:
            assert comm.transport == "local"
            x = torch.randn(1, 4, 4, 8, device="cuda")
            got = scatter(x, comm)
            assert torch.equal(got, x)
            assert got.data_ptr() != x.data_ptr()
        both = dist.new_group(list(range(world_size)))
        with communicator(group=both) as comm:
            works(comm, rank)


@pytest.mark.two_gpus
def test_subgroup_then_larger_group(pair: RankPool) -> None:
    pair.run(subgroups)


def many_communicators(rank: int, world_size: int, kind: str) -> int:
    """Create and close; returns the growth of used memory in MiB."""
    used = []
    for number in range(30):
        with communicator(mapping=kind) as comm:
            works(comm, rank)
        if number in (9, 29):
            torch.cuda.synchronize()
            dist.barrier()
            free, total = torch.cuda.mem_get_info()
            used.append(total - free)
    return (used[1] - used[0]) >> 20


@pytest.mark.parametrize("kind", ["symm_mem", "ipc"])
def test_memory_is_given_back(pair: RankPool, kind: str) -> None:
    assert all(growth <= 8 for growth in pair.run(many_communicators, kind, timeout_s=90))


def two_on_one_gpu(rank: int, world_size: int) -> str:
    with pytest.raises(TopologyError) as refused:
        communicator(allow_shared_devices=False)
    return str(refused.value)


@pytest.mark.two_gpus
def test_two_ranks_on_one_gpu_are_refused(crowd: Callable[[int], RankPool]) -> None:
    messages = crowd(4).run(two_on_one_gpu)
    assert len(set(messages)) == 1
    assert "ranks 0, 2" in messages[0]
