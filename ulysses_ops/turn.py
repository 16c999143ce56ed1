"""Whose turn it is: a communicator serves one thread at a time.

Ranks know no order of each other's threads. Two that call at once would pair with whichever call of
a peer comes first, and one might fill a window that the other still reads. So the second is
refused, and not queued. Threads may take turns, in an order that is the same on every rank.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType

import torch

from .errors import UlyssesError


class Turn:
    """A lock that a thread may take again, and that no other waits for."""

    def __init__(self, name: str) -> None:
        """Nobody holds it.

        Args:
            name: Of the communicator.
        """
        self._name = name
        self._lock = threading.RLock()
        self._holder = 0

    def take(self, op: str) -> None:
        """Begin a call, or a call within one of this thread.

        Raises:
            UlyssesError: another thread is in one.
        """
        if not self._lock.acquire(blocking=False):
            names = {thread.ident: thread.name for thread in threading.enumerate()}
            holder = names.get(self._holder, str(self._holder))
            message = (
                f"{op}: communicator '{self._name}' is in use by thread '{holder}' at this moment, "
                f"and this is '{threading.current_thread().name}'; call it from one thread at a "
                f"time, in the same order on every rank, or give each thread a communicator"
            )
            raise UlyssesError(message)
        self._holder = threading.get_ident()

    def give(self) -> None:
        """End what :meth:`take` began."""
        self._lock.release()

    def of(self, op: str) -> AbstractContextManager[None]:
        """A block that is one call; none while a compiler traces, which runs nothing."""
        return nullcontext() if torch.compiler.is_compiling() else _Block(self, op)


class _Block(AbstractContextManager[None]):
    def __init__(self, turn: Turn, op: str) -> None:
        self._turn = turn
        self._op = op

    def __enter__(self) -> None:
        self._turn.take(self._op)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._turn.give()
