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
READ, WRITE, NVLINK = 0, 1, 2


@dataclass(frozen=True)
class FakeGpu:
    """A GPU as both NVML and CUDA show it."""

    uuid: str  # without prefix
    bus: int
    name: str = "NVIDIA Fake"


@dataclass
class FakeNvml:
    """The part of ``pynvml`` that is used.

    ``status`` maps (source, target, index of the capability), by NVML index, to a P2P status;
    what it lacks is OK. ``failures`` maps a function's name, or (name, NVML index), to what it
    raises. ``mig`` maps an NVML index to the current MIG mode.
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

    def _enter(self, name: str, index: int | None = None) -> None:
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
    facts: Callable[[int], Sequence[int]] = lambda _: [1, 1, 3],
    environ: Mapping[str, str] | None = None,
) -> Topology:
    """What one rank learns; ranks are given processes of their own."""
    seen = probe(
        torch.device("cuda", ordinal),
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
