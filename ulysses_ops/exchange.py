"""Grouped exchanges, what a deferred operator is checked for, and how its refusals read."""

from __future__ import annotations

import re
import threading
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType

import torch
from torch import Tensor

from .collective import CollectiveRounds
from .communicator import UlyssesCommunicator
from .errors import UlyssesError
from .kinds import check_dense, check_kind, check_tensors
from .names import check_communicator
from .windows import Window, WindowCache


def window_of(comm: UlyssesCommunicator, tensor: Tensor, op: str) -> Window:
    """The window that this is the tensor of.

    Raises:
        ValueError: none is.
    """
    window = WindowCache.of(comm).at(tensor)
    if window is None or tensor.shape != window.tensor.shape or tensor.dtype != window.tensor.dtype:
        message = (
            f"{op}: the tensor of shape {list(tensor.shape)}, {tensor.dtype}, given as window is "
            f"none of the windows of '{comm.name}'; pass Window.tensor as reserve() returned it"
        )
        raise ValueError(message)
    return window


def check_source(
    comm: UlyssesCommunicator, window: Window, x: Tensor, peer: int | None, op: str
) -> None:
    """Raise unless ``op`` can send ``x``, or a part for ``peer``, into the window.

    Raises:
        ValueError: direction, peer, shape, dtype or device is wrong.
    """
    direction = "gather" if op == "gather_into" else "scatter"
    if window.layout.direction != direction:
        message = (
            f"{op}: window '{window.spec.name}' is for {window.layout.direction}; use that operator"
        )
        raise ValueError(message)
    if op == "all_gather_into" and not window.layout.is_all_gather:
        message = (
            f"{op}: window '{window.spec.name}' gives ranks heads {list(window.layout.head_splits)}"
            f" of {window.layout.global_shape[2]}; reserve it by WindowSpec.all_gather"
        )
        raise ValueError(message)
    if peer is not None and not 0 <= peer < comm.world_size:
        message = f"{op}: peer={peer} must be a rank below {comm.world_size}"
        raise ValueError(message)
    expected = window.source_shape if peer is None else window.layout.source_shape(comm.rank, peer)
    if x.shape != expected or x.dtype != window.spec.dtype or x.device != comm.device:
        message = (
            f"{op}: x is {list(x.shape)}, {x.dtype}, on {x.device}, but window "
            f"'{window.spec.name}' takes "
            f"{list(expected)}, {window.spec.dtype}, on {comm.device} from rank {comm.rank}"
        )
        raise ValueError(message)


def announce(comm: UlyssesCommunicator, key: str) -> None:
    """This rank is about to begin the exchange of this key: said to who asked for it."""
    if comm.announce is not None:
        comm.announce(key)


class Exchange:
    """Several deferred sends with one completion: V, K and Q of a layer, say.

    ::

        with Exchange(comm) as exchange:
            exchange.send(v, windows.v)    # leaves while k is still being computed
            exchange.send(k, windows.k)
            exchange.send(q, windows.q)
        # here the windows may be read, on the current stream

    A source must not be changed in place before the block ends: it is being sent. Leaving the block
    by an exception completes nothing: with NCCL and gloo what was sent is forgotten, with the copy
    engines it is on its way and the communicator has to be closed.

    The block is one call of its thread: another thread that calls meanwhile is refused, also on the
    same object. It is entered once at a time.

    Collective: every rank sends into the same windows in the same order.
    """

    def __init__(self, comm: UlyssesCommunicator) -> None:
        """Begin with nothing sent.

        Raises:
            ValueError: ``comm`` is no communicator.
        """
        check_communicator("Exchange", comm)
        self._comm = comm
        self._windows: list[Window] = []
        self._sources: list[Tensor] = []
        self._opened: list[Window] = []
        self._thread = 0  # in whose block it is

    def send(self, x: Tensor, window: Window, *, peer: int | None = None) -> None:
        """Begin sending ``x`` into ``window`` of every rank, in the window's direction.

        Args:
            x: The whole tensor, shape ``window.source_shape``; or, with ``peer``, the part already
                cut for that rank: ``(B, S_local, H_peer, D)`` for scatter,
                ``(B, S_peer, H_local, D)`` for gather, all of it for a window of
                ``WindowSpec.all_gather``. With parts, the own part may be written into
                ``window.own_view`` instead.
            window: From :func:`ulysses_ops.reserve`.
            peer: Rank that the part is for.

        Raises:
            ValueError: shape, dtype or device is wrong; raised before any rank waits.
            UlyssesError: that rank's share of the window is in flight already.
        """
        comm = self._comm
        is_compiling = torch.compiler.is_compiling()
        check_tensors("Exchange.send", x=x)
        check_kind("Exchange.send", "window", window, Window, "a Window, as reserve() returned it")
        if peer is not None:
            check_kind("Exchange.send", "peer", peer, int, "a rank, or None")
        if x.requires_grad and torch.is_grad_enabled():
            message = (
                f"{window.layout.direction}_into: x requires grad, and a window has no gradient; "
                f"call it under torch.no_grad(), or use {window.layout.direction}()"
            )
            raise ValueError(message)
        if not is_compiling:
            if x.device != comm.device:  # a fake would do nothing
                check_source(comm, window, x, peer, f"{window.layout.direction}_into")
            if window not in self._windows and window not in self._opened:
                announce(comm, window.key)
            # Lazy views, which a dispatcher would copy anew at each use; compilers have none.
            if x.is_conj() or x.is_neg():
                x = x.resolve_conj().resolve_neg()
        if window.layout.direction == "scatter":
            send = torch.ops.ulysses.scatter_into.default
        else:
            send = torch.ops.ulysses.gather_into.default
        try:
            with self._turn():
                send(x, window.tensor, comm.token, comm.world_size, comm.name, peer)
        except RuntimeError as error:
            comm.check_open("exchange")
            check_dense("Exchange.send", x)
            found = window_of(comm, window.tensor, f"{window.layout.direction}_into")
            check_source(comm, found, x, peer, f"{window.layout.direction}_into")
            raise UlyssesError(_sentence(error)) from error
        if window not in self._windows:
            self._windows.append(window)
        self._sources.append(x)

    def open(self, window: Window) -> None:
        """Begin the round of the window's channel before its first send, which else does so.

        What follows on the current stream may write own parts into the windows of the channel at
        once, and the ranks have lined up by the time when the first part is ready. From here to the
        end of the block nothing of the channel may be read, and something must be sent.

        Collective: every rank does, or none.

        Raises:
            ValueError: ``window`` is none of the communicator's.
            UlyssesError: the channel has an exchange in flight.
        """
        comm = self._comm
        check_kind("Exchange.open", "window", window, Window, "a Window, as reserve() returned it")
        comm.check_open("exchange")
        window_of(comm, window.tensor, "Exchange.open")
        with self._turn():
            self._open(window)
        self._opened.append(window)

    def _open(self, window: Window) -> None:
        comm = self._comm
        known = any(window.channel == other.channel for other in (*self._windows, *self._opened))
        if known or (
            comm.copy_engine is None and CollectiveRounds.of(comm).has_round(window.channel)
        ):
            message = (
                f"exchange: channel '{window.channel}' has an exchange in flight; complete it "
                f"before opening another"
            )
            raise UlyssesError(message)
        announce(comm, window.key)
        if comm.copy_engine is None:
            CollectiveRounds.of(comm).open(window.channel)
            return
        try:
            comm.copy_engine.open_round(window.address)
        except RuntimeError as error:
            comm.check_open("exchange")
            raise UlyssesError(_sentence(error)) from error

    def complete(self) -> None:
        """End all exchanges: windows may be read and sources reused on the current stream.

        Raises:
            UlyssesError: a round that was opened was sent nothing.
        """
        with self._turn():
            self._complete()

    def _complete(self) -> None:
        sent = {window.channel for window in self._windows}
        for window in self._opened:
            if window.channel not in sent:
                message = (
                    f"complete: channel '{window.channel}' was opened and nothing was sent into "
                    f"its windows; send every peer its part first"
                )
                raise UlyssesError(message)
        self._opened = []
        if self._windows:
            comm = self._comm
            try:
                torch.ops.ulysses.complete.default(
                    [window.tensor for window in self._windows],
                    self._sources,
                    comm.token,
                    comm.world_size,
                    comm.name,
                )
            except RuntimeError as error:
                if comm.copy_engine is None and not any(w.is_in_flight for w in self._windows):
                    self._windows, self._sources = [], []  # lost on the way
                comm.check_open("complete")
                raise UlyssesError(_sentence(error)) from error
            self._windows, self._sources = [], []

    def _turn(self) -> AbstractContextManager[None]:
        """This thread's turn, which it has inside of its block."""
        if torch.compiler.is_compiling() or self._thread == threading.get_ident():
            return nullcontext()
        return self._comm.turn.of("exchange")

    def __enter__(self) -> Exchange:
        """Take the communicator's turn and return itself.

        Raises:
            UlyssesError: another thread has the turn, or this block is entered already.
        """
        if not torch.compiler.is_compiling():
            self._comm.turn.take("exchange")
            if self._thread:
                self._comm.turn.give()
                message = "exchange: this block is entered already; make an Exchange for each block"
                raise UlyssesError(message)
            self._thread = threading.get_ident()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Complete, unless an exception is on its way out.

        Raises:
            UlyssesError: another thread entered the block.
        """
        if self._thread and self._thread != threading.get_ident():
            message = "exchange: another thread entered this block; leave it there"
            raise UlyssesError(message)
        try:
            if kind is None:
                self.complete()
        finally:  # what was not completed cannot be completed any more
            if self._comm.copy_engine is None and (self._windows or self._opened):
                CollectiveRounds.of(self._comm).abandon([*self._windows, *self._opened])
            self._windows, self._sources, self._opened = [], [], []
            if self._thread:
                self._thread = 0
                self._comm.turn.give()


def _sentence(error: RuntimeError) -> str:
    """The sentence of a check, without the function, file and line of the compiled library."""
    first = str(error).splitlines()[0]
    return re.sub(r"^\w+, csrc/[\w./]+:\d+, ", "", first)


def pending_channels(comm: UlyssesCommunicator) -> str:
    """Channels with a deferred exchange that was not completed here; empty when there is none.

    Inside a capture those of the capture count, outside those of eager calls.
    """
    comm.check_open("exchange")
    if comm.copy_engine is not None:
        return comm.copy_engine.pending()
    return CollectiveRounds.of(comm).pending()
