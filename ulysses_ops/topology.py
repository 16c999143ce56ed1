"""Facts about this process, its GPU and the pairs of GPUs around it.

:func:`probe` asks NVML, CUDA and the operating system and returns a frozen :class:`Topology`. It
never raises: what it could not learn is ``unknown``, with the reason. It decides nothing, which is
the part of ``eligibility``. This is the only module that imports NVML.

GPUs are named by UUID and PCI id. NVML counts the GPUs of the host, CUDA the visible ones in an
order of its own: an index of the one means nothing to the other.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Any, TypeVar

import torch

from ._native import NATIVE, NativeLibraries
from .facts import Fact, Gpu, Pair, Process, Reading, Topology

__all__ = ["Fact", "Topology", "probe"]

BOOT_ID_PATH = Path("/proc/sys/kernel/random/boot_id")
PID_NAMESPACE_PATH = Path("/proc/self/ns/pid")
MPS_DIRECTORY = "/tmp/nvidia-mps"  # noqa: S108  CUDA's default; only looked at

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

T = TypeVar("T")


def probe(
    device: torch.device | None,
    *,
    nvml: Any = None,
    cuda: Any = None,
    device_facts: Callable[[int], Sequence[int]] | None = None,
    native: NativeLibraries = NATIVE,
    environ: Mapping[str, str] | None = None,
) -> Topology:
    """Collect the facts that decide about a transport. Never raises, creates no CUDA context.

    For a CPU device, neither NVML nor CUDA is touched. With no device, NVML alone is asked. For a
    CUDA device, PyTorch's CUDA state is initialised (``get_device_properties`` needs it), which
    a process that wants to fork must not do before the fork.

    Args:
        device: The device of this rank; None for the GPUs of the host alone.
        nvml: Stands in for the module ``pynvml``.
        cuda: Stands in for ``torch.cuda``.
        device_facts: CUDA ordinal -> [64-bit stream memory operations, flush of remote writes,
            number of asynchronous engines]; by default ``torch.ops.ulysses._cuda_device_facts``.
        native: What is known of the compiled libraries.
        environ: Stands in for ``os.environ``.
    """
    environ = os.environ if environ is None else environ
    kind, name = ("", "") if device is None else (device.type, str(device))
    not_asked = Fact("unknown", "probe", f"GPUs were not asked for (device {name or 'not given'})")
    host = _Nvml(not_asked) if kind not in ("", "cuda") else _ask_nvml(nvml)
    seen = _Cuda(not_asked) if device is None or kind != "cuda" else _ask_cuda(cuda, device)
    owners = [(card, *_match(card, host)) for card in seen.cards]
    ordinals = {gpu.uuid: card.ordinal for card, gpu, _ in owners if gpu is not None}
    device_uuid, identity = None, seen.status
    for card, gpu, fact in owners:
        if card.ordinal == seen.chosen:
            device_uuid, identity = card.uuid if gpu is None else gpu.uuid, fact
    can_64bit, can_flush, engines = _stream_facts(device_facts, seen)
    library_reason = "" if native.cuda else f"library _C_cuda not loaded: {native.cuda_reason}"
    return Topology(
        device=name if seen.chosen is None else f"{kind}:{seen.chosen}",
        device_uuid=device_uuid,
        process=_process(),
        nvml=host.status,
        identity=identity,
        gpus=tuple(replace(gpu, cuda_ordinal=ordinals.get(gpu.uuid)) for gpu in host.gpus),
        pairs=tuple(replace(p, peer_access=_peer_access(seen, ordinals, p)) for p in host.pairs),
        stream_memory_64bit=can_64bit,
        flush_remote_writes=can_flush,
        async_engines=engines,
        mps=_mps(environ),
        library=Fact("yes" if native.cuda else "no", "ulysses_ops", library_reason),
        driver_version=host.driver_version,
        cuda_driver_version=host.cuda_driver_version,
        torch_version=str(torch.__version__),
        torch_cuda_version=torch.version.cuda,
        visible_devices=environ.get("CUDA_VISIBLE_DEVICES"),
        max_connections=environ.get("CUDA_DEVICE_MAX_CONNECTIONS"),
        notes=host.notes,
    )


def _attempt(call: Callable[[], T]) -> tuple[T | None, str]:
    """Return the result and "", or None and what went wrong."""
    try:
        return call(), ""
    except Exception as error:  # noqa: BLE001  whatever fails, the answer is "unknown"
        return None, f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def _read(source: str, call: Callable[[], str | int]) -> Reading:
    value, why = _attempt(call)
    return Reading(value, source) if value else Reading(None, source, why or "empty")


def _process() -> Process:
    hostname, _ = _attempt(socket.gethostname)
    return Process(
        hostname=hostname or "?",
        boot_id=_read(str(BOOT_ID_PATH), lambda: BOOT_ID_PATH.read_text().strip()),
        pid_namespace=_read(str(PID_NAMESPACE_PATH), lambda: str(PID_NAMESPACE_PATH.readlink())),
        pid=os.getpid(),
    )


def _mps(environ: Mapping[str, str]) -> Fact:
    """Would CUDA reach an MPS daemon from here? It looks for one even if no variable is set.

    A pipe left behind by a dead daemon also counts: that errs on the safe side.
    """
    place = Path(environ.get("CUDA_MPS_PIPE_DIRECTORY") or MPS_DIRECTORY)
    remedy = "CUDA_MPS_PIPE_DIRECTORY=/dev/null keeps CUDA away from MPS"
    names, why = _attempt(lambda: sorted(entry.name for entry in place.iterdir()))
    if names is None and not why.startswith(("FileNotFoundError", "NotADirectoryError")):
        return Fact("unknown", "mps", f"MPS directory {place} cannot be read ({why}); {remedy}")
    if names and "control" in names:
        return Fact("yes", "mps", f"MPS has a control pipe in {place}; {remedy}")
    if names:
        return Fact("unknown", "mps", f"MPS may run: {place} holds {names[0]}; {remedy}")
    if "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" in environ:
        reason = (
            f"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE is set, but {place} holds no MPS pipe; unset it"
        )
        return Fact("unknown", "mps", reason)
    return Fact("no", "mps")


_UNREAD = Reading(None, "nvml", "NVML was not read")


@dataclass(frozen=True)
class _Nvml:
    """What NVML said."""

    status: Fact
    gpus: tuple[Gpu, ...] = ()
    pairs: tuple[Pair, ...] = ()
    driver_version: Reading = _UNREAD
    cuda_driver_version: Reading = _UNREAD
    notes: tuple[str, ...] = ()


def _import_nvml() -> Any:
    import pynvml

    return pynvml


def _ask_nvml(nvml: Any) -> _Nvml:
    """Read NVML between one init and one shutdown."""
    if nvml is None:
        nvml, why = _attempt(_import_nvml)
        if why:
            return _Nvml(Fact("unknown", "nvml", f"NVML not importable: {why}"))
    _, why = _attempt(partial(methodcaller("nvmlInit"), nvml))
    if why:
        return _Nvml(Fact("unknown", "nvml", f"NVML does not start: {why}"))
    try:
        report, why = _attempt(lambda: _survey(nvml))
    finally:
        _attempt(partial(methodcaller("nvmlShutdown"), nvml))
    return report or _Nvml(Fact("unknown", "nvml", f"NVML cannot be read: {why}"))


def _survey(nvml: Any) -> _Nvml:
    found: list[tuple[Gpu, Any]] = []
    notes: list[str] = []
    for index in range(nvml.nvmlDeviceGetCount()):
        entry, why = _attempt(partial(_gpu, nvml, index))
        if entry is None:
            notes.append(f"NVML device {index} cannot be read: {why}")
        else:
            found.append(entry)
    return _Nvml(
        status=Fact("yes", "nvml") if found else Fact("no", "nvml", "NVML lists no readable GPU"),
        gpus=tuple(gpu for gpu, _ in found),
        pairs=tuple(_pair(nvml, a, b) for a in found for b in found if a is not b),
        driver_version=_read("nvml", lambda: _text(nvml.nvmlSystemGetDriverVersion())),
        cuda_driver_version=_read("nvml", lambda: int(nvml.nvmlSystemGetCudaDriverVersion())),
        notes=tuple(notes),
    )


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _gpu(nvml: Any, index: int) -> tuple[Gpu, Any]:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    uuid = _text(nvml.nvmlDeviceGetUUID(handle))
    name, why_name = _attempt(lambda: _text(nvml.nvmlDeviceGetName(handle)))
    pci, _ = _attempt(lambda: nvml.nvmlDeviceGetPciInfo(handle))
    bus_id = None if pci is None else _pci_bus_id(pci.domain, pci.bus, pci.device)
    return Gpu(uuid, bus_id, name or why_name, index, None, _mig(nvml, handle)), handle


def _pci_bus_id(domain: int, bus: int, device: int) -> str:
    return f"{domain:08x}:{bus:02x}:{device:02x}.0"


def _mig(nvml: Any, handle: Any) -> Fact:
    modes, why = _attempt(lambda: [int(mode) for mode in nvml.nvmlDeviceGetMigMode(handle)])
    if why.startswith("NVMLError_NotSupported"):
        return Fact("no", "nvml", "this GPU has no MIG mode")  # how NVML says exactly that
    if not modes:
        return Fact("unknown", "nvml", f"MIG mode cannot be read: {why}")
    if modes[0] == MIG_DISABLED:
        return Fact("no", "nvml")
    return Fact("yes", "nvml", "MIG is enabled on this GPU")


def _pair(nvml: Any, source: tuple[Gpu, Any], target: tuple[Gpu, Any]) -> Pair:
    read, write, nvlink = (
        _p2p_status(nvml, source[1], target[1], kind) for kind in ("READ", "WRITE", "NVLINK")
    )
    return Pair(source[0].uuid, target[0].uuid, read, write, nvlink, peer_access=None)


def _p2p_status(nvml: Any, source: Any, target: Any, kind: str) -> Fact:
    def ask() -> int:
        index = getattr(nvml, f"NVML_P2P_CAPS_INDEX_{kind}")
        # A stray comma makes the READ constant of nvidia-ml-py the tuple (0,).
        index = index[0] if isinstance(index, tuple) else index
        return int(nvml.nvmlDeviceGetP2PStatus(source, target, index))

    status, why = _attempt(ask)
    if status is None:
        return Fact("unknown", "nvml", f"P2P {kind.lower()} status cannot be read: {why}")
    name = P2P_STATUS_NAMES[status] if 0 <= status < len(P2P_STATUS_NAMES) else str(status)
    if name == "OK":
        return Fact("yes", "nvml")
    known = name in P2P_STATUS_NAMES[:-1]
    return Fact("no" if known else "unknown", "nvml", f"P2P {kind.lower()} status is {name}")


@dataclass(frozen=True)
class _Card:
    """A CUDA device of this process."""

    ordinal: int
    uuid: str | None
    pci_bus_id: str | None


@dataclass(frozen=True)
class _Cuda:
    """What CUDA said; ``module`` answers the questions about pairs."""

    status: Fact
    chosen: int | None = None
    cards: tuple[_Card, ...] = ()
    module: Any = None


def _ask_cuda(cuda: Any, device: torch.device) -> _Cuda:
    module = torch.cuda if cuda is None else cuda

    def ask() -> _Cuda:
        chosen = device.index if device.index is not None else int(module.current_device())
        cards = tuple(_card(module, ordinal) for ordinal in range(module.device_count()))
        missing = f"CUDA device {chosen} is not among the {len(cards)} visible to this process"
        return _Cuda(Fact("unknown", "cuda", missing), chosen, cards, module)

    report, why = _attempt(ask)
    return report or _Cuda(Fact("unknown", "cuda", f"CUDA cannot be asked: {why}"))


def _card(module: Any, ordinal: int) -> _Card:
    properties = module.get_device_properties(ordinal)
    uuid, _ = _attempt(lambda: "GPU-" + _bare(str(properties.uuid)))
    pci, _ = _attempt(
        lambda: _pci_bus_id(
            properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id
        )
    )
    return _Card(ordinal, uuid, pci)


def _bare(uuid: str) -> str:
    """Drop NVML's prefix, which CUDA leaves out."""
    return uuid.lower().removeprefix("gpu-").removeprefix("mig-")


def _match(card: _Card, host: _Nvml) -> tuple[Gpu | None, Fact]:
    """Find the GPU that a CUDA device is: by UUID, or by PCI id (a MIG slice has its own UUID)."""
    if host.status.answer != "yes":
        return None, Fact("unknown", "nvml", f"GPU cannot be identified: {host.status.reason}")
    own = None if card.uuid is None else _bare(card.uuid)
    by_uuid = next((gpu for gpu in host.gpus if _bare(gpu.uuid) == own), None)
    by_pci = next(
        (
            gpu
            for gpu in host.gpus
            if gpu.pci_bus_id is not None and gpu.pci_bus_id == card.pci_bus_id
        ),
        None,
    )
    what = f"CUDA device {card.ordinal} ({card.uuid}, PCI {card.pci_bus_id})"
    if by_uuid and by_pci and by_uuid is not by_pci:
        reason = f"{what} has the UUID of one GPU and the PCI id of another in NVML"
        return None, Fact("unknown", "nvml", reason)
    gpu = by_uuid or by_pci
    if gpu is None:
        reason = f"{what} is not among the {len(host.gpus)} GPUs that NVML lists"
        return None, Fact("unknown", "nvml", reason)
    return gpu, Fact("yes", "uuid" if by_uuid else "pci")


def _peer_access(seen: _Cuda, ordinals: Mapping[str, int], pair: Pair) -> Fact | None:
    source, target = ordinals.get(pair.source_uuid), ordinals.get(pair.target_uuid)
    if source is None or target is None:
        return None
    able, why = _attempt(lambda: bool(seen.module.can_device_access_peer(source, target)))
    if able is None:
        return Fact("unknown", "cuda", f"CUDA peer access cannot be asked: {why}")
    return Fact("yes", "cuda") if able else Fact("no", "cuda", "CUDA refuses peer access")


def _stream_facts(
    ask: Callable[[int], Sequence[int]] | None, seen: _Cuda
) -> tuple[Fact, Fact, Reading]:
    """Return 64-bit stream memory operations, flush of remote writes, asynchronous engines."""

    def answers() -> list[int]:
        if seen.chosen is None:
            raise LookupError(seen.status.reason)
        call = torch.ops.ulysses._cuda_device_facts if ask is None else ask
        values = [int(value) for value in call(seen.chosen)]
        if len(values) < 3 or values[0] not in (0, 1) or values[1] not in (0, 1):
            raise ValueError(f"expected [0 or 1, 0 or 1, count], got {values}")
        return values

    values, why = _attempt(answers)
    if values is None:
        reason = f"stream memory operations cannot be asked for: {why}"
        unknown = Fact("unknown", "cuda", reason)
        return unknown, unknown, Reading(None, "cuda", reason)
    lacks = Fact("no", "cuda", "device has no 64-bit stream memory operations")
    stays = Fact("no", "cuda", "device cannot flush remote writes")
    yes = Fact("yes", "cuda")
    return yes if values[0] else lacks, yes if values[1] else stays, Reading(values[2], "cuda")
