"""A projection that is under way: what it has finished for one rank leaves while it goes on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
    """

    def __init__(self, device: torch.device, num_destinations: int) -> None:
        """Make counters, event and stream, on a GPU."""
        self.counters = torch.zeros(num_destinations, dtype=torch.int32, device=device)
        self.launched = torch.cuda.Event()
        self._stream = torch.cuda.Stream(device)
        self._rows = 0
        self._heads: Sequence[int] = ()

    def expect(self, rows: int, heads: Sequence[int]) -> int:
        """Note what is counted, and return the handle of the event that the kernel records."""
        self._rows, self._heads = rows, heads
        if self.launched.cuda_event == 0:
            self.launched.record()  # PyTorch makes an event when it is recorded first
        return int(self.launched.cuda_event)

    def expect_nothing(self) -> None:
        """Without the kernel: all is enqueued on the current stream, and nothing is counted."""
        self._heads = ()
        self.launched.record()

    @contextmanager
    def following(self) -> Iterator[None]:
        """Make the stream current, behind the start.

        The caller's stream does not wait for it: completing the exchange of what is sent here does,
        and an edge of a graph that says nothing new costs time.
        """
        handles = (self.launched.cuda_event, self._stream.cuda_stream)
        torch.ops.ulysses._follow_launch(*handles)
        with torch.cuda.stream(self._stream):
            yield

    def wait(self, destination: int) -> None:
        """Let the current stream wait until this destination's heads are all written."""
        if self._heads:
            sizes = (self._rows, self._heads[destination])
            torch.ops.ulysses._await_projection(self.counters, destination, *sizes)
