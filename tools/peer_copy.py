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

    def __init__(self, window: Window, rank: int, bytes_per_peer: int, source: Tensor) -> None:
        """Prepare the copies; ``source`` holds at least ``bytes_per_peer`` contiguous bytes.

        Raises:
            ValueError: the window is not mapped by its peers, or something is too small.
        """
        if window.memory is None:
            message = "flat copy: the window has no mapping of its peers; use transport 'ce'"
            raise ValueError(message)
        pointers = window.memory.pointers
        room = window.tensor.numel() * window.tensor.element_size()
        given = source.numel() * source.element_size()
        if len(pointers) * bytes_per_peer > room or bytes_per_peer > given:
            message = (
                f"flat copy: {bytes_per_peer} bytes to each of {len(pointers)} ranks do not fit a "
                f"window of {room} or a source of {given} bytes"
            )
            raise ValueError(message)
        self.bytes_per_peer = bytes_per_peer
        self._source = source
        self._targets = [
            pointers[(rank + step) % len(pointers)] + rank * bytes_per_peer
            for step in range(1, len(pointers))
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


def received_slot(window: Window, sender: int, bytes_per_peer: int) -> Tensor:
    """The bytes that :class:`PeerCopy` of ``sender`` writes into this rank's window."""
    flat = window.tensor.view(-1).view(torch.uint8)
    return flat.narrow(0, sender * bytes_per_peer, bytes_per_peer)
