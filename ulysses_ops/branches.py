"""Work that does not depend on each other, each on a stream of its own, forked and joined."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

import torch
from torch import Tensor

from .communicator import UlyssesCommunicator

RESOURCE = "branches"


class Branches:
    """Side streams of one device, made as they are needed and kept; none on the CPU."""

    def __init__(self, device: torch.device) -> None:
        """Begin with no stream."""
        self.device = device
        self._streams: list[torch.cuda.Stream] = []

    @staticmethod
    def of(comm: UlyssesCommunicator) -> Branches:
        """Those of this communicator."""
        device = comm.device
        return comm.attach(RESOURCE, lambda: Branches(device))

    def stream(self, number: int) -> torch.cuda.Stream:
        """Side stream ``number``, from 0."""
        while len(self._streams) <= number:
            self._streams.append(torch.cuda.Stream(self.device))
        return self._streams[number]

    def close(self) -> None:
        """Give the streams back."""
        self._streams.clear()


class Fork:
    """Branches that start where the current stream is now, and are joined at the end of the block.

    ::

        with Fork(Branches.of(comm)) as fork:
            with fork.branch(0):
                q = project_q(x)  # on the current stream
            with fork.branch(1):
                latent = project_latent(x)  # beside it

    The host goes through the block in its order, so ranks that run the same code issue the same
    exchanges in the same order. Inside a capture the branches become branches of the graph.
    """

    def __init__(self, branches: Branches) -> None:
        """Begin with no branch."""
        self._branches = branches
        self._on_gpu = branches.device.type == "cuda"
        self._used: dict[int, torch.cuda.Stream] = {}

    def __enter__(self) -> Fork:
        """Note where the branches start."""
        if self._on_gpu:
            self._trunk = torch.cuda.current_stream(self._branches.device)
            self._start = self._trunk.record_event()
        return self

    @contextmanager
    def branch(self, number: int) -> Iterator[None]:
        """What is enqueued inside goes to this branch; 0 is the current stream itself."""
        if not self._on_gpu or number == 0:
            yield
            return
        side = self._used.get(number)
        if side is None:
            side = self._used[number] = self._branches.stream(number - 1)
            side.wait_event(self._start)
        with torch.cuda.stream(side):
            yield

    def hand_over(self, x: Tensor) -> Tensor:
        """``x`` of a branch, to be used on the current stream after the block."""
        if self._on_gpu:
            x.record_stream(self._trunk)
        return x

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Join; after an exception too, since a capture must not end with a branch left open."""
        for side in self._used.values():
            self._trunk.wait_stream(side)
