"""Meetings of the ranks of a group: every rank reads every record, within a time limit.

Records are JSON and travel through the store that the process group was made with. Nothing of the
process group itself is used, so a meeting can fail without leaving a collective half done. Every
rank sees the same records, so pure functions of them give every rank the same verdict.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch.distributed as dist
from torch.distributed import ProcessGroup, Store

from .errors import AgreementError

Record = dict[str, Any]
T = TypeVar("T")

POLL_S = 0.002
LOOK_S = 0.1  # between two looks for peers that parted
WHY_CHARS = 300
COMPLETE = "complete"


def group_store(group: ProcessGroup) -> Store:
    """The store that ``group`` was made with."""
    # Public API has no way to it; torch's symmetric memory takes the same one.
    from torch.distributed import distributed_c10d

    store: Store = distributed_c10d._get_process_group_store(group)
    return store


def _missing(topic: str, rank: int, timeout_s: float, missing: list[int]) -> AgreementError:
    return AgreementError(
        f"{topic}: rank {rank} waited {timeout_s:g} s for ranks {missing}, which did not come; "
        f"every rank must make the same calls in the same order"
    )


def _store_gone(topic: str, rank: int) -> AgreementError:
    return AgreementError(
        f"{topic}: rank {rank} lost the store that the ranks meet through; the process that hosts "
        f"it, as a rule that of rank 0, has ended"
    )


def _decoded(topic: str, rank: int, raw: bytes) -> Any:
    """What a peer posted. It is data and never code: JSON, and nothing else is read."""
    try:
        return json.loads(raw)
    except ValueError:
        message = (
            f"{topic}: what rank {rank} posted is not JSON; does every rank run the same version, "
            f"and does nobody else write into the store of the process group?"
        )
        raise AgreementError(message) from None


def _entry(topic: str, rank: int, raw: bytes) -> dict[str, Any]:
    """A record with its topic."""
    found = _decoded(topic, rank, raw)
    if not (isinstance(found, dict) and isinstance(found.get("topic"), str) and "record" in found):
        message = (
            f"{topic}: what rank {rank} posted is no record; does every rank run the same version, "
            f"and does nobody else write into the store of the process group?"
        )
        raise AgreementError(message)
    return found


def join(store: Store, name: str, rank: int, world_size: int, timeout_s: float) -> str:
    """Meet for the first time under ``name`` and return a session name that was never used before.

    A store can outlive process groups and hold records of earlier meetings. So every rank posts a
    fresh random number and waits until every peer has repeated it: what repeats it cannot be old.
    Ranks leave together: one that began the next meeting under this name sooner would replace its
    number while a peer still looks for this one.

    Raises:
        AgreementError: a rank did not come within ``timeout_s``.
    """
    try:
        deadline = time.monotonic() + timeout_s
        session = _greet(store, name, rank, world_size, timeout_s)
        joined = [f"{session}/joined/{peer}" for peer in range(world_size)]
        store.set(joined[rank], "1")
        while not store.check(joined):
            if time.monotonic() > deadline:
                missing = [peer for peer, key in enumerate(joined) if not store.check([key])]
                raise _missing(f"construction of '{name}'", rank, timeout_s, missing)
            time.sleep(POLL_S)
        return session
    except dist.DistNetworkError:
        raise _store_gone(f"construction of '{name}'", rank) from None


def _greet(store: Store, name: str, rank: int, world_size: int, timeout_s: float) -> str:
    keys = [f"{name}/hello/{peer}" for peer in range(world_size)]
    nonces = {rank: secrets.token_hex(8)}
    deadline = time.monotonic() + timeout_s
    store.set(keys[rank], json.dumps(nonces))
    while True:
        answered = {rank}
        seen = dict(nonces)
        for peer, key in enumerate(keys):
            if peer != rank and store.check([key]):
                greeting = _decoded(f"construction of '{name}'", peer, store.get(key))
                if not isinstance(greeting, dict) or str(peer) not in greeting:
                    continue  # nobody that speaks like this: as if it had not come
                seen[peer] = str(greeting[str(peer)])
                if greeting.get(str(rank)) == nonces[rank]:
                    answered.add(peer)
        if seen != nonces:
            nonces = seen
            store.set(keys[rank], json.dumps(nonces))
        elif len(answered) == world_size:
            return f"{name}/{'-'.join(nonces[peer] for peer in range(world_size))}"
        if time.monotonic() > deadline:
            missing = [peer for peer in range(world_size) if peer not in answered]
            raise _missing(f"construction of '{name}'", rank, timeout_s, missing)
        time.sleep(POLL_S)


class Agreement:
    """Numbered meetings of one communicator; the numbers advance alike on every rank.

    Attributes:
        timeout_s: How long a meeting waits for the slowest rank, in seconds.
        exchanges: Exchanges on the host that this rank has been through; whoever makes them counts.
    """

    def __init__(
        self, store: Store, session: str, rank: int, world_size: int, timeout_s: float
    ) -> None:
        """Prepare meetings of the ranks that joined ``session``.

        Args:
            store: A store that all ranks reach.
            session: What :func:`join` returned; prefix of all keys.
            rank: This rank.
            world_size: Number of ranks.
            timeout_s: How long a meeting waits for the slowest rank, in seconds.
        """
        self._store = store
        self._session = session
        self._rank = rank
        self._world_size = world_size
        self.timeout_s = timeout_s
        self.exchanges = 0
        self._meeting = 0

    def exchange(self, topic: str, record: Record) -> list[Record]:
        """Give this rank's record and return those of all ranks, by rank.

        Collective, and bounded: a rank that does not come makes the others raise.

        Args:
            topic: What is being agreed on; for the error message.
            record: Anything that JSON can hold.

        Raises:
            AgreementError: a rank did not come within ``timeout_s``.
        """
        meeting = self._meeting
        self._meeting += 1
        if self._world_size == 1:
            return [json.loads(json.dumps(record))]
        try:
            return self._meet(topic, meeting, record)
        except dist.DistNetworkError:
            raise _store_gone(topic, self._rank) from None

    def _meet(self, topic: str, meeting: int, record: Record) -> list[Record]:
        keys = [self._key(meeting, rank) for rank in range(self._world_size)]
        self._store.set(keys[self._rank], json.dumps({"topic": topic, "record": record}))
        outcome = self._wait(topic, meeting, keys) or COMPLETE
        # The first to say how the meeting went is right for all: a rank that comes when another has
        # given up is refused as well.
        verdict = self._store.compare_set(self._verdict_key(meeting), "", outcome).decode()
        if verdict != COMPLETE:
            raise AgreementError(verdict)
        entries = [_entry(topic, rank, self._store.get(key)) for rank, key in enumerate(keys)]
        self._forget(meeting - 1)
        topics = [entry["topic"] for entry in entries]
        if len(set(topics)) != 1:
            message = (
                f"{' and '.join(dict.fromkeys(topics))}: the ranks are at different calls, by rank "
                f"{topics}; every rank must make the same calls in the same order"
            )
            raise AgreementError(message)
        return [entry["record"] for entry in entries]

    def _wait(self, topic: str, meeting: int, keys: list[str]) -> str:
        """Wait for every record, within the limit; what is wrong, or nothing.

        Asks again and again: in one long wait a process would not hear of Ctrl-C before its end.
        """
        deadline = time.monotonic() + self.timeout_s
        look_at = time.monotonic() + LOOK_S
        pause_s = POLL_S / 8
        while True:
            now = time.monotonic()
            is_over = now > deadline  # who is there when one looks after that has come
            if self._store.check(keys):
                return ""
            if is_over:
                absent = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
                return str(_missing(topic, self._rank, self.timeout_s, absent)) if absent else ""
            if now > look_at:
                look_at = now + LOOK_S
                if parted := self.parted("meetings", meeting):
                    return f"{topic}: rank {self._rank} waits for {parted}"
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 4 * POLL_S)

    def part(self, why: str) -> None:
        """Say, without waiting, that this rank comes to nothing more: it left by an exception.

        Whoever waits for it, or comes to wait, then need not wait for the limit.
        """
        if self._world_size > 1:
            note = {"meetings": self._meeting, "exchanges": self.exchanges, "why": why[:WHY_CHARS]}
            with contextlib.suppress(RuntimeError):  # a store that is gone cannot be told any more
                self._store.set(self._parted_key(self._rank), json.dumps(note))

    def parted(self, what: Literal["meetings", "exchanges"], number: int) -> str:
        """The first peer that left before the meeting or exchange of this number, and why.

        Empty while there is none, or where it cannot be known. A peer that has been through it has
        sent what it had to.
        """
        for peer in range(self._world_size):
            key = self._parted_key(peer)
            try:
                if peer == self._rank or not self._store.check([key]):
                    continue
                note = _decoded("parting", peer, self._store.get(key))
            except RuntimeError:
                return ""
            if isinstance(note, dict) and isinstance(note.get(what), int) and note[what] <= number:
                why = str(note.get("why"))[:WHY_CHARS]
                return f"rank {peer}, which left the communicator by {why}"
        return ""

    def attempt(self, topic: str, step: Callable[[], T]) -> tuple[T | None, list[str]]:
        """Try a local step on every rank and learn how it went everywhere.

        Returns:
            The step's value (``None`` where it failed), and the failures of all ranks as sentences,
            the same list on every rank.
        """
        value: T | None = None
        failure = ""
        try:
            value = step()
        except Exception as error:  # noqa: BLE001  a failure becomes a record: none stays away
            failure = f"{type(error).__name__}: {error}".splitlines()[0]
        records = self.exchange(topic, {"failure": failure})
        failures = [
            f"rank {rank}: {record['failure']}"
            for rank, record in enumerate(records)
            if record["failure"]
        ]
        return value, failures

    def leave(self, topic: str, *, owner: int) -> None:
        """Say, without waiting, that this rank is done with what ``owner`` keeps for it."""
        with contextlib.suppress(RuntimeError):  # a store that is gone cannot be told any more
            self._store.set(self._left_key(topic, owner, self._rank), "1")

    def all_left(self, topic: str) -> bool:
        """Whether every peer said so of something that this rank keeps; ``False`` if unknown."""
        peers = (peer for peer in range(self._world_size) if peer != self._rank)
        try:
            return bool(
                self._store.check([self._left_key(topic, self._rank, peer) for peer in peers])
            )
        except RuntimeError:
            return False

    def _left_key(self, topic: str, owner: int, leaver: int) -> str:
        return f"{self._session}/left/{topic}/{owner}/{leaver}"

    def _parted_key(self, rank: int) -> str:
        return f"{self._session}/left/parted/{rank}"

    def _verdict_key(self, meeting: int) -> str:
        return f"{self._session}/{meeting}/verdict"

    def _key(self, meeting: int, rank: int) -> str:
        return f"{self._session}/{meeting}/{rank}"

    def _forget(self, meeting: int) -> None:
        """Delete this rank's record of a meeting that all ranks have left.

        A rank comes to a meeting only after it has read the one before.
        """
        if meeting >= 0:
            self._store.delete_key(self._key(meeting, self._rank))
            if self._rank == 0:
                self._store.delete_key(self._verdict_key(meeting))


@dataclass(frozen=True)
class Disagreement:
    """Ranks gave different records where they must be equal."""

    values: tuple[str, ...]

    def describe(self) -> str:
        """The records by rank, those that are equal said once."""
        by_value: dict[str, list[int]] = {}
        for rank, value in enumerate(self.values):
            by_value.setdefault(value, []).append(rank)
        return "; ".join(f"ranks {ranks}: {value}" for value, ranks in by_value.items())


def find_disagreement(records: Sequence[Record | str]) -> Disagreement | None:
    """``None`` when all records are equal."""
    values = tuple(
        record if isinstance(record, str) else json.dumps(record, sort_keys=True)
        for record in records
    )
    return None if len(set(values)) == 1 else Disagreement(values)
