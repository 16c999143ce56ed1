"""Questions that may fail: the answer is a value, or None and what went wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from .facts import Reading

T = TypeVar("T")


def attempt(call: Callable[[], T]) -> tuple[T | None, str]:
    """Return the result and "", or None and what went wrong."""
    try:
        return call(), ""
    except Exception as error:  # noqa: BLE001  whatever fails, the answer is "unknown"
        return None, f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def read(source: str, call: Callable[[], str | int]) -> Reading:
    """Read a value from ``source``; an empty text counts as none."""
    value, why = attempt(call)
    return Reading(None, source, why or "empty") if value in (None, "") else Reading(value, source)
