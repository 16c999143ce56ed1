"""A second stream for work that the caller's stream need not wait for yet."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress

import torch

from .communicator import UlyssesCommunicator

RESOURCE = "side stream"


class SideStream:
    """Forks from the caller's stream and joins it; without a stream all runs in the caller's order.

    Memory may come from either stream and be used on both, as long as nothing is given back between
    :meth:`follow` and :meth:`join`.

    NOTE [captures]: GEMM libraries keep a workspace for each stream, and a graph that replays is
    not ordered with eager work of other callers. So captures take a stream of their own.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        """Make the streams, if the device is given and has any."""
        has_streams = device is not None and device.type == "cuda"
        self._streams = [torch.cuda.Stream(device) for _ in range(2)] if has_streams else []

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
        except BaseException:
            with suppress(RuntimeError):  # of a capture that is broken; the cause says more
                self.join()
            raise
        self.join()

    def follow(self) -> None:
        """What is issued here from now on waits for what the caller's stream holds now."""
        if self._streams:
            stream = self._stream()
            stream.wait_stream(torch.cuda.current_stream(stream.device))

    def join(self) -> None:
        """What the caller issues from now on waits for what is issued here."""
        if self._streams:
            stream = self._stream()
            torch.cuda.current_stream(stream.device).wait_stream(stream)

    def current(self) -> AbstractContextManager[object]:
        """While entered, work is issued here."""
        return torch.cuda.stream(self._stream()) if self._streams else nullcontext()

    def close(self) -> None:
        """Nothing to give up: PyTorch keeps its streams."""

    def _stream(self) -> torch.cuda.Stream:
        return self._streams[torch.cuda.is_current_stream_capturing()]
