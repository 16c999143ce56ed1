"""``torch.ops.ulysses`` with types: the same object, for type checkers and editors.

::

    from ulysses_ops.operators import operators

    y = operators.scatter(x, comm.world_size, comm.name)  # is torch.ops.ulysses.scatter
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, cast

import torch
from torch import Tensor

from . import ops


class Operators(Protocol):
    """The public operators, as their schemas declare them; see :mod:`ulysses_ops.ops`."""

    def scatter(
        self,
        x: Tensor,
        world_size: int,
        group_name: str,
        seq_splits: Sequence[int] | None = None,
        head_splits: Sequence[int] | None = None,
        head_starts: Sequence[int] | None = None,
    ) -> Tensor:
        """``(B, S_local, H, D) -> (B, S_global, H_local, D)``, fresh; differentiable."""

    def gather(
        self,
        x: Tensor,
        world_size: int,
        group_name: str,
        seq_splits: Sequence[int] | None = None,
        head_splits: Sequence[int] | None = None,
        seq_starts: Sequence[int] | None = None,
    ) -> Tensor:
        """``(B, S_global, H_local, D) -> (B, S_local, H, D)``, fresh; differentiable."""

    def scatter_into(
        self,
        x: Tensor,
        window: Tensor,
        token: Tensor,
        world_size: int,
        group_name: str,
        peer: int | None = None,
    ) -> None:
        """Begin sending ``x``, or the part for ``peer``, into the window of every rank."""

    def gather_into(
        self,
        x: Tensor,
        window: Tensor,
        token: Tensor,
        world_size: int,
        group_name: str,
        peer: int | None = None,
    ) -> None:
        """Begin sending ``x``, or the part for ``peer``, into the window of every rank."""

    def all_gather(
        self,
        x: Tensor,
        world_size: int,
        group_name: str,
        seq_splits: Sequence[int] | None = None,
    ) -> Tensor:
        """``(B, S_local, H, D) -> (B, S_global, H, D)``, fresh; differentiable."""

    def all_gather_into(
        self,
        x: Tensor,
        window: Tensor,
        token: Tensor,
        world_size: int,
        group_name: str,
        peer: int | None = None,
    ) -> None:
        """Begin sending ``x`` into the window of every rank, or of ``peer`` alone."""

    def complete(
        self,
        windows: list[Tensor],
        sources: list[Tensor],
        token: Tensor,
        world_size: int,
        group_name: str,
    ) -> None:
        """End the exchanges of these windows; ``sources`` are the very tensors that were sent."""


assert ops.LIBRARY is not None  # what declares them
operators: Operators = cast("Operators", torch.ops.ulysses)
