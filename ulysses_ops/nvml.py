"""What NVML says of the GPUs of this host and of every pair of them.

This is the only module that imports NVML. One survey is one ``nvmlInit`` and one ``nvmlShutdown``;
each question may fail by itself and then leaves ``unknown`` or None, with the reason.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Any

from .asking import attempt, read
from .facts import Fact, Gpu, LinkBundle, Pair, Reading

PCI_DEVICES_PATH = Path("/sys/bus/pci/devices")

MIG_DISABLED = 0
P2P_STATUS_NAMES = (  # by value
    "OK",
    "CHIPSET_NOT_SUPPORTED",
    "GPU_NOT_SUPPORTED",
    "IOH_TOPOLOGY_NOT_SUPPORTED",
    "DISABLED_BY_REGKEY",
    "NOT_SUPPORTED",
    "UNKNOWN",
)
COMPUTE_MODE_NAMES = ("default", "exclusive thread", "prohibited", "exclusive process")
VIRTUALISATION_NAMES = ("none", "passthrough", "vgpu", "host vgpu", "host vsga")
FABRIC_STATE_NAMES = ("not supported", "not started", "in progress", "completed")
LINK_REMOTE_NAMES = ("gpu", "npu", "switch")
NVLINK_VERSIONS = ("", "1.0", "2.0", "2.2", "3.0", "3.1", "4.0", "5.0", "6.0")
# What a link of a version carries in one direction, where every GPU of it has the same.
NOMINAL_MBPS = {"2.2": 25000, "3.0": 25000, "4.0": 25000, "5.0": 50000}
ANCESTOR_NAMES = {
    0: "internal",
    10: "single",
    20: "multiple",
    30: "hostbridge",
    40: "node",
    50: "system",
}
AFFINITY_WORDS = 16  # of 64 CPUs each


_UNREAD = Reading(None, "nvml", "NVML was not read")
NO_LINK = Reading(None, "nvml", "no NVLink is up")


@dataclass(frozen=True)
class Survey:
    """What NVML said."""

    status: Fact
    gpus: tuple[Gpu, ...] = ()
    pairs: tuple[Pair, ...] = ()
    driver_version: Reading = _UNREAD
    cuda_driver_version: Reading = _UNREAD
    notes: tuple[str, ...] = ()


def import_nvml() -> Any:
    """The binding, which may be missing."""
    import pynvml

    return pynvml


def survey(nvml: Any) -> Survey:
    """Read NVML between one init and one shutdown; ``nvml`` stands in for ``pynvml``."""
    if nvml is None:
        nvml, why = attempt(import_nvml)
        if why:
            return Survey(Fact("unknown", "nvml", f"NVML not importable: {why}"))
    _, why = attempt(partial(methodcaller("nvmlInit"), nvml))
    if why:
        return Survey(Fact("unknown", "nvml", f"NVML does not start: {why}"))
    try:
        report, why = attempt(lambda: _read_all(nvml))
    finally:
        attempt(partial(methodcaller("nvmlShutdown"), nvml))
    return report or Survey(Fact("unknown", "nvml", f"NVML cannot be read: {why}"))


@contextmanager
def started(nvml: Any = None) -> Iterator[None]:
    """Keep NVML up, so that a survey within pays for its questions alone. Never raises."""
    if nvml is None:
        nvml, _ = attempt(import_nvml)
    _, why = attempt(partial(methodcaller("nvmlInit"), nvml))
    try:
        yield
    finally:
        if not why:
            attempt(partial(methodcaller("nvmlShutdown"), nvml))


def _read_all(nvml: Any) -> Survey:
    found: list[tuple[Gpu, Any]] = []
    notes: list[str] = []
    for index in range(nvml.nvmlDeviceGetCount()):
        entry, why = attempt(partial(_gpu, nvml, index))
        if entry is None:
            notes.append(f"NVML device {index} cannot be read: {why}")
        else:
            found.append(entry)
    return Survey(
        status=Fact("yes", "nvml") if found else Fact("no", "nvml", "NVML lists no readable GPU"),
        gpus=tuple(gpu for gpu, _ in found),
        pairs=_pairs(nvml, found),
        driver_version=read("nvml", lambda: _text(nvml.nvmlSystemGetDriverVersion())),
        cuda_driver_version=read("nvml", lambda: int(nvml.nvmlSystemGetCudaDriverVersion())),
        notes=tuple(notes),
    )


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _gpu(nvml: Any, index: int) -> tuple[Gpu, Any]:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    uuid = _text(nvml.nvmlDeviceGetUUID(handle))
    name, why_name = attempt(lambda: _text(nvml.nvmlDeviceGetName(handle)))
    bus_id, _ = attempt(lambda: _pci(nvml.nvmlDeviceGetPciInfo(handle)))
    count, first_link, links = _links(nvml, handle)
    version = NO_LINK
    if count.value:
        version = _read_name(
            NVLINK_VERSIONS, lambda: nvml.nvmlDeviceGetNvLinkVersion(handle, first_link)
        )
    gpu = Gpu(
        uuid=uuid,
        pci_bus_id=bus_id,
        name=name or why_name,
        nvml_index=index,
        cuda_ordinal=None,
        mig=_mig(nvml, handle),
        compute_capability=read(
            "nvml", lambda: "{}.{}".format(*nvml.nvmlDeviceGetCudaComputeCapability(handle))
        ),
        memory_bytes=read("nvml", lambda: int(nvml.nvmlDeviceGetMemoryInfo(handle).total)),
        persistence=_persistence(nvml, handle),
        compute_mode=_read_name(COMPUTE_MODE_NAMES, lambda: nvml.nvmlDeviceGetComputeMode(handle)),
        virtualisation=_read_name(
            VIRTUALISATION_NAMES, lambda: nvml.nvmlDeviceGetVirtualizationMode(handle)
        ),
        fabric=read("nvml", lambda: _fabric(nvml, handle)),
        numa_node=_numa_node(nvml, handle, bus_id),
        cpu_affinity=read(
            "nvml", lambda: _cpu_ranges(nvml.nvmlDeviceGetCpuAffinity(handle, AFFINITY_WORDS))
        ),
        nvlinks=count,
        nvlink_version=version,
        nvlink_mbps=_link_mbps(nvml, handle, first_link, version) if count.value else NO_LINK,
        links=links,
    )
    return gpu, handle


def pci_bus_id(domain: int, bus: int, device: int) -> str:
    """Return a PCI id in the form that facts use."""
    return f"{domain:08x}:{bus:02x}:{device:02x}.0"


def _pci(info: Any) -> str:
    return pci_bus_id(info.domain, info.bus, info.device)


def _mig(nvml: Any, handle: Any) -> Fact:
    modes, why = attempt(lambda: [int(mode) for mode in nvml.nvmlDeviceGetMigMode(handle)])
    if _not_supported(why):
        return Fact("no", "nvml", "this GPU has no MIG mode")  # how NVML says exactly that
    if not modes:
        return Fact("unknown", "nvml", f"MIG mode cannot be read: {why}")
    if modes[0] == MIG_DISABLED:
        return Fact("no", "nvml")
    return Fact("yes", "nvml", "MIG is enabled on this GPU")


def _not_supported(why: str) -> bool:
    return why.startswith("NVMLError_NotSupported")


def _persistence(nvml: Any, handle: Any) -> Fact:
    mode, why = attempt(lambda: int(nvml.nvmlDeviceGetPersistenceMode(handle)))
    if mode is None:
        return Fact("unknown", "nvml", f"persistence mode cannot be read: {why}")
    return Fact("yes" if mode else "no", "nvml", "" if mode else "persistence mode is off")


def _read_name(names: Sequence[str], ask: Callable[[], int]) -> Reading:
    """Read a number that stands for one of ``names``."""
    return read("nvml", lambda: _name(names, int(ask())))


def _name(names: Sequence[str], value: int) -> str:
    """Return what a value is called; one of the future, or of no meaning, stays a number."""
    return (names[value] if 0 <= value < len(names) else "") or f"unknown ({value})"


def _fabric(nvml: Any, handle: Any) -> str:
    info = nvml.c_nvmlGpuFabricInfo_t()
    nvml.nvmlDeviceGetGpuFabricInfo(handle, ctypes.byref(info))
    name = _name(FABRIC_STATE_NAMES, info.state)
    return f"{name}, status {info.status}" if name == "completed" and info.status else name


def _numa_node(nvml: Any, handle: Any, bus_id: str | None) -> Reading:
    """Ask NVML, which knows nodes that are GPUs' own memory, then the bus the GPU sits on."""
    told = read("nvml", lambda: int(nvml.nvmlDeviceGetNumaNodeId(handle)))
    if told.value is not None or bus_id is None:
        return told
    path = PCI_DEVICES_PATH / bus_id[4:] / "numa_node"
    node, why = attempt(lambda: int(path.read_text()))
    if node is None or node < 0:
        reason = f"NVML: {told.reason}; {path}: {why or f'{node}, no node is named'}"
        return Reading(None, "nvml", reason[:300])
    return Reading(node, str(path))


def _cpu_ranges(words: Sequence[int]) -> str:
    """Write a mask of CPUs as ``0-47,96-143``."""
    cpus = {64 * i + bit for i, word in enumerate(words) for bit in range(64) if word >> bit & 1}
    starts = sorted(cpu for cpu in cpus if cpu - 1 not in cpus)
    ends = sorted(cpu for cpu in cpus if cpu + 1 not in cpus)
    return ",".join(f"{a}-{b}" if b > a else f"{a}" for a, b in zip(starts, ends, strict=True))


def _links(nvml: Any, handle: Any) -> tuple[Reading, int, tuple[LinkBundle, ...]]:
    """Count the links that are up, find the first of them, and count again by where they lead."""
    ends: Counter[tuple[str, str | None]] = Counter()
    first = 0
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        state, why = attempt(partial(nvml.nvmlDeviceGetNvLinkState, handle, link))
        if state is None and _not_supported(why) and link == 0:
            return Reading(0, "nvml", "this GPU has no NVLink"), 0, ()
        if state is None and (why.startswith("NVMLError_InvalidArgument") or _not_supported(why)):
            break  # past the last link of this GPU
        if state is None:
            return Reading(None, "nvml", f"state of link {link} cannot be read: {why}"), 0, ()
        if state:
            first = first if ends else link
            ends[_remote(nvml, handle, link)] += 1
    bundles = sorted(ends.items(), key=lambda item: (item[0][0], item[0][1] or ""))
    return (
        Reading(sum(ends.values()), "nvml"),
        first,
        tuple(LinkBundle(remote, pci, count) for (remote, pci), count in bundles),
    )


def _remote(nvml: Any, handle: Any, link: int) -> tuple[str, str | None]:
    kind, _ = attempt(lambda: int(nvml.nvmlDeviceGetNvLinkRemoteDeviceType(handle, link)))
    if kind is None or not 0 <= kind < len(LINK_REMOTE_NAMES):
        return "unknown", None
    name = LINK_REMOTE_NAMES[kind]
    if name != "gpu":
        return name, None
    pci, _ = attempt(lambda: _pci(nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link)))
    return name, pci


def _link_mbps(nvml: Any, handle: Any, link: int, version: Reading) -> Reading:
    """Ask for the rate of all links, then of the first; where there is none, say the nominal."""
    told = read("nvml", lambda: _field(nvml, handle, nvml.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON))
    if not told.value:
        told = read("nvml", lambda: _field(nvml, handle, (nvml.NVML_FI_DEV_NVLINK_GET_SPEED, link)))
    nominal = NOMINAL_MBPS.get(str(version.value))
    if told.value or nominal is None:
        return told if told.value else Reading(None, "nvml", told.reason or "the rate told is 0")
    return Reading(nominal, f"nominal rate of NVLink {version.value}")


def _field(nvml: Any, handle: Any, field: int | tuple[int, int]) -> int:
    (answer,) = nvml.nvmlDeviceGetFieldValues(handle, [field])
    if answer.nvmlReturn != 0:
        raise nvml.NVMLError(answer.nvmlReturn)
    return int(answer.value.uiVal)


def _pairs(nvml: Any, found: Sequence[tuple[Gpu, Any]]) -> tuple[Pair, ...]:
    ancestors: dict[frozenset[str], Reading] = {}
    pairs = []
    for source, source_handle in found:
        for target, target_handle in found:
            if source is target:
                continue
            ends = frozenset((source.uuid, target.uuid))
            if ends not in ancestors:
                ask = partial(nvml.nvmlDeviceGetTopologyCommonAncestor, source_handle)
                ancestors[ends] = read("nvml", partial(_ancestor, ask, target_handle))
            status = partial(_p2p_status, nvml, source_handle, target_handle)
            pairs.append(
                Pair(
                    source_uuid=source.uuid,
                    target_uuid=target.uuid,
                    read=status("READ"),
                    write=status("WRITE"),
                    nvlink=status("NVLINK"),
                    peer_access=None,
                    atomics=status("ATOMICS"),
                    ancestor=ancestors[ends],
                )
            )
    return tuple(pairs)


def _ancestor(ask: Callable[[Any], int], target: Any) -> str:
    level = int(ask(target))
    return ANCESTOR_NAMES.get(level, f"unknown ({level})")


def _p2p_status(nvml: Any, source: Any, target: Any, kind: str) -> Fact:
    def ask() -> int:
        index = getattr(nvml, f"NVML_P2P_CAPS_INDEX_{kind}")
        # A stray comma makes the READ constant of nvidia-ml-py the tuple (0,).
        index = index[0] if isinstance(index, tuple) else index
        return int(nvml.nvmlDeviceGetP2PStatus(source, target, index))

    status, why = attempt(ask)
    if status is None:
        return Fact("unknown", "nvml", f"P2P {kind.lower()} status cannot be read: {why}")
    name = _name(P2P_STATUS_NAMES, status)
    if name == "OK":
        return Fact("yes", "nvml")
    known = name in P2P_STATUS_NAMES[:-1]
    return Fact("no" if known else "unknown", "nvml", f"P2P {kind.lower()} status is {name}")
