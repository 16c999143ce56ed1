"""Time shared out over what is to be measured."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

from ulysses_ops.tools.timing import Effort


class Budget:
    """What is left of a time limit, split by weight over what was not measured yet.

    What a measurement leaves over, or takes too much, the later ones share.
    """

    def __init__(self, deadline: float, weights: Mapping[str, float]) -> None:
        """Share the time up to ``deadline``, by ``time.monotonic``, in proportion to weights.

        Raises:
            ValueError: a weight is not above 0.
        """
        for key, weight in weights.items():
            if weight <= 0:
                message = f"budget: weight {weight} of '{key}' must be above 0"
                raise ValueError(message)
        self._deadline = deadline
        self._weights = dict(weights)

    @property
    def left_s(self) -> float:
        """Seconds until the deadline; below 0 past it."""
        return self._deadline - time.monotonic()

    def allot(self, key: str) -> float:
        """The moment until which ``key`` may take; it is no longer waited for.

        Raises:
            KeyError: ``key`` has no weight, or had its share already.
        """
        total = sum(self._weights.values())
        share = self._weights.pop(key) / total
        return time.monotonic() + max(self.left_s, 0.0) * share

    def effort(self, key: str, effort: Effort) -> Effort:
        """``effort`` that ends with the share of ``key``."""
        return replace(effort, until=self.allot(key))
