"""``UlyssesCommunicator``: the ranks, their agreed transport, what is closed with them."""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from ._native import load_kernels
from .agreement import Agreement, find_disagreement, group_store, join
from .arguments import (
    backends_of,
    check_arguments,
    check_name,
    check_timeout,
    folder_of,
    group_of,
    resolve_device,
)
from .copy_engine import CopyEngineGroup, SignalKind
from .eligibility import Decision, Request, decide, decide_without_ce
from .errors import AgreementError, PeerTimeoutError, TopologyError, UlyssesError
from .lifetime import Resource, State, finalise, sweep
from .mapping import MAPPING_KINDS, MappingKind
from .post_mortem import PostMortem
from .topology import Topology, probe
from .turn import Turn

R = TypeVar("R", bound=Resource)

# Names in operator schemas -> communicators. Weak: a name keeps nothing alive.
BY_NAME: weakref.WeakValueDictionary[str, UlyssesCommunicator] = weakref.WeakValueDictionary()


class UlyssesCommunicator:
    """Ranks that trade sequence shards for head shards, and the transport that they agreed on.

    Collective: every rank of the group constructs it with the same arguments, ``device`` excepted.
    It holds state only; the exchanges are in :mod:`ulysses_ops.ops`.

    Attributes:
        name: Name in the operator schemas (``group_name``).
        rank: This rank in the group.
        world_size: Number of ranks.
        device: This rank's device.
        group: The process group; ``None`` when torch.distributed is not initialised.
        transport: ``"ce"``, ``"nccl"``, ``"gloo"``, or ``"local"`` for one rank.
        mapping: Provider of mapped memory with ``ce``, else ``None``.
        reasons: Why this transport, alike on every rank.
        token: Tensor that the deferred operators mutate, so that compilers keep their order.
        timeout_s: How long a meeting of the ranks, and an exchange on copy engines or gloo, waits
            for the slowest, in seconds.
        max_windows: Windows that are cached at most.
        announce: Called with each exchange before this rank issues it, while the ranks line up for
            a capture; ``None`` otherwise.
        turn: Calls of one thread at a time.
    """

    def __init__(
        self,
        group: ProcessGroup | DeviceMesh | None = None,
        *,
        device: torch.device | str | None = None,
        transport: str | None = None,
        mapping: MappingKind | None = None,
        signal: SignalKind | None = None,
        name: str | None = None,
        max_windows: int = 12,
        timeout_s: float = 60.0,
        dump_dir: Path | str | None = None,
        allow_shared_devices: bool = False,
    ) -> None:
        """Meet the other ranks and agree on a transport.

        Args:
            group: The ranks, as a group or as a mesh of one dimension (``mesh["ulysses"]``); the
                default group when left out, one rank when there is none.
            device: This rank's device; the current CUDA device, or the CPU where there is none or
                where the mesh is of CPUs.
            transport: ``"ce"``, ``"nccl"`` or ``"gloo"`` to insist; chosen by the topology if
            ``None``.
            mapping: ``"symm_mem"`` or ``"ipc"`` to insist; the first that works if ``None``.
            signal: ``"write_value"`` or ``"memcpy"`` to insist; the first that works if ``None``.
            name: Name in the operator schemas; that of the group when left out. A second
                communicator over the same ranks needs a name of its own.
            max_windows: Windows that are cached at most.
            timeout_s: How long a meeting of the ranks, and an exchange on copy engines or gloo,
                waits for the slowest, in seconds. Then the communicator gives up: on copy engines
                windows hold NaN, waits end, and the next call on every rank raises
                ``PeerTimeoutError``; under gloo the exchange itself raises it.
            dump_dir: Folder for the latest exchanges of this rank, as JSON, when it gives up.
            allow_shared_devices: Let several ranks use one GPU. For tests: correct, never fast.

        Raises:
            ValueError: an argument is wrong or differs between ranks; the same text on every rank.
            TopologyError: what was insisted on is not eligible; the same text on every rank.
            AgreementError: a rank did not come within ``timeout_s``.
        """
        if device is None and isinstance(group, DeviceMesh):
            device = group.device_type
        group = group_of(group)
        check_name(name)
        check_timeout(timeout_s)
        folder = folder_of(dump_dir)
        self.group = group
        self.rank = 0 if group is None else group.rank()
        self.world_size = 1 if group is None else group.size()
        self.name = name or ("ulysses" if group is None else group.group_name)
        self.timeout_s = timeout_s
        self.max_windows = max_windows
        self._post_mortem = PostMortem(self.name, self.rank, self.world_size, folder)
        self.mapping: MappingKind | None = None
        self.announce: Callable[[str], None] | None = None
        self.turn = Turn(self.name)
        self._state = State()
        self._pid = os.getpid()
        sweep()
        weakref.finalize(self, finalise, self._state)
        self.agreement = self._join()

        wanted = {
            "transport": transport,
            "mapping": mapping,
            "signal": signal,
            "max_windows": max_windows,
            "timeout_s": timeout_s,
            "allow_shared_devices": allow_shared_devices,
        }
        self.device, self.token, topologies = self._meet(wanted, device)
        offered = backends_of(group, self.device)
        request = Request(transport, offered, allow_shared_devices, suggest=False)
        decision = decide(topologies, request)
        if decision.transport == "ce":
            decision = self._establish_copy_engine(decision, topologies, request, mapping, signal)
        if decision.transport is None:
            raise TopologyError(f"UlyssesCommunicator: {'; '.join(decision.reasons)}")
        self.transport: str = decision.transport
        self.reasons = decision.reasons
        self._confirm()
        BY_NAME[self.name] = self
        for text in decision.warnings:
            warnings.warn(f"UlyssesCommunicator: {text}", RuntimeWarning, stacklevel=2)

    def _join(self) -> Agreement:
        if self.group is None:
            return Agreement(dist.HashStore(), self.name, 0, 1, self.timeout_s)
        store = group_store(self.group)
        key = f"ulysses/{self.group.group_name}/{self.name}"
        session = join(store, key, self.rank, self.world_size, self.timeout_s)
        return Agreement(store, session, self.rank, self.world_size, self.timeout_s)

    def _meet(
        self, wanted: dict[str, Any], device: torch.device | str | None
    ) -> tuple[torch.device, Tensor, list[Topology]]:
        """Exchange arguments and topologies; raise alike on every rank when arguments are wrong."""

        def look() -> tuple[torch.device, Tensor, Topology]:
            check_arguments(wanted)
            existing = BY_NAME.get(self.name)
            if existing is not None and not existing.closed and existing.is_current():
                message = (
                    f"a communicator named '{self.name}' is open already; "
                    f"close it or give another name"
                )
                raise ValueError(message)
            chosen = resolve_device(device)
            load_kernels(chosen)  # while nothing waits on the device
            with torch.inference_mode(False):
                token = torch.zeros(1, dtype=torch.int32, device=chosen)
            return chosen, token, probe(chosen)

        seen, failures = self.agreement.attempt("UlyssesCommunicator", look)
        if failures:
            message = f"UlyssesCommunicator: {'; '.join(failures)}"
            raise ValueError(message)
        assert seen is not None
        if (stale := BY_NAME.get(self.name)) is not None:
            stale.close()
        chosen, token, topology = seen
        records = self.agreement.exchange(
            "UlyssesCommunicator", {"wanted": wanted, "topology": topology.to_json()}
        )
        differing = find_disagreement([record["wanted"] for record in records])
        if differing is not None:
            message = f"UlyssesCommunicator: arguments differ between ranks: {differing.describe()}"
            raise ValueError(message)
        return chosen, token, [Topology.from_json(record["topology"]) for record in records]

    def _establish_copy_engine(
        self,
        decision: Decision,
        topologies: list[Topology],
        request: Request,
        mapping: MappingKind | None,
        signal: SignalKind | None,
    ) -> Decision:
        """Map memory with the first provider that works, or agree on another transport."""
        assert self.group is not None
        causes = []
        for kind in MAPPING_KINDS if mapping is None else (mapping,):
            try:
                self._state.copy_engine = CopyEngineGroup.establish(
                    kind,
                    signal,
                    name=self.name,
                    group=self.group,
                    device=self.device,
                    agreement=self.agreement,
                )
            except AgreementError:
                raise  # the ranks are apart: no verdict of one of them counts
            except UlyssesError as error:
                causes.append(str(error))
                continue
            self.mapping = kind
            return decision
        return decide_without_ce(topologies, request, causes)

    def _confirm(self) -> None:
        """Every rank has come to the same end."""
        end = {"transport": self.transport, "mapping": self.mapping, "signal": self.signal}
        differing = find_disagreement(self.agreement.exchange("UlyssesCommunicator", end))
        if differing is not None:
            message = f"UlyssesCommunicator: ranks came to different ends: {differing.describe()}"
            raise AgreementError(message)

    def is_current(self) -> bool:
        """Whether the group that this was made with still exists under its name."""
        if self.group is None:
            return not dist.is_initialized()
        from torch.distributed import distributed_c10d

        try:
            current = distributed_c10d._resolve_process_group(self.group.group_name)
        except (RuntimeError, ValueError, KeyError):
            return False
        return bool(current is self.group)

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._state.closed

    def check_open(self, op: str) -> None:
        """Raise if it is closed, or has given up. Asks the host alone.

        Raises:
            PeerTimeoutError: a peer did not signal in time, or gave up.
            UlyssesError: it is closed.
        """
        if self.closed:
            message = f"{op}: communicator '{self.name}' is closed; construct a new one"
            raise UlyssesError(message)
        if os.getpid() != self._pid:
            message = (
                f"{op}: communicator '{self.name}' is of process {self._pid}, and this is a fork "
                f"of it, without its connections; construct one in each process"
            )
            raise UlyssesError(message)
        if self._state.failure:
            raise PeerTimeoutError(self._post_mortem.sentence(op, self._state.failure))
        if self.copy_engine is not None:
            self._post_mortem.raise_failure(op, self.copy_engine)

    def give_up(self, op: str, why: str) -> NoReturn:
        """Refuse all later calls: an exchange with the peers cannot be finished.

        Raises:
            PeerTimeoutError: always.
        """
        self._state.failure = why
        raise PeerTimeoutError(self._post_mortem.sentence(op, why))

    def check(self) -> None:
        """Raise if this rank or a peer has given up on an exchange.

        What was handed out before is good when this returns after it was waited for;
        :meth:`synchronize` does both.

        Raises:
            PeerTimeoutError: a peer did not signal in time, or gave up.
            UlyssesError: it is closed.
        """
        self.check_open("check")
        if self.copy_engine is not None:
            self._post_mortem.raise_failure("check", self.copy_engine, look=True)

    def synchronize(self) -> None:
        """Wait on the host for the current stream, then :meth:`check`. Local.

        Bounded where the exchanges are on copy engines: a wait that no peer answers within
        ``timeout_s`` is ended, and raises here.
        """
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        self.check()

    def set_timeout(self, timeout_s: float) -> None:
        """Change how long meetings and exchanges wait for the slowest rank, in seconds. Local.

        Raises:
            ValueError: not above 0.
        """
        check_timeout(timeout_s)
        self.timeout_s = self.agreement.timeout_s = timeout_s
        if self.copy_engine is not None:
            self.copy_engine.set_limit(timeout_s)

    @property
    def copy_engine(self) -> CopyEngineGroup | None:
        """The device side of transport ``ce``."""
        return self._state.copy_engine

    @property
    def signal(self) -> SignalKind | None:
        """Kind of signal in use with ``ce``."""
        return None if self.copy_engine is None else self.copy_engine.signal

    def attach(self, key: str, make: Callable[[], R]) -> R:
        """Return the resource kept under ``key``, made at first use, closed at the end."""
        found: R | None = self._state.resources.get(key)
        if found is None:
            found = self._state.resources[key] = make()
        return found

    def detach(self, key: str) -> None:
        """Forget a resource that was closed by itself."""
        self._state.resources.pop(key, None)

    def close(self) -> None:
        """Give up windows, words and mappings. Local, idempotent, and bounded.

        Waits out what is in flight. If a peer does not answer within 10 s, windows are filled with
        NaN and the waits released, with a ``RuntimeWarning``.
        """
        self._state.close()
        sweep()

    def __enter__(self) -> UlyssesCommunicator:
        """Return itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close; left by an exception, tell peers that wait, or come to, that nobody will come."""
        if error is not None and not self.closed and os.getpid() == self._pid:
            self.agreement.part(f"{type(error).__name__}: {error}".splitlines()[0])
        self.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> UlyssesCommunicator:
        """Itself: a copy of a module talks to the same ranks."""
        return self

    def __reduce__(self) -> NoReturn:
        """Refuse: it stands for this process among its ranks."""
        message = f"communicator '{self.name}' cannot be pickled; construct one in each process"
        raise TypeError(message)

    def __repr__(self) -> str:
        """Name, place and transport."""
        return (
            f"UlyssesCommunicator(name={self.name!r}, rank={self.rank}, "
            f"world_size={self.world_size}, device={str(self.device)!r}, "
            f"transport={self.transport!r})"
        )
