"""The verdict for meshes and mishaps that exist."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import permutations

import pynvml
import pytest
import torch
from fake_nvml import (
    NO_MPS,
    NOT_LOADED,
    NOT_SUPPORTED,
    NVLINK,
    READ,
    WRITE,
    FakeCuda,
    FakeNvml,
    full_mesh,
    group_topologies,
    islands,
    machine,
    pair_lines,
    rank_topology,
)

from ulysses_ops.eligibility import Request, decide, decide_without_ce
from ulysses_ops.facts import Fact, Reading, Topology
from ulysses_ops.topology import probe

NCCL = Request(backends=("nccl",))


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_full_mesh_is_eligible(world_size: int) -> None:
    decision = decide(full_mesh(world_size), NCCL)
    assert (decision.transport, decision.warnings) == ("ce", ())
    (reason,) = decision.reasons
    assert reason.startswith(f"{world_size} ranks on {world_size} GPUs of one host, every directed")


@pytest.mark.parametrize(
    ("members", "transport", "bad"),
    [
        ([0, 1], "ce", set()),
        ([2, 3], "ce", set()),
        ([1, 2], "nccl", {(0, 1), (1, 0)}),
        ([0, 1, 2, 3], "nccl", {(a, b) for a, b in permutations(range(4), 2) if a // 2 != b // 2}),
    ],
)
def test_bridges(members: list[int], transport: str, bad: set[tuple[int, int]]) -> None:
    nvml = FakeNvml(machine(4), islands(4, [[0, 1], [2, 3]]))
    decision = decide(group_topologies(nvml, members), NCCL)
    assert (decision.transport, pair_lines(decision)) == (transport, bad)


@pytest.mark.parametrize("kind", [READ, WRITE, NVLINK])
def test_peers_over_pcie_alone_are_not_nvlink(kind: int) -> None:
    """Links may be up: the status of the pair counts, for each capability."""
    status = {(a, b, kind): NOT_SUPPORTED for a, b in permutations(range(2), 2)}
    decision = decide(group_topologies(FakeNvml(machine(2), status)), NCCL)
    name = {READ: "read", WRITE: "write", NVLINK: "nvlink"}[kind]
    assert decision.transport == "nccl"
    assert pair_lines(decision) == {(0, 1), (1, 0)}
    assert f"P2P {name} status is NOT_SUPPORTED (seen by ranks 0, 1)" in decision.reasons[0]


def test_eight_gpus_in_pairs_with_an_asymmetric_entry() -> None:
    status = islands(8, [[0, 1], [2, 3], [4, 5], [6, 7]])
    status[0, 1, WRITE] = pynvml.NVML_P2P_STATUS_CHIPSET_NOT_SUPPORTED
    decision = decide(group_topologies(FakeNvml(machine(8), status)), NCCL)
    apart = {(a, b) for a, b in permutations(range(8), 2) if a // 2 != b // 2}
    assert decision.transport == "nccl"
    assert pair_lines(decision) == apart | {(0, 1)}
    (line,) = [r for r in decision.reasons if r.startswith("rank 0 -> rank 1 ")]
    gpus = machine(8)
    assert f"[GPU-{gpus[0].uuid} PCI 00000000:10:00.0 NVML 0 CUDA 0 -> " in line
    assert f"-> GPU-{gpus[1].uuid} PCI 00000000:11:00.0 NVML 1 CUDA 1]" in line
    assert (
        "P2P write status is CHIPSET_NOT_SUPPORTED (seen by ranks 0, 1, 2, 3, 4, 5, 6, 7)" in line
    )


@pytest.mark.parametrize(
    ("visible", "transport"), [([2, 3], "ce"), ([3, 1], "nccl"), ([1, 2, 0], "nccl")]
)
def test_pairs_are_judged_by_gpu_and_not_by_number(visible: list[int], transport: str) -> None:
    """CUDA 0 and 1 are connected as NVML 0 and 1 in every row; that is not what is asked."""
    nvml = FakeNvml(machine(4), islands(4, [[0, 1], [2, 3]]))
    decision = decide(group_topologies(nvml, [0, 1], visible), NCCL)
    assert decision.transport == transport
    if transport == "nccl":
        assert f"NVML {visible[0]} CUDA 0" in decision.reasons[0]


def test_display_card_first_in_nvml_does_not_matter() -> None:
    nvml = FakeNvml(machine(3), islands(3, [[1, 2]]))
    assert decide(group_topologies(nvml, [0, 1], [1, 2, 0]), NCCL).transport == "ce"
    assert decide(group_topologies(nvml, [0, 1], [0, 1, 2]), NCCL).transport == "nccl"


def test_each_rank_may_see_its_own_gpu_alone_in_cuda() -> None:
    gpus = machine(2)
    ranks = [
        rank_topology(FakeNvml(gpus), FakeCuda(gpus, [rank]), 0, rank=rank) for rank in range(2)
    ]
    assert decide(ranks, NCCL).transport == "ce"


def test_each_rank_has_to_see_every_pair_in_nvml() -> None:
    gpus = machine(2)
    ranks = [
        rank_topology(FakeNvml([gpus[rank]]), FakeCuda(gpus, [rank]), 0, rank=rank)
        for rank in range(2)
    ]
    decision = decide(ranks, NCCL)
    assert decision.transport == "nccl"
    assert "NVML does not list this pair (seen by ranks 0, 1)" in decision.reasons[0]


def test_peer_access_that_cuda_refuses_one_way() -> None:
    gpus = machine(2)
    cuda = FakeCuda(gpus, [0, 1], refused=frozenset({(1, 0)}))
    ranks = [rank_topology(FakeNvml(gpus), cuda, rank, rank=rank) for rank in range(2)]
    decision = decide(ranks, NCCL)
    assert (decision.transport, pair_lines(decision)) == ("nccl", {(1, 0)})


# One rank is different


def replaced_rank(rank: int, new: Callable[[Topology], Topology]) -> list[Topology]:
    ranks = full_mesh(4)
    ranks[rank] = new(ranks[rank])
    return ranks


@pytest.mark.parametrize(
    ("new", "text"),
    [
        (
            lambda t: replace(t, stream_memory_64bit=Fact("no", "cuda", "no 64-bit operations")),
            "rank 1: no 64-bit operations",
        ),
        (lambda t: replace(t, mps=Fact("yes", "mps", "MPS has a pipe")), "rank 1: MPS has a pipe"),
        (lambda t: replace(t, mps=Fact("unknown", "mps")), "rank 1: MPS: unknown"),
        (
            lambda t: replace(t, library=Fact("no", "x", "library _C_cuda not loaded: not built")),
            "rank 1: library _C_cuda not loaded: not built",
        ),
        (
            lambda t: replace(t, process=replace(t.process, pid=1000)),
            "ranks 0, 1: one process (pid 1000); start a process per rank",
        ),
    ],
)
def test_one_rank_decides_for_all_and_is_named(
    new: Callable[[Topology], Topology], text: str
) -> None:
    decision = decide(replaced_rank(1, new), NCCL)
    assert (decision.transport, decision.reasons) == ("nccl", (text,))


def test_nvml_missing_on_one_rank() -> None:
    gpus = machine(3)
    ranks = group_topologies(FakeNvml(gpus))
    missing = {"nvmlInit": pynvml.NVMLError(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)}
    nvml = FakeNvml(gpus, failures=missing)
    ranks[1] = rank_topology(nvml, FakeCuda(gpus, [0, 1, 2]), 1, rank=1)
    decision = decide(ranks, NCCL)
    cause = "rank 1: NVML does not start: NVMLError_DriverNotLoaded: Driver Not Loaded"
    assert (decision.transport, decision.reasons) == ("nccl", (cause,))


def test_library_missing_on_one_rank_is_said_once() -> None:
    gpus = machine(2)
    ranks = group_topologies(FakeNvml(gpus))
    ranks[1] = rank_topology(
        FakeNvml(gpus), FakeCuda(gpus, [0, 1]), 1, rank=1, native=NOT_LOADED, facts=lambda _: []
    )
    decision = decide(ranks, NCCL)
    assert decision.reasons == ("rank 1: library _C_cuda not loaded: not built",)


def test_mig_is_not_eligible() -> None:
    decision = decide(group_topologies(FakeNvml(machine(4), mig={2: 1, 3: 1})), NCCL)
    assert decision.reasons == ("ranks 2, 3: MIG is enabled on this GPU",)


def test_hosts_that_differ_are_named() -> None:
    def moved(topology: Topology) -> Topology:
        process = topology.process
        boot_id = replace(process.boot_id, value="other")
        return replace(topology, process=replace(process, hostname="far", boot_id=boot_id))

    decision = decide(replaced_rank(3, moved), NCCL)
    assert decision.transport == "nccl"
    assert "ranks differ in boot id: ranks 0, 1, 2 on " in decision.reasons[0]
    assert "rank 3 on far (boot id other); ce works within one host" in decision.reasons[0]


def test_host_names_do_not_matter() -> None:
    new = replaced_rank(3, lambda t: replace(t, process=replace(t.process, hostname="far")))
    assert decide(new, NCCL).transport == "ce"


def test_pid_namespaces_that_differ() -> None:
    def moved(topology: Topology) -> Topology:
        space = Reading("pid:[7]", "test")
        return replace(topology, process=replace(topology.process, pid_namespace=space))

    decision = decide(replaced_rank(1, moved), NCCL)
    assert decision.transport == "nccl"
    assert "ranks differ in PID namespace" in decision.reasons[0]


def test_two_ranks_on_one_gpu() -> None:
    ranks = group_topologies(FakeNvml(machine(2)), [0, 0, 1, 1])
    refused = decide(ranks, NCCL)
    uuid = f"GPU-{machine(1)[0].uuid}"
    assert refused.transport == "nccl"
    assert refused.reasons[0] == f"ranks 0, 1: share {uuid}; give each rank its own GPU"
    assert refused.warnings[0].startswith("NCCL may refuse this group: ranks 0, 1: share")
    assert decide(ranks, replace(NCCL, backends=("gloo",))).transport == "gloo"
    allowed = decide(ranks, replace(NCCL, allow_shared_devices=True))
    assert allowed.transport == "ce"


@pytest.mark.parametrize(
    ("mode", "alone", "shared"),
    [
        (pynvml.NVML_COMPUTEMODE_DEFAULT, "ce", "ce"),
        (pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS, "ce", "nccl"),
        (pynvml.NVML_COMPUTEMODE_EXCLUSIVE_THREAD, "ce", "nccl"),
        (pynvml.NVML_COMPUTEMODE_PROHIBITED, "nccl", "nccl"),
        (7, "ce", "ce"),
    ],
)
def test_compute_modes(mode: int, alone: str, shared: str) -> None:
    gpus = [machine(2)[0], replace(machine(2)[1], compute_mode=mode)]
    decision = decide(group_topologies(FakeNvml(gpus)), NCCL)
    assert decision.transport == alone
    request = replace(NCCL, allow_shared_devices=True)
    together = decide(group_topologies(FakeNvml(gpus), [0, 0, 1, 1]), request)
    assert together.transport == shared
    if shared != "ce":
        assert together.reasons[0].startswith("ranks 2, 3: compute mode of NVML 1 is ")
        assert together.reasons[0].endswith("as root: nvidia-smi -i 1 -c DEFAULT")


@pytest.mark.parametrize("fabric", [(1, 0), (2, 0), (3, 9), (9, 0)])
def test_a_fabric_that_is_not_up_is_a_warning_and_no_verdict(fabric: tuple[int, int]) -> None:
    gpus = [machine(2)[0], replace(machine(2)[1], fabric=fabric)]
    decision = decide(group_topologies(FakeNvml(gpus)), NCCL)
    assert decision.transport == "ce"
    (warning,) = decision.warnings
    assert warning.startswith("rank 1: fabric state is ")
    for settled in ((0, 0), (3, 0)):  # control
        gpus[1] = replace(gpus[1], fabric=settled)
        assert decide(group_topologies(FakeNvml(gpus)), NCCL).warnings == ()


def test_sharing_does_not_excuse_a_bad_pair() -> None:
    nvml = FakeNvml(machine(2), islands(2, []))
    request = replace(NCCL, allow_shared_devices=True)
    decision = decide(group_topologies(nvml, [0, 0, 1]), request)
    assert decision.transport == "nccl"
    assert pair_lines(decision) == {(0, 2), (1, 2), (2, 0), (2, 1)}


# Devices, backends, requests


def cpu_ranks(count: int) -> list[Topology]:
    return [probe(torch.device("cpu"), environ=NO_MPS)] * count


def test_cpu_devices_use_gloo() -> None:
    assert decide(cpu_ranks(2), Request()).transport == "gloo"
    assert decide(cpu_ranks(2), Request(transport="gloo")).transport == "gloo"


@pytest.mark.parametrize("transport", ["ce", "nccl"])
def test_cpu_devices_have_no_other_transport(transport: str) -> None:
    decision = decide(cpu_ranks(2), Request(transport=transport, backends=("nccl",)))
    assert decision.transport is None
    assert f"transport={transport!r} needs CUDA devices" in decision.reasons[0]


@pytest.mark.parametrize("transport", [None, "ce", "gloo"])
def test_mixed_devices_are_refused(transport: str | None) -> None:
    ranks = [*full_mesh(2), *cpu_ranks(1)]
    decision = decide(ranks, Request(transport=transport, backends=("nccl", "gloo")))
    assert decision.transport is None
    assert "cpu on rank 2, cuda on ranks 0, 1" in decision.reasons[0]


def test_no_device_is_refused() -> None:
    bare = probe(None, nvml=FakeNvml(machine(2)), environ=NO_MPS)
    decision = decide([bare, bare], NCCL)
    assert (decision.transport, "none on ranks 0, 1" in decision.reasons[0]) == (None, True)


@pytest.mark.parametrize("transport", [None, "ce", "nccl", "gloo"])
def test_one_rank_needs_no_mapping(transport: str | None) -> None:
    nothing = replace(full_mesh(1)[0], nvml=Fact("unknown", "nvml"), library=Fact("no", "x"))
    for ranks in ([nothing], cpu_ranks(1)):
        assert decide(ranks, Request(transport=transport)).transport == "local"


@pytest.mark.parametrize(
    ("forced", "backends", "connected", "transport"),
    [
        (None, ("nccl", "gloo"), True, "ce"),
        (None, (), True, "ce"),
        (None, ("gloo", "nccl"), False, "nccl"),
        (None, ("gloo",), False, "gloo"),
        (None, ("mpi",), False, None),
        ("ce", ("nccl",), True, "ce"),
        ("ce", ("nccl",), False, None),
        ("nccl", ("nccl",), True, "nccl"),
        ("nccl", ("gloo",), True, None),
        ("gloo", ("nccl", "gloo"), True, "gloo"),
        ("gloo", ("nccl",), False, None),
    ],
)
def test_transport_by_request_and_backends(
    forced: str | None, backends: tuple[str, ...], connected: bool, transport: str | None
) -> None:
    ranks = group_topologies(FakeNvml(machine(2), {} if connected else islands(2, [])))
    decision = decide(ranks, Request(transport=forced, backends=backends))
    assert decision.transport == transport
    assert decision.reasons
    if transport is None:
        text = "; ".join(decision.reasons)
        assert "transport='ce' is not eligible" in text or "in the process group" in text
    if not connected and forced in (None, "ce"):
        assert pair_lines(decision) == {(0, 1), (1, 0)}


@pytest.mark.parametrize(("forced", "transport"), [(None, "nccl"), ("ce", None)])
def test_a_mapping_that_failed_after_the_verdict(forced: str | None, transport: str | None) -> None:
    request = replace(NCCL, transport=forced)
    assert decide(full_mesh(2), request).transport == "ce"
    decision = decide_without_ce(full_mesh(2), request, ["rank 1: EPERM"])
    assert (decision.transport, decision.reasons[-1]) == (transport, "rank 1: EPERM")


def test_arguments_are_checked() -> None:
    with pytest.raises(ValueError, match="transport='nvshmem' is not known; pass one of ce, nccl"):
        Request(transport="nvshmem")
    with pytest.raises(ValueError, match="topologies is empty"):
        decide([], Request())


def test_what_costs_speed_is_a_warning() -> None:
    gpus = machine(2)
    ranks = [
        rank_topology(
            FakeNvml(gpus),
            FakeCuda(gpus, [0, 1]),
            rank,
            rank=rank,
            facts=lambda _: [1, 0, 3],
            environ={"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if rank else {},
        )
        for rank in range(2)
    ]
    decision = decide(ranks, NCCL)
    assert decision.transport == "ce"
    assert decision.warnings == ("rank 1: CUDA_DEVICE_MAX_CONNECTIONS=1 loses overlap; unset it",)
    assert decision.reasons[1:] == ("ranks 0, 1: no flush of remote writes, waits go without it",)
