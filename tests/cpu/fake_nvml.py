"""Machines that do not exist: stand-ins for ``pynvml`` and ``torch.cuda``, and whole groups.

Constants and exceptions are pynvml's own, so that its pitfalls are in the tests too.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pynvml
import torch

from ulysses_ops._native import NativeLibraries
from ulysses_ops.eligibility import Decision
from ulysses_ops.topology import Topology, probe

LOADED = NativeLibraries(plan=True, plan_reason="", cuda=True, cuda_reason="")
NOT_LOADED = NativeLibraries(plan=True, plan_reason="", cuda=False, cuda_reason="not built")
NO_MPS = {"CUDA_MPS_PIPE_DIRECTORY": "/dev/null"}

OK = pynvml.NVML_P2P_STATUS_OK
NOT_SUPPORTED = pynvml.NVML_P2P_STATUS_NOT_SUPPORTED
READ, WRITE, NVLINK, ATOMICS = 0, 1, 2, 3
SWITCH, DOWN = -1, -2  # where a link leads, beside NVML indices
FACTS = [1, 1, 3, 1]  # 64-bit stream memory operations, flush, engines, multicast


@dataclass(frozen=True)
class FakeGpu:
    """A GPU as both NVML and CUDA show it."""

    uuid: str  # without prefix
    bus: int
    name: str = "NVIDIA Fake"
    capability: tuple[int, int] = (9, 0)
    memory_gib: int = 141
    persistence: int = 1
    compute_mode: int = 0
    virtualisation: int = 0
    fabric: tuple[int, int] = (3, 0)  # state, status
    numa_node: int = 0
    cpus: tuple[int, int] = (0, 47)  # first, last
    links: tuple[int, ...] = (SWITCH,) * 18  # remote: SWITCH, an NVML index, or DOWN
    link_version: int = pynvml.NVML_NVLINK_VERSION_4_0
    link_mbps: int | None = 26562  # of all links; None where NVML tells that of one link alone
    one_link_mbps: int | None = 26562


@dataclass
class FakeNvml:
    """The part of ``pynvml`` that is used.

    ``status`` maps (source, target, index of the capability), by NVML index, to a P2P status;
    what it lacks is OK. ``failures`` maps a function's name, or (name, NVML index), to what it
    raises, and the number of a call to what that one raises. ``mig`` maps an NVML index to the
    current MIG mode. ``ancestor`` is the PCI level of every pair, or maps a pair to it.
    """

    gpus: Sequence[FakeGpu]
    status: Mapping[tuple[int, int, int], int] = field(default_factory=dict)
    failures: Mapping[Any, Exception] = field(default_factory=dict)
    mig: Mapping[int, int] = field(default_factory=dict)
    open: int = 0
    started: int = 0

    NVML_P2P_CAPS_INDEX_READ: Any = pynvml.NVML_P2P_CAPS_INDEX_READ
    NVML_P2P_CAPS_INDEX_WRITE: Any = pynvml.NVML_P2P_CAPS_INDEX_WRITE
    NVML_P2P_CAPS_INDEX_NVLINK: Any = pynvml.NVML_P2P_CAPS_INDEX_NVLINK
    NVML_P2P_CAPS_INDEX_ATOMICS: Any = pynvml.NVML_P2P_CAPS_INDEX_ATOMICS
    NVML_NVLINK_MAX_LINKS: int = pynvml.NVML_NVLINK_MAX_LINKS
    NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON: int = pynvml.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON
    NVML_FI_DEV_NVLINK_GET_SPEED: int = pynvml.NVML_FI_DEV_NVLINK_GET_SPEED
    NVMLError: Any = pynvml.NVMLError
    c_nvmlGpuFabricInfo_t: Any = pynvml.c_nvmlGpuFabricInfo_t  # noqa: N815

    ancestor: int | Mapping[tuple[int, int], int] = pynvml.NVML_TOPOLOGY_SYSTEM
    calls: int = 0

    def _enter(self, name: str, index: int | None = None) -> None:
        self.calls += 1
        if self.calls in self.failures:
            raise self.failures[self.calls]
        if name != "nvmlInit" and self.open < 1:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_UNINITIALIZED)
        failure = self.failures.get(name)
        if failure is None and index is not None:
            failure = self.failures.get((name, index))
        if failure is not None:
            raise failure

    def nvmlInit(self) -> None:  # noqa: N802
        self._enter("nvmlInit")
        self.open += 1
        self.started += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self._enter("nvmlShutdown")
        self.open -= 1

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        self._enter("nvmlSystemGetDriverVersion")
        return "580.00"

    def nvmlSystemGetCudaDriverVersion(self) -> int:  # noqa: N802
        self._enter("nvmlSystemGetCudaDriverVersion")
        return 13000

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        self._enter("nvmlDeviceGetCount")
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        self._enter("nvmlDeviceGetHandleByIndex", index)
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:  # noqa: N802
        self._enter("nvmlDeviceGetUUID", handle)
        return f"GPU-{self.gpus[handle].uuid}"

    def nvmlDeviceGetName(self, handle: int) -> str:  # noqa: N802
        self._enter("nvmlDeviceGetName", handle)
        return self.gpus[handle].name

    def nvmlDeviceGetPciInfo(self, handle: int) -> SimpleNamespace:  # noqa: N802
        self._enter("nvmlDeviceGetPciInfo", handle)
        return SimpleNamespace(domain=0, bus=self.gpus[handle].bus, device=0)

    def nvmlDeviceGetMigMode(self, device: int) -> list[int]:  # noqa: N802
        self._enter("nvmlDeviceGetMigMode", device)
        mode = self.mig.get(device, pynvml.NVML_DEVICE_MIG_DISABLE)
        return [mode, mode]

    def nvmlDeviceGetCudaComputeCapability(self, handle: int) -> tuple[int, int]:  # noqa: N802
        self._enter("nvmlDeviceGetCudaComputeCapability", handle)
        return self.gpus[handle].capability

    def nvmlDeviceGetMemoryInfo(self, handle: int, version: int | None = None) -> SimpleNamespace:  # noqa: N802
        self._enter("nvmlDeviceGetMemoryInfo", handle)
        assert version is None
        return SimpleNamespace(total=self.gpus[handle].memory_gib << 30)

    def nvmlDeviceGetPersistenceMode(self, handle: int) -> int:  # noqa: N802
        self._enter("nvmlDeviceGetPersistenceMode", handle)
        return self.gpus[handle].persistence

    def nvmlDeviceGetComputeMode(self, handle: int) -> int:  # noqa: N802
        self._enter("nvmlDeviceGetComputeMode", handle)
        return self.gpus[handle].compute_mode

    def nvmlDeviceGetVirtualizationMode(self, handle: int) -> int:  # noqa: N802
        self._enter("nvmlDeviceGetVirtualizationMode", handle)
        return self.gpus[handle].virtualisation

    def nvmlDeviceGetNumaNodeId(self, handle: int) -> int:  # noqa: N802
        self._enter("nvmlDeviceGetNumaNodeId", handle)
        return self.gpus[handle].numa_node

    def nvmlDeviceGetCpuAffinity(self, handle: int, cpuSetSize: int) -> list[int]:  # noqa: N802, N803
        self._enter("nvmlDeviceGetCpuAffinity", handle)
        first, last = self.gpus[handle].cpus
        mask = ((1 << (last + 1 - first)) - 1) << first
        return [mask >> 64 * word & (1 << 64) - 1 for word in range(cpuSetSize)]

    def nvmlDeviceGetGpuFabricInfo(self, device: int, gpuFabricInfo: Any) -> int:  # noqa: N802, N803
        self._enter("nvmlDeviceGetGpuFabricInfo", device)
        info = gpuFabricInfo._obj  # as ctypes.byref keeps it; by value the call would be lost
        info.state, info.status = self.gpus[device].fabric
        return 0

    def _link(self, name: str, device: int, link: int) -> int:
        self._enter(name, device)
        links = self.gpus[device].links
        if not links:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        if link >= len(links):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return links[link]

    def nvmlDeviceGetNvLinkState(self, device: int, link: int) -> int:  # noqa: N802
        return int(self._link("nvmlDeviceGetNvLinkState", device, link) != DOWN)

    def nvmlDeviceGetNvLinkVersion(self, device: int, link: int) -> int:  # noqa: N802
        if self._link("nvmlDeviceGetNvLinkVersion", device, link) == DOWN:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return self.gpus[device].link_version

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: int, link: int) -> int:  # noqa: N802
        remote = self._link("nvmlDeviceGetNvLinkRemoteDeviceType", handle, link)
        to_switch = pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH
        return int(to_switch if remote == SWITCH else pynvml.NVML_NVLINK_DEVICE_TYPE_GPU)

    def nvmlDeviceGetNvLinkRemotePciInfo(self, device: int, link: int) -> SimpleNamespace:  # noqa: N802
        remote = self._link("nvmlDeviceGetNvLinkRemotePciInfo", device, link)
        return SimpleNamespace(domain=0, bus=self.gpus[remote].bus, device=0)

    def nvmlDeviceGetFieldValues(self, handle: int, fieldIds: list[Any]) -> list[SimpleNamespace]:  # noqa: N802, N803
        self._enter("nvmlDeviceGetFieldValues", handle)
        (asked,) = fieldIds
        if asked == pynvml.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON:
            told = self.gpus[handle].link_mbps
        else:
            field_id, link = asked
            assert field_id == pynvml.NVML_FI_DEV_NVLINK_GET_SPEED
            up = self.gpus[handle].links[link] != DOWN
            told = self.gpus[handle].one_link_mbps if up else None
        status = pynvml.NVML_ERROR_NOT_SUPPORTED if told is None else 0
        return [SimpleNamespace(nvmlReturn=status, value=SimpleNamespace(uiVal=told or 0))]

    def nvmlDeviceGetTopologyCommonAncestor(self, device1: int, device2: int) -> int:  # noqa: N802
        self._enter("nvmlDeviceGetTopologyCommonAncestor", device1)
        return self.ancestor if isinstance(self.ancestor, int) else self.ancestor[device1, device2]

    def nvmlDeviceGetP2PStatus(self, device1: int, device2: int, p2pIndex: int) -> int:  # noqa: N802, N803
        if not isinstance(p2pIndex, int):  # as ctypes does
            raise TypeError(f"don't know how to convert parameter 3: {p2pIndex!r}")
        self._enter("nvmlDeviceGetP2PStatus", device1)
        return self.status.get((device1, device2, p2pIndex), OK)


@dataclass
class FakeCuda:
    """The part of ``torch.cuda`` that is used: the GPUs ``visible``, in CUDA's order."""

    gpus: Sequence[FakeGpu]
    visible: Sequence[int]
    refused: frozenset[tuple[int, int]] = frozenset()
    current: int = 0
    hide_uuid: bool = False
    failures: Mapping[str, Exception] = field(default_factory=dict)

    def _enter(self, name: str) -> None:
        if name in self.failures:
            raise self.failures[name]

    def current_device(self) -> int:
        self._enter("current_device")
        return self.current

    def device_count(self) -> int:
        self._enter("device_count")
        return len(self.visible)

    def get_device_properties(self, ordinal: int) -> SimpleNamespace:
        self._enter("get_device_properties")
        gpu = self.gpus[self.visible[ordinal]]
        own = SimpleNamespace(pci_domain_id=0, pci_bus_id=gpu.bus, pci_device_id=0)
        if not self.hide_uuid:
            own.uuid = uuid.UUID(gpu.uuid)  # torch has a type of its own; only str() of it counts
        return own

    def can_device_access_peer(self, source: int, target: int) -> bool:
        self._enter("can_device_access_peer")
        return (self.visible[source], self.visible[target]) not in self.refused


def machine(count: int) -> list[FakeGpu]:
    """``count`` GPUs in NVML's order."""
    return [FakeGpu(str(uuid.UUID(int=0xA000 + i)), bus=0x10 + i) for i in range(count)]


def islands(count: int, groups: Sequence[Sequence[int]]) -> dict[tuple[int, int, int], int]:
    """P2P status of ``count`` GPUs that reach each other within ``groups`` alone."""
    inside = {(a, b) for group in groups for a in group for b in group}
    return {
        (a, b, kind): NOT_SUPPORTED
        for a in range(count)
        for b in range(count)
        if a != b and (a, b) not in inside
        for kind in (READ, WRITE, NVLINK)
    }


def rank_topology(
    nvml: Any,
    cuda: FakeCuda,
    ordinal: int,
    *,
    rank: int = 0,
    native: NativeLibraries = LOADED,
    facts: Callable[[int], Sequence[int]] = lambda _: FACTS,
    environ: Mapping[str, str] | None = None,
    every_device: bool = False,
) -> Topology:
    """What one rank learns; ranks are given processes of their own."""
    seen = probe(
        torch.device("cuda", ordinal),
        every_device=every_device,
        nvml=nvml,
        cuda=cuda,
        device_facts=facts,
        native=native,
        environ=NO_MPS if environ is None else {**NO_MPS, **environ},
    )
    return replace(seen, process=replace(seen.process, pid=1000 + rank))


def group_topologies(
    nvml: FakeNvml, members: Sequence[int] | None = None, visible: Sequence[int] | None = None
) -> list[Topology]:
    """One topology per rank; ``members`` are CUDA ordinals, by default each visible GPU."""
    order = list(range(len(nvml.gpus))) if visible is None else list(visible)
    cuda = FakeCuda(nvml.gpus, order)
    ordinals = range(len(order)) if members is None else members
    return [rank_topology(nvml, cuda, ordinal, rank=rank) for rank, ordinal in enumerate(ordinals)]


def full_mesh(count: int) -> list[Topology]:
    """Topologies of ``count`` ranks on as many GPUs that all reach each other."""
    return group_topologies(FakeNvml(machine(count)))


def pair_lines(decision: Decision) -> set[tuple[int, int]]:
    """The directed pairs of ranks that the reasons name."""
    heads = [reason.split(" [")[0].split() for reason in decision.reasons if " -> rank " in reason]
    return {(int(words[1]), int(words[4])) for words in heads}
