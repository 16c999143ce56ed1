"""Work that starts in the tail of a kernel: on multiprocessors that its last wave leaves idle."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ._native import NATIVE


class Tail:
    """A stream for work that follows the start, and not the end, of a kernel of the caller's.

    ::

        project_qkv_into(..., launched=tail.launched)
        with tail.filled():
            ...                    # starts when all blocks of that kernel have started
        # here the caller's stream is behind both
    """

    def __init__(self, device: torch.device) -> None:
        """Make the event and the stream, on a GPU."""
        self._stream = torch.cuda.Stream(device)
        self.launched = torch.cuda.Event()

    @contextmanager
    def filled(self) -> Iterator[None]:
        """Make the stream current, behind ``launched``; afterwards the caller's waits for it."""
        caller = torch.cuda.current_stream(self._stream.device)
        if NATIVE.projection:
            handles = (self.launched.cuda_event, self._stream.cuda_stream)
            torch.ops.ulysses._follow_launch(*handles)
        else:
            self._stream.wait_event(self.launched)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            caller.wait_stream(self._stream)
