"""What a rank knows about itself and its GPUs, as frozen values that travel as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, is_dataclass
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
class Gpu:
    """A physical GPU that NVML lists; ``cuda_ordinal`` is its number in this process, if any."""

    uuid: str
    pci_bus_id: str | None
    name: str
    nvml_index: int
    cuda_ordinal: int | None
    mig: Fact


@dataclass(frozen=True)
class Pair:
    """What ``source_uuid`` can do with the memory of ``target_uuid``; the other way is another.

    ``read``, ``write`` and ``nvlink`` are NVML's P2P status, which is about the pair; a link that
    is up is not. ``peer_access`` is CUDA's word; None where this process cannot ask, because CUDA
    does not show it both GPUs.
    """

    source_uuid: str
    target_uuid: str
    read: Fact
    write: Fact
    nvlink: Fact
    peer_access: Fact | None


@dataclass(frozen=True)
class Topology:
    """What one rank knows. ``device`` is "" when none was given; ``device_uuid`` may be None."""

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
    mps: Fact
    library: Fact
    driver_version: Reading
    cuda_driver_version: Reading
    torch_version: str
    torch_cuda_version: str | None
    visible_devices: str | None
    max_connections: str | None
    notes: tuple[str, ...]

    @property
    def device_type(self) -> str:
        """``cpu``, ``cuda``, or "" when no device was given."""
        return self.device.partition(":")[0]

    @property
    def gpu(self) -> Gpu | None:
        """The GPU that this rank's device is (or is a slice of), if NVML lists it."""
        return next((gpu for gpu in self.gpus if gpu.uuid == self.device_uuid), None)

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
        hints = get_type_hints(kind)
        return kind(**{n: _decode(hints[n], value[n], f"{where}.{n}") for n in names})
    elif get_origin(kind) is tuple:
        if isinstance(value, list):
            return tuple(_decode(get_args(kind)[0], item, where) for item in value)
    elif (value in get_args(kind)) if get_origin(kind) is Literal else (type(value) is kind):
        return value
    raise ValueError(f"{where}: expected {kind}, got {value!r:.200}")
