"""Windows: memory in the final layout of one exchange, written by the peers.

:func:`reserve` is the only place that allocates them. It is a meeting of the ranks: they ask for
the same windows, evict the same ones, and fail alike.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import NoReturn

import torch
from torch import Tensor

from .agreement import find_disagreement
from .communicator import UlyssesCommunicator
from .errors import AgreementError, UlyssesError
from .kinds import check_kind, shown
from .mapping import SharedMemory, allocate
from .names import check_communicator
from .plan import Layout
from .window_spec import WindowSpec

RESOURCE = "windows"


@dataclass(eq=False)
class Window:
    """A reserved window of this rank.

    Attributes:
        spec: What it is for.
        layout: The exchange that it receives.
        tensor: ``(B, S_global, H_local, D)`` for scatter, ``(B, S_local, H, D)`` for gather;
        contiguous.
            Valid between ``complete`` and the next send into its channel.
        own_view: The part that this rank's own share fills. A producer may write it directly and
            send only the peers' parts; not from compiled code, which would write a copy.
        source_shape: Shape of the whole tensor that this rank sends into it.
        key: Equal for equal windows, on every rank.
        address: Where its memory starts, for a rank that holds nothing too.
        memory: The mapping behind it; ``None`` where no peer writes it directly.
        is_captured: A graph was captured that uses it on a transport that cannot tell when that
            graph is gone, so it stays.
        is_in_flight: Sent into and not completed yet, on a transport other than ``ce``.
    """

    spec: WindowSpec
    layout: Layout
    tensor: Tensor
    own_view: Tensor
    source_shape: tuple[int, int, int, int]
    key: str
    address: int
    memory: SharedMemory | None = field(default=None, repr=False)
    is_captured: bool = field(default=False, repr=False)
    is_in_flight: bool = field(default=False, repr=False)

    @property
    def channel(self) -> str:
        """Name of its channel."""
        return self.spec.channel or self.spec.name


class WindowCache:
    """The windows of a communicator, least recently used first."""

    def __init__(self, comm: UlyssesCommunicator) -> None:
        """Start empty."""
        # The communicator holds the cache: a reference back would keep both alive.
        self._copy_engine = comm.copy_engine
        self._by_key: OrderedDict[str, Window] = OrderedDict()
        self._by_pointer: dict[int, Window] = {}
        self._agreed: set[str] = set()

    @staticmethod
    def of(comm: UlyssesCommunicator) -> WindowCache:
        """The cache of this communicator."""
        return comm.attach(RESOURCE, lambda: WindowCache(comm))

    def __len__(self) -> int:
        """Number of windows."""
        return len(self._by_key)

    def find(self, spec_key: str) -> Window | None:
        """The window of this key, now the most recently used."""
        window = self._by_key.get(spec_key)
        if window is not None:
            self._by_key.move_to_end(spec_key)
        return window

    def at(self, tensor: Tensor) -> Window | None:
        """The window that this is the tensor of, by its address; now the most recently used."""
        window = self._by_pointer.get(_address_of(tensor))
        if window is not None:
            self._by_key.move_to_end(window.key)
        return window

    def all(self) -> list[Window]:
        """All windows, least recently used first."""
        return list(self._by_key.values())

    def is_agreed(self, spec_key: str) -> bool:
        """Whether the ranks have met over this exchange."""
        return spec_key in self._agreed

    def note_agreed(self, spec_key: str) -> None:
        """The ranks have met over this exchange."""
        self._agreed.add(spec_key)

    def evictable(self, keep: Sequence[str]) -> list[str]:
        """Keys that may go, least recently used first."""
        free = [
            window
            for key, window in self._by_key.items()
            if key not in keep and not window.is_captured and not window.is_in_flight
        ]
        if self._copy_engine is not None:
            busy = self._copy_engine.pending().split(", ")
            states = self._copy_engine.window_states()
            idle = [
                (states[window.address], window) for window in free if window.channel not in busy
            ]
            unpinned = [(last_use, window) for (last_use, graphs), window in idle if graphs == 0]
            free = [window for _, window in sorted(unpinned, key=itemgetter(0))]
        return [window.key for window in free]

    def add(self, window: Window, tag: int) -> None:
        """Take up a window that all ranks have allocated."""
        if self._copy_engine is not None and window.memory is not None:
            self._copy_engine.add_window(
                window.spec.name,
                window.channel,
                tag,
                window.layout,
                window.spec.dtype.itemsize,
                window.memory,
            )
        self._by_key[window.key] = window
        self._by_pointer[window.address] = window

    def remove(self, key: str) -> None:
        """Give one window back; the device is done with it on every rank."""
        window = self._by_key.pop(key)
        del self._by_pointer[window.address]
        if window.memory is not None:
            if self._copy_engine is not None:
                self._copy_engine.remove_window(window.memory)
            window.memory.release()

    def close(self) -> None:
        """Give all memory back; the communicator has settled."""
        for window in self._by_key.values():
            if window.memory is not None:
                window.memory.release()
        self._by_key.clear()
        self._by_pointer.clear()


def reserve(comm: UlyssesCommunicator, specs: Sequence[WindowSpec]) -> list[Window]:
    """Return a window for each spec, allocating those that are not there yet.

    Collective: every rank asks for the same specs in the same order. When the cache is full, the
    least recently used windows that no graph pins are evicted, the same ones on every rank.

    Args:
        comm: An open communicator.
        specs: At most ``comm.max_windows``.

    Returns:
        Windows in the order of ``specs``.

    Raises:
        ValueError: a spec is wrong, or ranks ask for different ones; the same text on every rank.
        AgreementError: a rank did not come within ``comm.timeout_s``.
        UlyssesError: closed; inside a capture; out of memory on some rank; or all windows are
        pinned.
    """
    check_communicator("reserve", comm)
    if isinstance(specs, WindowSpec | str) or not hasattr(specs, "__iter__"):
        message = f"reserve: specs={shown(specs)} must be a list of WindowSpec"
        raise ValueError(message)
    for spec in specs:
        check_kind("reserve", "each of specs", spec, WindowSpec, "a WindowSpec")
    comm.check_open("reserve")
    cache = WindowCache.of(comm)
    keys = [spec.key(comm.world_size) for spec in specs]
    missing = [key for key in dict.fromkeys(keys) if cache.find(key) is None]
    if missing:
        _refuse_capture_and_fakes(comm, missing)
        # A window outlives the mode that it is first used in.
        with comm.turn.of("reserve"), torch.inference_mode(False):
            _make_room(comm, cache, keys, missing)
            for key in missing:
                _allocate_window(comm, cache, specs[keys.index(key)], key)
    found = [cache.find(key) for key in keys]
    return [window for window in found if window is not None]


def agree(comm: UlyssesCommunicator, spec: WindowSpec) -> None:
    """Meet over an exchange that needs no window, once a spec.

    Collective at the first call with a spec; local after that.

    Raises:
        ValueError, AgreementError, UlyssesError: as :func:`reserve`.
    """
    cache = WindowCache.of(comm)
    key = spec.key(comm.world_size)
    if not cache.is_agreed(key):
        _refuse_capture_and_fakes(comm, [key])
        _meet(comm, {"wanted": [key]})
        cache.note_agreed(key)


def refuse(comm: UlyssesCommunicator, specs: Sequence[WindowSpec], message: str) -> NoReturn:
    """Raise because of an argument of this rank; on every rank, if the others are about to meet.

    They are when these exchanges, which all ranks declare, are new to the communicator. Else the
    others are in the exchange already, and this rank raises alone.

    Raises:
        ValueError: ``message``, always.
    """
    cache = WindowCache.of(comm)
    keys = [spec.key(comm.world_size) for spec in specs]
    if any(not cache.is_agreed(key) and cache.find(key) is None for key in keys):
        try:
            _refuse_capture_and_fakes(comm, keys)
            _meet(comm, {"wanted": keys, "refusal": [message]})
        except UlyssesError as error:
            raise ValueError(message) from error
    raise ValueError(message)


def _refuse_capture_and_fakes(comm: UlyssesCommunicator, keys: Sequence[str]) -> None:
    """Raise where memory that lasts cannot be allocated.

    Asks the host only: a capture goes on being valid.
    """
    if comm.device.type == "cuda":
        with torch.cuda.device(comm.device):
            is_capturing = torch.cuda.is_current_stream_capturing()
        if is_capturing:
            message = (
                f"reserve: not reserved before this capture: {'; '.join(keys)}; "
                f"call reserve() on every rank, or run the step once eagerly, before capturing"
            )
            raise UlyssesError(message)
    if type(torch.empty(0)) is not Tensor:
        message = (
            f"reserve: a mode that makes fake tensors is active; reserve {'; '.join(keys)} outside"
        )
        raise UlyssesError(message)


def _address_of(tensor: Tensor) -> int:
    """Where a window's memory starts; an empty tensor has no data pointer, its storage has."""
    return tensor.data_ptr() or tensor.untyped_storage().data_ptr()


def _meet(comm: UlyssesCommunicator, record: dict[str, list[str]]) -> list[dict[str, list[str]]]:
    """Exchange what is wanted; all ranks must want the same."""
    records = comm.agreement.exchange("reserve", record)
    refusals = [text for entry in records for text in entry.get("refusal", ())]
    if refusals:
        raise ValueError("; ".join(refusals))
    differing = find_disagreement([" and ".join(entry["wanted"]) for entry in records])
    if differing is not None:
        message = f"reserve: ranks ask for different exchanges: {differing.describe()}"
        raise ValueError(message)
    return records


def _make_room(
    comm: UlyssesCommunicator, cache: WindowCache, keys: list[str], missing: list[str]
) -> None:
    records = _meet(comm, {"wanted": keys, "missing": missing, "evictable": cache.evictable(keys)})
    if any(entry["missing"] != missing for entry in records):
        lacking = [entry["missing"] for entry in records]
        message = f"reserve: ranks hold different windows; missing, by rank: {lacking}"
        raise AgreementError(message)
    surplus = len(cache) + len(missing) - comm.max_windows
    if surplus <= 0:
        return
    if len(set(keys)) > comm.max_windows:
        message = (
            f"reserve: {len(set(keys))} windows are asked for at once, and "
            f"max_windows={comm.max_windows}; construct the communicator with a larger max_windows"
        )
        raise UlyssesError(message)
    everywhere = set.intersection(*(set(entry["evictable"]) for entry in records))
    victims = [key for key in records[0]["evictable"] if key in everywhere][:surplus]
    if len(victims) < surplus:
        message = (
            f"reserve: {len(missing)} windows do not fit beside {len(cache)} of which "
            f"{len(everywhere)} can be evicted, max_windows={comm.max_windows}; raise "
            "max_windows or "
            f"close graphs that pin windows"
        )
        raise UlyssesError(message)
    _, failures = comm.agreement.attempt("eviction", lambda: _quiesce(comm))
    if failures:
        message = f"reserve: eviction failed on {'; '.join(failures)}"
        raise UlyssesError(message)
    for key in victims:
        cache.remove(key)
    comm.agreement.exchange("eviction", {})


def _quiesce(comm: UlyssesCommunicator) -> None:
    """Wait until this rank's device neither writes into peers nor reads its windows."""
    if comm.copy_engine is not None and not comm.copy_engine.wait_idle(comm.timeout_s):
        message = f"exchanges in flight did not finish within {comm.timeout_s:g} s"
        raise UlyssesError(message)
    if comm.device.type == "cuda":
        torch.cuda.synchronize(comm.device)


def _allocate_window(
    comm: UlyssesCommunicator, cache: WindowCache, spec: WindowSpec, key: str
) -> None:
    layout = spec.layout(comm.world_size)
    shape = layout.window_shape(comm.rank)
    size = shape[0] * shape[1] * shape[2] * shape[3]
    memory = None
    if comm.copy_engine is None:
        # Never without memory: an empty window is told from others by its address too.
        plain, failures = comm.agreement.attempt(
            "allocation",
            lambda: torch.empty(max(size, 1), dtype=spec.dtype, device=comm.device),
        )
        if failures or plain is None:
            message = f"reserve: allocation of {key} failed on {'; '.join(failures)}"
            raise UlyssesError(message)
        tensor = plain[:size].view(shape)
    else:
        assert comm.group is not None
        assert comm.mapping is not None
        num_bytes = max(layout.window_elems() * spec.dtype.itemsize, 1)
        memory = allocate(
            comm.mapping,
            num_bytes,
            group=comm.group,
            device=comm.device,
            agreement=comm.agreement,
        )
        tensor = memory.tensor[: size * spec.dtype.itemsize].view(spec.dtype).view(shape)
    if layout.direction == "scatter":
        own = tensor.narrow(1, layout.seq_offset(comm.rank), layout.seq_splits[comm.rank])
    else:
        own = tensor.narrow(2, layout.head_offset(comm.rank), layout.head_splits[comm.rank])
    source_shape = layout.source_shape(comm.rank)
    window = Window(spec, layout, tensor, own, source_shape, key, _address_of(tensor), memory)
    tag = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=7).digest(), "little")
    cache.add(window, tag)
