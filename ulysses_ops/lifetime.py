"""What a communicator holds until it is closed or dropped, at whatever moment that is."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, Protocol

import torch

from .copy_engine import CopyEngineGroup

CLOSE_TIMEOUT_S = 10.0


class Resource(Protocol):
    """Something that lives as long as a communicator."""

    def close(self) -> None:
        """Give up what is held. Local; called when nothing is in flight."""


class State:
    """What closing a communicator gives up; apart from it, so that a finaliser can hold it."""

    def __init__(self) -> None:
        self.closed = False
        self.failure = ""  # why an exchange could not be finished, where the host knows
        self.copy_engine: CopyEngineGroup | None = None
        self.resources: dict[str, Any] = {}

    def close(self) -> None:
        """Give everything up; every step is tried, whatever the others raise."""
        if self.closed:
            return
        self.closed = True
        engine = self.copy_engine
        with ExitStack() as steps:  # runs in reverse
            if engine is not None:
                steps.callback(engine.close)
            for resource in self.resources.values():
                steps.callback(resource.close)
            if engine is not None:
                if not engine.settle(CLOSE_TIMEOUT_S):
                    # Work is queued behind a wait that nobody ends. What it reads and writes stays.
                    steps.pop_all()
                    _KEPT.append(self)
                # The watchdog, too, writes into windows: it ends before they are given back.
                engine.forget()


# States whose memory is still in use by work that could not be ended; kept until the process is.
_KEPT: list[State] = []

# States of communicators that were dropped while this thread captured: to free memory would break
# the capture, and in symmetric memory ends the process.
_DROPPED: list[State] = []


def finalise(state: State) -> None:
    """Close the state of a communicator that was dropped; later, if this thread captures."""
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        _DROPPED.append(state)
    else:
        state.close()


def sweep() -> None:
    """Close what was dropped in captures, where nothing is being captured any more."""
    waiting = _DROPPED.copy()
    _DROPPED.clear()
    for state in waiting:
        finalise(state)
