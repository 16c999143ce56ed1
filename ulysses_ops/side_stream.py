"""A second stream for work that the caller's stream need not wait for yet."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from .communicator import UlyssesCommunicator

RESOURCE = "side stream"


class SideStream:
    """Forks from the caller's stream and joins it; without a stream all runs in the caller's order.

    Memory may come from either stream and be used on both, as long as nothing is given back between
    :meth:`follow` and :meth:`join`.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        """Make the stream, if the device is given and has streams."""
        has_streams = device is not None and device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if has_streams else None

    @staticmethod
    def of(comm: UlyssesCommunicator) -> SideStream:
        """The side stream of this communicator."""
        return comm.attach(RESOURCE, lambda: SideStream(comm.device))

    @contextmanager
    def forked(self) -> Iterator[None]:
        """Follow the caller now and join it at the end, also after an error: captures need that."""
        self.follow()
        try:
            yield
        finally:
            self.join()

    def follow(self) -> None:
        """What is issued here from now on waits for what the caller's stream holds now."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    def join(self) -> None:
        """What the caller issues from now on waits for what is issued here."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def current(self) -> AbstractContextManager[object]:
        """While entered, work is issued here."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def close(self) -> None:
        """Nothing to give up: PyTorch keeps its streams."""
