"""The ceiling: the bytes of an exchange sent to every peer by flat copies, without a signal."""

from __future__ import annotations

import torch
from torch import Tensor

from ulysses_ops.errors import UlyssesError
from ulysses_ops.tools.cuda_runtime import MEMCPY_DEFAULT, memcpy_async
from ulysses_ops.windows import Window


class PeerCopy:
    """Flat copies of ``source`` into the window memory of every peer, each at this rank's slot.

    Attributes:
        bytes_per_peer: Bytes sent to each peer.
    """

    def __init__(
        self,
        window: Window,
        rank: int,
        bytes_per_peer: int,
        source: Tensor,
        *,
        offset: int | None = None,
    ) -> None:
        """Prepare the copies; ``source`` holds at least ``bytes_per_peer`` contiguous bytes.

        Args:
            window: Its memory, at every peer, is written.
            rank: This rank.
            bytes_per_peer: Bytes to send to each peer.
            source: What to send.
            offset: Where this rank's slot begins, in bytes; when left out, the slots of all ranks
                follow each other and are of one size.

        Raises:
            ValueError: the window is not mapped by its peers, or something is too small.
        """
        if window.memory is None:
            message = "flat copy: the window has no mapping of its peers; use transport 'ce'"
            raise ValueError(message)
        pointers = window.memory.pointers
        room = window.tensor.numel() * window.tensor.element_size()
        given = source.numel() * source.element_size()
        slot = rank * bytes_per_peer if offset is None else offset
        needed = len(pointers) * bytes_per_peer if offset is None else offset + bytes_per_peer
        if needed > room or bytes_per_peer > given:
            message = (
                f"flat copy: {bytes_per_peer} bytes to each of {len(pointers)} ranks, at {slot}, "
                f"do not fit a window of {room} or a source of {given} bytes"
            )
            raise ValueError(message)
        self.bytes_per_peer = bytes_per_peer
        self._source = source
        self._targets = [
            pointers[(rank + step) % len(pointers)] + slot for step in range(1, len(pointers))
        ]
        self._copy = memcpy_async()

    def run(self) -> None:
        """Enqueue the copies on the current stream; can be captured."""
        stream = torch.cuda.current_stream().cuda_stream
        for target in self._targets:
            status = self._copy(
                target, self._source.data_ptr(), self.bytes_per_peer, MEMCPY_DEFAULT, stream
            )
            if status != 0:
                message = (
                    f"flat copy: cudaMemcpyAsync returned {status} for {self.bytes_per_peer} bytes"
                )
                raise UlyssesError(message)


def received_slot(window: Window, offset: int, num_bytes: int) -> Tensor:
    """The bytes of this rank's window that a peer's :class:`PeerCopy` writes at ``offset``."""
    flat = window.tensor.view(-1).view(torch.uint8)
    return flat.narrow(0, offset, num_bytes)
