"""What a rank knows about itself and its GPUs, as frozen values that travel as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from functools import cache
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

Answer = Literal["yes", "no", "unknown"]


@dataclass(frozen=True)
class Fact:
    """An answer, who gave it, and a phrase that stands alone when the answer is a problem."""

    answer: Answer
    source: str
    reason: str = ""


@dataclass(frozen=True)
class Reading:
    """A value read from ``source``, or None and the reason."""

    value: str | int | None
    source: str
    reason: str = ""


@dataclass(frozen=True)
class Process:
    """Where a rank runs. Equal boot ids are one running kernel, whatever the host names say."""

    hostname: str
    boot_id: Reading
    pid_namespace: Reading
    pid: int


@dataclass(frozen=True)
class Container:
    """What may keep processes of one host apart. It gates nothing: the mapping itself is tried.

    Attributes:
        runtime: ``none``, or the sign by which a container was recognised.
        ptrace_scope: Yama's setting; from 2 on, handing memory over needs ``CAP_SYS_PTRACE``.
        can_ptrace: Whether this process has ``CAP_SYS_PTRACE``.
        temporary: The folder where ranks meet by sockets: its path, device and inode.
        shared_memory_bytes: Size of ``/dev/shm``.
        virtualisation: ``none``, or what the kernel says it runs on.
    """

    runtime: Reading
    ptrace_scope: Reading
    can_ptrace: Fact
    temporary: Reading
    shared_memory_bytes: Reading
    virtualisation: Reading


@dataclass(frozen=True)
class LinkBundle:
    """The NVLinks of a GPU that are up and lead to one place.

    Attributes:
        remote: ``gpu``, ``switch``, ``npu`` or ``unknown``.
        remote_pci: PCI id of a remote GPU; None for everything else.
        count: How many links.
    """

    remote: str
    remote_pci: str | None
    count: int


@dataclass(frozen=True)
class Gpu:
    """A physical GPU that NVML lists; ``cuda_ordinal`` is its number in this process, if any.

    Of its own facts ``mig`` gates, and a compute mode that forbids use. ``nvlinks`` counts the
    links that are up, wherever they lead, ``nvlink_version`` is theirs, as in ``4.0``, and
    ``nvlink_mbps`` is the rate of one of them in one direction, in megabytes a second.
    """

    uuid: str
    pci_bus_id: str | None
    name: str
    nvml_index: int
    cuda_ordinal: int | None
    mig: Fact
    compute_capability: Reading
    memory_bytes: Reading
    persistence: Fact
    compute_mode: Reading
    virtualisation: Reading
    fabric: Reading
    numa_node: Reading
    cpu_affinity: Reading
    nvlinks: Reading
    nvlink_version: Reading
    nvlink_mbps: Reading
    links: tuple[LinkBundle, ...]

    @property
    def has_switch(self) -> bool:
        """Whether a link of this GPU leads to an NVSwitch."""
        return any(bundle.remote == "switch" for bundle in self.links)


@dataclass(frozen=True)
class Pair:
    """What ``source_uuid`` can do with the memory of ``target_uuid``; the other way is another.

    ``read``, ``write``, ``nvlink`` and ``atomics`` are NVML's P2P status, which is about the pair;
    a link that is up is not. ``peer_access`` is CUDA's word; None where this process cannot ask,
    because CUDA does not show it both GPUs. ``atomics`` and ``ancestor``, the nearest place where
    the two meet on PCI, gate nothing.
    """

    source_uuid: str
    target_uuid: str
    read: Fact
    write: Fact
    nvlink: Fact
    peer_access: Fact | None
    atomics: Fact
    ancestor: Reading


@dataclass(frozen=True)
class CudaDevice:
    """What a rank with this CUDA device would know of it by itself."""

    ordinal: int
    uuid: str | None
    identity: Fact
    stream_memory_64bit: Fact
    flush_remote_writes: Fact
    async_engines: Reading
    multicast: Fact


@dataclass(frozen=True)
class Topology:
    """What one rank knows. ``device`` is "" when none was given; ``device_uuid`` may be None.

    ``devices`` are all CUDA devices of the process, where they were asked for: one process may
    then be judged as the ranks that it could be started as (:meth:`as_ranks`).
    """

    device: str
    device_uuid: str | None
    process: Process
    nvml: Fact
    identity: Fact
    gpus: tuple[Gpu, ...]
    pairs: tuple[Pair, ...]
    stream_memory_64bit: Fact
    flush_remote_writes: Fact
    async_engines: Reading
    multicast: Fact
    mps: Fact
    library: Fact
    driver_version: Reading
    cuda_driver_version: Reading
    torch_version: str
    torch_cuda_version: str | None
    visible_devices: str | None
    max_connections: str | None
    notes: tuple[str, ...]
    container: Container
    devices: tuple[CudaDevice, ...]

    @property
    def device_type(self) -> str:
        """``cpu``, ``cuda``, or "" when no device was given."""
        return self.device.partition(":")[0]

    @property
    def gpu(self) -> Gpu | None:
        """The GPU that this rank's device is (or is a slice of), if NVML lists it, and once."""
        found = [gpu for gpu in self.gpus if gpu.uuid == self.device_uuid]
        return found[0] if len(found) == 1 else None

    def direct_links(self, uuid: str) -> int:
        """How many NVLinks lead from this rank's GPU to that of ``uuid`` with no switch between."""
        target = next((gpu for gpu in self.gpus if gpu.uuid == uuid), None)
        if self.gpu is None or target is None or target.pci_bus_id is None:
            return 0
        return sum(b.count for b in self.gpu.links if b.remote_pci == target.pci_bus_id)

    def as_ranks(self) -> tuple[Topology, ...]:
        """What the ranks of a group would know if each were given one of ``devices``, in order."""
        return tuple(
            replace(
                self,
                device=f"cuda:{device.ordinal}",
                device_uuid=device.uuid,
                process=replace(self.process, pid=self.process.pid + rank),
                identity=device.identity,
                stream_memory_64bit=device.stream_memory_64bit,
                flush_remote_writes=device.flush_remote_writes,
                async_engines=device.async_engines,
                multicast=device.multicast,
            )
            for rank, device in enumerate(self.devices)
        )

    def to_json(self) -> str:
        """Return compact JSON, equal for equal topologies."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Topology:
        """Rebuild what :meth:`to_json` wrote.

        Raises:
            ValueError: a field is missing, unknown or of another type, as from another version.
        """
        decoded = _decode(cls, json.loads(text), "topology")
        assert isinstance(decoded, Topology)
        return decoded


_hints = cache(get_type_hints)  # the annotations of a class never change


def _decode(kind: Any, value: Any, where: str) -> Any:
    """Build a value of the annotated type ``kind`` from what JSON gives."""
    if isinstance(kind, UnionType):
        for option in get_args(kind):
            if type(value) is (dict if is_dataclass(option) else option):
                return _decode(option, value, where)
    elif isinstance(kind, type) and is_dataclass(kind):
        names = sorted(field.name for field in fields(kind))
        if not isinstance(value, dict) or sorted(value) != names:
            raise ValueError(f"{where}: expected the fields {names}, got {value!r:.200}")
        hints = _hints(kind)
        return kind(**{n: _decode(hints[n], value[n], f"{where}.{n}") for n in names})
    elif get_origin(kind) is tuple:
        if isinstance(value, list):
            return tuple(_decode(get_args(kind)[0], item, where) for item in value)
    elif (value in get_args(kind)) if get_origin(kind) is Literal else (type(value) is kind):
        return value
    raise ValueError(f"{where}: expected {kind}, got {value!r:.200}")
