"""Things that may fail on some rank: every rank hears of it, and all go on alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from ulysses_ops.errors import UlyssesError
from ulysses_ops.tools.launch import RankContext

T = TypeVar("T")
LONGEST = 300


class Attempt(NamedTuple, Generic[T]):
    """What came of it.

    Attributes:
        value: What this rank made; also where another rank failed.
        reason: Why it failed, the same on every rank; empty where it worked on all of them.
    """

    value: T | None
    reason: str


def attempt(context: RankContext, work: Callable[[], T]) -> Attempt[T]:
    """Do ``work`` on every rank and tell each how it went. Collective.

    A rank that fails while others wait for it inside ``work`` ends the run: what may do that is
    tried in processes of its own first.
    """
    value: T | None = None
    failure = ""
    try:
        value = work()
    except Exception as error:  # noqa: BLE001  whatever it was, the ranks must hear of it
        failure = describe(error)
    failures = context.gather(failure)
    told = dict.fromkeys(text for text in failures if text)  # each once
    by = [rank for rank, text in enumerate(failures) if text]
    reason = f"rank {', '.join(map(str, by))}: {'; '.join(told)}" if told else ""
    return Attempt(value, reason)


def attempt_all(context: RankContext, work: Callable[[], T], what: str) -> T:
    """Like :func:`attempt`, for what has to work.

    Raises:
        UlyssesError: it failed on some rank; the same text on every rank.
    """
    value, reason = attempt(context, work)
    if reason:
        message = f"{what}: {reason}"
        raise UlyssesError(message)
    return value  # type: ignore[return-value]  # work may well return None


def describe(error: BaseException) -> str:
    """One line: the type, and the first line of the text."""
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
