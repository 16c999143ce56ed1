"""Facts about this process, its GPU and the pairs of GPUs around it.

:func:`probe` asks NVML, CUDA and the operating system and returns a frozen :class:`Topology`. It
never raises: what it could not learn is ``unknown``, with the reason. It decides nothing, which is
the part of ``eligibility``.

GPUs are named by UUID and PCI id. NVML counts the GPUs of the host, CUDA the visible ones in an
order of its own: an index of the one means nothing to the other.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from . import host
from ._native import NATIVE, NativeLibraries
from .asking import attempt
from .facts import CudaDevice, Fact, Gpu, Pair, Reading, Topology
from .nvml import Survey, pci_bus_id, survey

__all__ = ["Fact", "Topology", "probe"]


def probe(
    device: torch.device | None,
    *,
    every_device: bool = False,
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
        every_device: Whether to fill ``devices`` with every CUDA device of this process.
        nvml: Stands in for the module ``pynvml``.
        cuda: Stands in for ``torch.cuda``.
        device_facts: CUDA ordinal -> [64-bit stream memory operations, flush of remote writes,
            number of asynchronous engines, multicast]; by default
            ``torch.ops.ulysses._cuda_device_facts``.
        native: What is known of the compiled libraries.
        environ: Stands in for ``os.environ``.
    """
    environ = os.environ if environ is None else environ
    kind, name = ("", "") if device is None else (device.type, str(device))
    not_asked = Fact("unknown", "probe", f"GPUs were not asked for (device {name or 'not given'})")
    seen_host = Survey(not_asked) if kind not in ("", "cuda") else survey(nvml)
    seen = _Cuda(not_asked) if device is None or kind != "cuda" else _ask_cuda(cuda, device)
    owners = [(card, *_match(card, seen_host)) for card in seen.cards]
    ordinals = {gpu.uuid: card.ordinal for card, gpu, _ in owners if gpu is not None}
    device_uuid, identity = None, seen.status
    for card, gpu, fact in owners:
        if card.ordinal == seen.chosen:
            device_uuid, identity = card.uuid if gpu is None else gpu.uuid, fact
    own = _device(device_facts, seen, seen.chosen, device_uuid, identity)
    library_reason = "" if native.cuda else f"library _C_cuda not loaded: {native.cuda_reason}"
    return Topology(
        device=name if seen.chosen is None else f"{kind}:{seen.chosen}",
        device_uuid=device_uuid,
        process=host.process(),
        nvml=seen_host.status,
        identity=identity,
        gpus=tuple(replace(gpu, cuda_ordinal=ordinals.get(gpu.uuid)) for gpu in seen_host.gpus),
        pairs=tuple(
            replace(p, peer_access=_peer_access(seen, ordinals, p)) for p in seen_host.pairs
        ),
        stream_memory_64bit=own.stream_memory_64bit,
        flush_remote_writes=own.flush_remote_writes,
        async_engines=own.async_engines,
        multicast=own.multicast,
        mps=host.mps(environ),
        library=Fact("yes" if native.cuda else "no", "ulysses_ops", library_reason),
        driver_version=seen_host.driver_version,
        cuda_driver_version=seen_host.cuda_driver_version,
        torch_version=str(torch.__version__),
        torch_cuda_version=torch.version.cuda,
        visible_devices=environ.get("CUDA_VISIBLE_DEVICES"),
        max_connections=environ.get("CUDA_DEVICE_MAX_CONNECTIONS"),
        notes=seen_host.notes,
        container=host.container(environ),
        devices=tuple(
            _device(device_facts, seen, card.ordinal, card.uuid if gpu is None else gpu.uuid, fact)
            for card, gpu, fact in owners
            if every_device
        ),
    )


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

    report, why = attempt(ask)
    return report or _Cuda(Fact("unknown", "cuda", f"CUDA cannot be asked: {why}"))


def _card(module: Any, ordinal: int) -> _Card:
    properties = module.get_device_properties(ordinal)
    uuid, _ = attempt(lambda: "GPU-" + _bare(str(properties.uuid)))
    pci, _ = attempt(
        lambda: pci_bus_id(
            properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id
        )
    )
    return _Card(ordinal, uuid, pci)


def _bare(uuid: str) -> str:
    """Drop NVML's prefix, which CUDA leaves out."""
    return uuid.lower().removeprefix("gpu-").removeprefix("mig-")


def _match(card: _Card, host_gpus: Survey) -> tuple[Gpu | None, Fact]:
    """Find the GPU that a CUDA device is, by UUID and PCI id, which must not contradict each other.

    A slice of a GPU in MIG mode has a UUID of its own; there the PCI id alone counts.
    """
    if host_gpus.status.answer != "yes":
        return None, Fact("unknown", "nvml", f"GPU cannot be identified: {host_gpus.status.reason}")
    own = None if card.uuid is None else _bare(card.uuid)
    found = [
        (gpu, _bare(gpu.uuid) == own, card.pci_bus_id in (gpu.pci_bus_id, None))
        for gpu in host_gpus.gpus
        if _bare(gpu.uuid) == own
        or (card.pci_bus_id is not None and gpu.pci_bus_id == card.pci_bus_id)
    ]
    what = f"CUDA device {card.ordinal} ({card.uuid}, PCI {card.pci_bus_id})"
    if not found:
        reason = f"{what} is not among the {len(host_gpus.gpus)} GPUs that NVML lists"
        return None, Fact("unknown", "nvml", reason)
    if len(found) > 1:
        listed = ", ".join(f"{gpu.uuid} at PCI {gpu.pci_bus_id}" for gpu, _, _ in found)
        reason = f"{what} has its UUID and PCI id from several GPUs of NVML: {listed}"
        return None, Fact("unknown", "nvml", reason)
    gpu, by_uuid, by_pci = found[0]
    if by_uuid and not by_pci and gpu.pci_bus_id is not None:
        reason = f"{what} has PCI id {gpu.pci_bus_id} in NVML: the two contradict each other"
        return None, Fact("unknown", "nvml", reason)
    if not by_uuid and own is not None and gpu.mig.answer != "yes":
        reason = f"{what} has UUID {gpu.uuid} in NVML, and is not known to be a MIG slice of it"
        return None, Fact("unknown", "nvml", reason)
    return gpu, Fact("yes", "uuid" if by_uuid else "pci")


def _peer_access(seen: _Cuda, ordinals: Mapping[str, int], pair: Pair) -> Fact | None:
    source, target = ordinals.get(pair.source_uuid), ordinals.get(pair.target_uuid)
    if source is None or target is None:
        return None
    able, why = attempt(lambda: bool(seen.module.can_device_access_peer(source, target)))
    if able is None:
        return Fact("unknown", "cuda", f"CUDA peer access cannot be asked: {why}")
    return Fact("yes", "cuda") if able else Fact("no", "cuda", "CUDA refuses peer access")


def _device(
    ask: Callable[[int], Sequence[int]] | None,
    seen: _Cuda,
    ordinal: int | None,
    uuid: str | None,
    identity: Fact,
) -> CudaDevice:
    """Ask what the driver says of one device; ``identity`` is how it was matched to NVML."""

    def answers() -> list[int]:
        if ordinal is None:
            raise LookupError(seen.status.reason)
        call = torch.ops.ulysses._cuda_device_facts if ask is None else ask
        values = [int(value) for value in call(ordinal)]
        if len(values) < 3 or values[0] not in (0, 1) or values[1] not in (0, 1):
            raise ValueError(f"expected [0 or 1, 0 or 1, count], got {values}")
        return values

    values, why = attempt(answers)
    number = -1 if ordinal is None else ordinal
    if values is None:
        reason = f"stream memory operations cannot be asked for: {why}"
        unknown = Fact("unknown", "cuda", reason)
        engines = Reading(None, "cuda", reason)
        return CudaDevice(number, uuid, identity, unknown, unknown, engines, unknown)
    return CudaDevice(
        ordinal=number,
        uuid=uuid,
        identity=identity,
        stream_memory_64bit=_flag(values[0], "device has no 64-bit stream memory operations"),
        flush_remote_writes=_flag(values[1], "device cannot flush remote writes"),
        async_engines=Reading(values[2], "cuda"),
        multicast=_flag(values[3], "device has no multicast")
        if len(values) > 3
        else Fact("unknown", "cuda", "multicast was not told"),
    )


def _flag(value: int, reason: str) -> Fact:
    return Fact("yes", "cuda") if value else Fact("no", "cuda", reason)
