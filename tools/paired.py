"""Comparisons of what was measured in the same rounds: what moves both in a round cancels."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from ulysses_ops.tools.timing import Summary


@dataclass(frozen=True)
class Paired:
    """One figure a round, put together.

    Attributes:
        median: Of the rounds.
        quartiles: First and third quartile of the rounds.
    """

    median: float
    quartiles: tuple[float, float]

    @classmethod
    def of_rounds(cls, values: Iterable[float]) -> Paired:
        """Put the figures of all rounds together.

        Raises:
            ValueError: there are none.
        """
        figures = list(values)
        if not figures:
            message = "paired figures: no round was measured; measure at least one"
            raise ValueError(message)
        if len(figures) == 1:
            return cls(figures[0], (figures[0], figures[0]))
        first, median, third = statistics.quantiles(figures, n=4, method="inclusive")
        return cls(median, (first, third))


def tax_percent(with_exchange: Summary, compute_only: Summary) -> Paired:
    """``100 (with exchange / compute only - 1)``.

    Raises:
        ValueError: they were not measured in the same rounds.
    """
    pairs = zip(with_exchange.round_us, compute_only.round_us, strict=True)
    return Paired.of_rounds(100 * (slow / fast - 1) for slow, fast in pairs)


def hidden_percent(serial: Summary, concurrent: Summary, alone: Summary) -> Paired:
    """``100 (serial - concurrent) / exchange alone``: how much of an exchange other work hides.

    Below 0 they hinder each other by more than they hide.

    Raises:
        ValueError: they were not measured in the same rounds.
    """
    rounds = zip(serial.round_us, concurrent.round_us, alone.round_us, strict=True)
    return Paired.of_rounds(100 * (one - other) / exchange for one, other, exchange in rounds)


def excess_us(longer: Summary, shorter: Summary) -> Paired:
    """``longer - shorter`` in microseconds.

    Raises:
        ValueError: they were not measured in the same rounds.
    """
    pairs = zip(longer.round_us, shorter.round_us, strict=True)
    return Paired.of_rounds(slow - fast for slow, fast in pairs)
