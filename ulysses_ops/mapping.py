"""Memory that every rank of a group can write: the only module that names its two providers.

``symm_mem`` is PyTorch's symmetric memory (alpha by its own word, so every use of it is here).
``ipc`` is CUDA IPC on memory that this package allocates itself: never a block of the caching
allocator, whose handle would expose its neighbours and fails with expandable segments.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from .agreement import Agreement, group_store
from .errors import UlyssesError

MappingKind = Literal["symm_mem", "ipc"]
RENDEZVOUS_TIMEOUT_S = 5.0  # the ranks have just met: none is far behind
MAPPING_KINDS: tuple[MappingKind, ...] = ("symm_mem", "ipc")


@dataclass(frozen=True)
class SharedMemory:
    """One allocation that all ranks of the group have mapped.

    Attributes:
        tensor: This rank's memory, ``uint8``; keeps the allocation alive.
        pointers: Address of every rank's memory as mapped here, by rank.
        release: Gives up what was opened and allocated. Local; call it when nothing is in flight.
    """

    tensor: Tensor
    pointers: tuple[int, ...]
    release: Callable[[], None]


class _DeviceBytes:
    """Raw device memory, described so that torch can wrap it without a copy."""

    def __init__(self, pointer: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (pointer, False),
            "version": 3,
        }


def allocate(
    kind: MappingKind,
    num_bytes: int,
    *,
    group: ProcessGroup,
    device: torch.device,
    agreement: Agreement,
) -> SharedMemory:
    """Allocate zeroed memory of the same size on every rank and map all of it everywhere.

    Collective; all ranks give the same ``kind`` and ``num_bytes``.

    Raises:
        UlyssesError: some rank could not allocate, export or open; the same text on every rank.
            What had been made is given back.
    """
    make = _allocate_symm_mem if kind == "symm_mem" else _allocate_ipc

    def work() -> SharedMemory:
        with torch.cuda.device(device):
            return make(num_bytes, group, device, agreement)

    # In a thread of its own, where no memory pool of a compiler or a capture is in force: what the
    # providers allocate beside the window lives as long as the window does.
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(work).result()


def _raise_failures(kind: MappingKind, step: str, num_bytes: int, failures: list[str]) -> None:
    if failures:
        message = f"{kind}: {step} of {num_bytes} bytes failed on {'; '.join(failures)}"
        raise UlyssesError(message)


def _allocate_symm_mem(
    num_bytes: int, group: ProcessGroup, device: torch.device, agreement: Agreement
) -> SharedMemory:
    from torch.distributed import _symmetric_memory as symm_mem

    def allocate_zeroed() -> Tensor:
        tensor = symm_mem.empty(num_bytes, dtype=torch.uint8, device=device)
        tensor.zero_()
        torch.cuda.synchronize(device)
        return tensor

    tensor, failures = agreement.attempt("allocation", allocate_zeroed)
    _raise_failures("symm_mem", "allocation", num_bytes, failures)
    assert tensor is not None
    handle, failures = agreement.attempt(
        "rendezvous", lambda: _rendezvous(tensor, group, agreement.timeout_s)
    )
    _raise_failures("symm_mem", "rendezvous", num_bytes, failures)
    assert handle is not None
    pointers = tuple(int(pointer) for pointer in handle.buffer_ptrs)
    # torch keeps the peers' mappings with the allocation, which goes when the tensor does.
    return SharedMemory(tensor, pointers, lambda: None)


def _rendezvous(tensor: Tensor, group: ProcessGroup, timeout_s: float) -> Any:
    """Meet inside torch, which waits as long as its store does when a rank has failed."""
    from torch.distributed import _symmetric_memory as symm_mem

    store = group_store(group)
    usual = store.timeout  # type: ignore[attr-defined]  # missing in torch's stubs
    store.set_timeout(timedelta(seconds=min(timeout_s / 2, RENDEZVOUS_TIMEOUT_S)))
    try:
        return symm_mem.rendezvous(tensor, group.group_name)
    finally:
        store.set_timeout(usual)


class _Export:
    """Memory given to peers by CUDA IPC; to free it before they close it is undefined."""

    def __init__(self, pointer: int, topic: str, agreement: Agreement) -> None:
        self._pointer = pointer
        self._topic = topic
        self._agreement = agreement

    def free_if_unused(self) -> bool:
        """Free the memory once every rank has closed its mappings of it."""
        if not self._agreement.all_left(self._topic):
            return False
        torch.ops.ulysses._ipc_free(self._pointer)
        return True


class _Exports:
    """Released exports whose peers are late; what is left when the process ends goes with it."""

    def __init__(self) -> None:
        self._waiting: list[_Export] = []

    def add(self, export: _Export) -> None:
        self._waiting.append(export)
        self.sweep()

    def sweep(self) -> None:
        self._waiting = [export for export in self._waiting if not export.free_if_unused()]


# Outlives communicators on purpose: closing one is local and cannot wait for its peers.
_EXPORTS = _Exports()


def _allocate_ipc(
    num_bytes: int, group: ProcessGroup, device: torch.device, agreement: Agreement
) -> SharedMemory:
    ops = torch.ops.ulysses
    _EXPORTS.sweep()

    def export() -> tuple[int, list[int]]:
        pointer: int = ops._ipc_allocate(num_bytes, device.index)
        return pointer, ops._ipc_export(pointer)

    exported, failures = agreement.attempt("allocation", export)
    if failures and exported is not None:
        ops._ipc_free(exported[0])
    _raise_failures("ipc", "allocation", num_bytes, failures)
    assert exported is not None
    local, handle = exported
    topic = f"ipc/{local:x}"  # distinct among the live exports of this rank; ranks differ by key
    records = agreement.exchange("handles", {"handle": handle, "topic": topic})
    opened: dict[int, int] = {}  # by rank

    def release() -> None:
        while opened:
            ops._ipc_close(opened.popitem()[1])
        for peer, record in enumerate(records):
            if peer != group.rank():
                agreement.leave(record["topic"], owner=peer)
        _EXPORTS.add(_Export(local, topic, agreement))

    handles = [record["handle"] for record in records]
    _, failures = agreement.attempt(
        "opening", lambda: _open_peers(handles, group.rank(), device, opened)
    )
    if failures:
        release()
    _raise_failures("ipc", "opening", num_bytes, failures)
    pointers = tuple(opened.get(rank, local) for rank in range(len(records)))
    tensor = torch.as_tensor(_DeviceBytes(local, num_bytes), device=device)
    return SharedMemory(tensor, pointers, release)


def _open_peers(
    handles: list[list[int]], rank: int, device: torch.device, opened: dict[int, int]
) -> None:
    """Map the memory of every peer; ``opened`` has what was mapped if one of them fails."""
    for peer, handle in enumerate(handles):
        if peer != rank:
            opened[peer] = torch.ops.ulysses._ipc_open(handle, device.index)
