"""Transports ``nccl``, ``gloo`` and ``local``: pack, all-to-all of bytes, unpack."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from .all_to_all import all_to_all, compare
from .communicator import UlyssesCommunicator
from .errors import UlyssesError
from .plan import Layout
from .windows import Window

RESOURCE = "collective"


class Prepared(NamedTuple):
    """Views to send, one a receiver, and where what is received belongs."""

    chunks: list[Tensor]
    out: Tensor


class _Packed(NamedTuple):
    """What one all-to-all moves."""

    out: Tensor
    sent: Tensor
    received: Tensor
    sent_sizes: list[int]
    received_sizes: list[int]


@dataclass
class _Sent:
    """What was given for one window since its last completion."""

    window: Window
    whole: Tensor | None = None
    parts: dict[int, Tensor] = field(default_factory=dict)

    def sources(self) -> list[Tensor]:
        return [*([] if self.whole is None else [self.whole]), *self.parts.values()]

    def prepare(self) -> Prepared:
        layout, own = self.window.layout, self.window.own_view
        if self.whole is not None:
            return Prepared(_cut(self.whole, layout), self.window.tensor)
        # An own part that is missing was written into the window by its producer.
        parts = [self.parts.get(peer, own) for peer in range(layout.world_size)]
        return Prepared(parts, self.window.tensor)


class CollectiveRounds:
    """Deferred sends of one communicator; the exchange itself happens at ``complete``."""

    def __init__(self) -> None:
        """Start with nothing in flight."""
        self._sent: dict[int, _Sent] = {}
        self._opened: set[str] = set()  # channels whose round has begun

    @staticmethod
    def of(comm: UlyssesCommunicator) -> CollectiveRounds:
        """The rounds of this communicator."""
        return comm.attach(RESOURCE, CollectiveRounds)

    def pending(self) -> str:
        """Channels with an exchange in flight."""
        channels = (sent.window.channel for sent in self._sent.values())
        return ", ".join(dict.fromkeys(channels))

    def close(self) -> None:
        """Forget what was never completed."""
        self._sent.clear()
        self._opened.clear()

    def has_round(self, channel: str) -> bool:
        """Whether a round of this channel has begun."""
        return channel in self._opened or any(
            sent.window.channel == channel for sent in self._sent.values()
        )

    def open(self, channel: str) -> None:
        """Begin a round ahead of its first send. Nothing leaves before completion anyway."""
        self._opened.add(channel)

    def abandon(self, windows: Sequence[Window]) -> None:
        """Forget what was sent into these windows: nothing of it has left yet."""
        for window in windows:
            window.is_in_flight = False
            self._sent.pop(window.address, None)
            self._opened.discard(window.channel)

    def send(self, op: str, x: Tensor, window: Window, peer: int | None) -> None:
        """Note a tensor, or the part for one rank, to be sent.

        Raises:
            UlyssesError: the window already holds something for that rank.
        """
        sent = self._sent.setdefault(window.address, _Sent(window))
        if sent.whole is not None or (sent.parts and peer is None) or peer in sent.parts:
            message = (
                f"{op}: window '{window.spec.name}' of channel "
                f"'{window.channel}' already has an exchange in flight for "
                f"rank {'all' if sent.whole is not None or peer is None else peer}; complete it "
                f"before sending again, or close the communicator if it was given up"
            )
            raise UlyssesError(message)
        if peer is None:
            sent.whole = x
        else:
            sent.parts[peer] = x
        window.is_in_flight = True
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            window.is_captured = True

    def complete(
        self, comm: UlyssesCommunicator, windows: list[Window], sources: list[Tensor]
    ) -> None:
        """Exchange the windows of whole channels.

        Raises:
            UlyssesError: windows and sources are not exactly those in flight.
        """
        with comm.turn.of("complete"):  # a thread that is refused has lost nothing
            rounds = self._checked(comm, windows, sources)
            self.abandon([sent.window for sent in rounds])
            for sent in rounds:
                _exchange(comm, sent.window.layout, sent.prepare, sent.window.key)

    def _checked(
        self, comm: UlyssesCommunicator, windows: list[Window], sources: list[Tensor]
    ) -> list[_Sent]:
        rounds = []
        for window in windows:
            sent = self._sent.get(window.address)
            if sent is None:
                message = (
                    f"complete: window '{window.spec.name}' has nothing in flight; "
                    f"send into it first"
                )
                raise UlyssesError(message)
            missing = [
                peer
                for peer in range(comm.world_size)
                if sent.whole is None and peer != comm.rank and peer not in sent.parts
            ]
            if missing:
                message = (
                    f"complete: window '{window.spec.name}' was sent nothing for ranks "
                    f"{missing}; send "
                    f"every peer its part first"
                )
                raise UlyssesError(message)
            rounds.append(sent)
        rounds.sort(key=lambda sent: sent.window.key)  # the order of the arguments means nothing
        channels = {window.channel for window in windows}
        for sent in self._sent.values():
            name = sent.window.channel
            if name in channels and sent not in rounds:
                message = (
                    f"complete: channel '{name}' also has window '{sent.window.spec.name}' in "
                    f"flight; complete all windows of a channel in one call"
                )
                raise UlyssesError(message)
        expected = sorted(tensor.data_ptr() for sent in rounds for tensor in sent.sources())
        if sorted(tensor.data_ptr() for tensor in sources) != expected:
            message = (
                f"complete: the {len(sources)} sources are not the {len(expected)} tensors that "
                f"were sent; pass to complete the very tensors given to the sends"
            )
            raise UlyssesError(message)
        return rounds


def exchange(comm: UlyssesCommunicator, layout: Layout, x: Tensor, name: str) -> Tensor:
    """Send ``x`` and return what is received, a fresh contiguous tensor. Collective."""

    def prepare() -> Prepared:
        out = torch.empty(layout.window_shape(comm.rank), dtype=x.dtype, device=x.device)
        return Prepared(_cut(x, layout), out)

    return _exchange(comm, layout, prepare, name)


def _cut(x: Tensor, layout: Layout) -> list[Tensor]:
    """One view a receiver; they may overlap."""
    ranks = range(layout.world_size)
    if layout.direction == "scatter":
        return [x.narrow(2, layout.head_offset(r), layout.head_splits[r]) for r in ranks]
    return [x.narrow(1, layout.seq_offset(r), layout.seq_splits[r]) for r in ranks]


def _places(out: Tensor, layout: Layout) -> list[Tensor]:
    """One view a sender: where its part belongs."""
    ranks = range(layout.world_size)
    if layout.direction == "scatter":
        return [out.narrow(1, layout.seq_offset(p), layout.seq_splits[p]) for p in ranks]
    return [out.narrow(2, layout.head_offset(p), layout.head_splits[p]) for p in ranks]


def _exchange(
    comm: UlyssesCommunicator, layout: Layout, prepare: Callable[[], Prepared], name: str
) -> Tensor:
    """Trade chunks (one a receiver), write what arrives into ``out`` and return it.

    In the caller's turn.
    """
    if comm.group is None or comm.world_size == 1:
        chunks, out = prepare()
        place = _places(out, layout)[0]
        if chunks[0].data_ptr() != place.data_ptr():
            place.copy_(chunks[0])
        return out
    return _trade(comm, layout, prepare, name)


def _trade(
    comm: UlyssesCommunicator, layout: Layout, prepare: Callable[[], Prepared], name: str
) -> Tensor:
    packed: _Packed | None = None
    failure = ""
    try:
        packed = _pack(prepare(), layout)
    except (RuntimeError, MemoryError) as error:  # the others must not wait for this rank
        if comm.device.type != "cpu":
            raise
        failure = f"{type(error).__name__}: {error}".splitlines()[0]
    if comm.device.type == "cpu":
        compare(comm, name, failure)
    assert packed is not None
    all_to_all(comm, packed.received, packed.sent, packed.received_sizes, packed.sent_sizes)
    pieces = packed.received.split(packed.received_sizes)
    for view, piece in zip(_places(packed.out, layout), pieces, strict=True):
        view.copy_(piece.view(packed.out.dtype).view(view.shape))
    return packed.out


def _pack(prepared: Prepared, layout: Layout) -> _Packed:
    chunks, out = prepared
    itemsize = out.element_size()
    received_sizes = [view.numel() * itemsize for view in _places(out, layout)]
    sent_sizes = [chunk.numel() * chunk.element_size() for chunk in chunks]
    sent = torch.cat([_bytes(chunk) for chunk in chunks])
    received = torch.empty(sum(received_sizes), dtype=torch.uint8, device=out.device)
    return _Packed(out, sent, received, sent_sizes, received_sizes)


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(-1).view(torch.uint8)
