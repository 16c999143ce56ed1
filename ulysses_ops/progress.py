"""A projection that is under way: what it has finished for one rank leaves while it goes on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Progress:
    """Counters of a running ``project_qkv_into``, and a stream beside it.

    ::

        project_qkv_into(..., order=order, progress=progress)
        with progress.following():
            for peer in order[:-1]:
                progress.wait(peer)     # the heads of this destination are all written
                ...                     # send them; who completes the exchange is behind this

    A wait is a warp that watches a counter, and sets it back. It is launched when all blocks of the
    projection have started, so nothing that it waits for waits for it, in graphs as in eager calls.
    The next projection with these counters has to be behind the waits of this one, and each
    destination but the last has to be waited for once: the last is whole when the kernel ends.
    """

    def __init__(self, device: torch.device, num_destinations: int) -> None:
        """Make counters, event and stream, on a GPU."""
        self.counters = torch.zeros(num_destinations, dtype=torch.int32, device=device)
        torch.cuda.current_stream(device).synchronize()  # whatever stream the first kernel is on
        self.launched = torch.cuda.Event()
        self._handle: int = torch.ops.ulysses._make_stream(device.index)
        self._stream = torch.cuda.ExternalStream(self._handle, device)
        self._rows = 0
        self._heads: dict[int, int] = {}

    def close(self) -> None:
        """Give the stream back, when its work is done."""
        torch.ops.ulysses._destroy_stream(self._handle)

    def expect(self, rows: int, heads: dict[int, int]) -> int:
        """Note heads by destination; return the handle of the event that the kernel records."""
        self._rows, self._heads = rows, heads
        if self.launched.cuda_event == 0:  # PyTorch makes an event when it is recorded first
            self.launched.record(torch.cuda.current_stream(self.counters.device))
        return int(self.launched.cuda_event)

    def expect_nothing(self) -> None:
        """Without the kernel: all is enqueued on the current stream, and nothing is counted."""
        self._heads = {}
        self.launched.record(torch.cuda.current_stream(self.counters.device))

    @contextmanager
    def following(self) -> Iterator[None]:
        """Make the stream current, behind the start.

        The caller's stream does not wait for it: completing the exchange of what is sent here does,
        and an edge of a graph that says nothing new costs time.
        """
        torch.ops.ulysses._follow_launch(self.launched.cuda_event, self._handle)
        with torch.cuda.stream(self._stream):
            yield

    def wait(self, destination: int) -> None:
        """Let the current stream wait until this destination's heads are all written.

        Each once: a second wait for what was counted once would never end, and does nothing.
        """
        heads = self._heads.pop(destination, None)
        if heads is not None:
            sizes = (self._rows, heads)
            torch.ops.ulysses._await_projection(self.counters, destination, *sizes)
