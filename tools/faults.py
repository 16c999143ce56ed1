"""Faults that strike one rank at a chosen moment, put in through seams of this package.

A moment is counted, not timed: "the second record of meeting 'reserve'", "the first allocation of
the exchange". A cycle without a fault says which moments there are; nothing else chooses them.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import Store

from ulysses_ops import all_to_all, collective, communicator
from ulysses_ops.agreement import Agreement, group_store
from ulysses_ops.copy_engine import CopyEngineGroup
from ulysses_ops.exchange import Exchange
from ulysses_ops.graphs import CapturedStep

Kind = Literal["entry", "meeting", "exchange", "signal", "mapping", "allocation"]
FaultName = Literal[
    "late", "too late", "stopped", "killed", "dropped write", "failed rendezvous",
    "failed allocation",
]  # fmt: skip

ANYWHERE: tuple[Kind, ...] = ("entry", "meeting", "exchange")
# What a fault can strike.
FAULTS: dict[FaultName, tuple[Kind, ...]] = {
    "late": ANYWHERE,
    "too late": ANYWHERE,
    "stopped": ANYWHERE,
    "killed": ANYWHERE,
    "dropped write": ("meeting", "exchange", "signal"),
    "failed rendezvous": ("meeting", "mapping"),
    "failed allocation": ("allocation",),
}
ATTEMPTS: dict[str, Kind] = {
    "allocation": "allocation",
    "group": "allocation",
    "warm-up": "allocation",
    "capture": "allocation",
    "rendezvous": "mapping",
    "opening": "mapping",
}
ALLOCATORS = ("empty", "empty_like", "zeros", "cat")
SHORTER, LONGER = 0.4, 2.0  # of the limit: late, too late


class DroppedError(Exception):
    """What this rank was about to do was lost; it takes no further part."""


@dataclass(frozen=True)
class Moment:
    """The ``ordinal``-th time, in ``step``, that a rank comes to what ``kind`` and ``name`` say."""

    step: str
    kind: Kind
    name: str = ""
    ordinal: int = 0

    def __str__(self) -> str:
        """As in ``meeting 'reserve' #0``."""
        return self.kind if self.kind == "entry" else f"{self.kind} '{self.name}' #{self.ordinal}"


@dataclass(frozen=True)
class Fault:
    """What is to happen, and when."""

    name: FaultName
    moment: Moment

    @property
    def breaks_mapping(self) -> bool:
        """Whether the mapping of peers' memory fails by it."""
        return self.name == "failed rendezvous" and self.moment.kind == "mapping"


def possible_faults(moments: list[Moment]) -> list[Fault]:
    """Every fault at every moment that it can strike."""
    return [
        Fault(name, moment)
        for name, kinds in FAULTS.items()
        for moment in moments
        if moment.kind in kinds
    ]


class Injector:
    """Notes the moments that a rank comes to, and strikes at one of them.

    A context: the seams are in place while it is entered.
    """

    def __init__(
        self, fault: Fault | None, limit_s: float, stopping: Callable[[], None] = lambda: None
    ) -> None:
        """Prepare.

        Args:
            fault: ``None`` to note moments only.
            limit_s: The limit of the communicator, in seconds.
            stopping: Called before this process stops itself: somebody has to continue it.
        """
        self.moments: list[Moment] = []
        self.struck = False
        self._fault = fault
        self._limit_s = limit_s
        self._stopping = stopping
        self._step = ""
        self._counts: Counter[tuple[str, Kind, str]] = Counter()
        self._seams = ExitStack()

    def enter(self, step: str) -> None:
        """A step of the cycle begins."""
        self._step = step
        self.reach("entry")

    def disarm(self) -> None:
        """Strike no more."""
        self._fault = None

    def reach(self, kind: Kind, name: str = "") -> bool:
        """This rank is at a moment; whether what it is about to write is to be dropped."""
        key = (self._step, kind, name)
        moment = Moment(self._step, kind, name, self._counts[key])
        self._counts[key] += 1
        self.moments.append(moment)
        if self._fault is None or moment != self._fault.moment:
            return False
        self.struck = True
        return self._strike(self._fault.name)

    def _strike(self, name: FaultName) -> bool:
        if name == "late":
            time.sleep(SHORTER * self._limit_s)
        elif name == "too late":
            time.sleep(LONGER * self._limit_s)
        elif name == "stopped":
            self._stopping()
            os.kill(os.getpid(), signal.SIGSTOP)
        elif name == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif name == "failed rendezvous":
            message = "injected: connection refused"
            raise dist.DistNetworkError(message)
        elif name == "failed allocation":
            message = "injected: out of memory"
            raise torch.OutOfMemoryError(message)
        return name == "dropped write"

    def __enter__(self) -> Injector:
        """Put the seams in place."""
        patch = self._seams.enter_context
        patch(
            mock.patch.object(
                communicator, "group_store", lambda group: _StoreSeam(group_store(group), self)
            )
        )
        trade = self._before(all_to_all.all_to_all, "exchange", "bytes")
        patch(mock.patch.object(all_to_all, "all_to_all", trade))
        patch(mock.patch.object(collective, "all_to_all", trade))
        for owner, method, kind in (
            (Exchange, "send", "exchange"),
            (Exchange, "complete", "exchange"),
            (CapturedStep, "replay_tensors", "exchange"),
            (CopyEngineGroup, "_announce", "signal"),
        ):
            seam = self._before(getattr(owner, method), kind, method)
            patch(mock.patch.object(owner, method, seam))
        patch(mock.patch.object(Agreement, "attempt", self._attempt(Agreement.attempt)))
        for name in ALLOCATORS:
            patch(mock.patch.object(torch, name, self._allocator(getattr(torch, name), name)))
        return self

    def __exit__(self, *error: object) -> None:
        """Take the seams away."""
        self._seams.close()

    def _before(self, call: Callable[..., Any], kind: Any, name: str) -> Callable[..., Any]:
        def seam(*args: Any, **kwargs: Any) -> Any:
            if self.reach(kind, name):
                if kind == "signal":
                    return None
                time.sleep(LONGER * self._limit_s)  # it believes that it has sent, and waits
                raise DroppedError
            return call(*args, **kwargs)

        return seam

    def _allocator(self, call: Callable[..., Any], name: str) -> Callable[..., Any]:
        def seam(*args: Any, **kwargs: Any) -> Any:
            if not (args and isinstance(args[0], int) and args[0] == 0):  # which takes no memory
                self.reach("allocation", f"torch.{name}")
            return call(*args, **kwargs)

        return seam

    def _attempt(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def seam(agreement: Agreement, topic: str, step: Callable[[], Any]) -> Any:
            def struck() -> Any:
                if topic in ATTEMPTS:
                    self.reach(ATTEMPTS[topic], topic)
                return step()

            return call(agreement, topic, struck)

        return seam


class _StoreSeam:
    """A store whose writes can fail, come late, or get lost."""

    def __init__(self, store: Store, injector: Injector) -> None:
        self._store = store
        self._injector = injector

    def set(self, key: str, value: str) -> None:
        if "/left/" in key:
            topic = "leave"
        else:
            is_join = "/hello/" in key or "/joined/" in key
            topic = "join" if is_join else json.loads(value)["topic"]
        if not self._injector.reach("meeting", topic):
            self._store.set(key, value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def is_injected(error: BaseException) -> bool:
    """Whether a fault itself is what a rank raised."""
    return "injected: " in str(error)
