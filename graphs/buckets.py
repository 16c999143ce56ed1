"""Lengths that change with every call, padded up to a few."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from ulysses_ops.kinds import check_kind, is_whole, shown, whole_numbers


@dataclass(frozen=True)
class Bucket:
    """Pads one dimension of some inputs up to the next of a few lengths.

    ``padded[..., :n, ...] = x; padded[..., n:, ...] = fill`` along ``dim``, with n the length. The
    step must give the same for padded inputs: pass a mask with ``fill`` False, or 0, along with
    what it masks.

    Attributes:
        inputs: Keywords, or positions, of the inputs; all of one length, each a tensor.
        dim: The dimension that is padded.
        lengths: Lengths to pad to, ascending. A longer input is run eagerly.
        fill: What to pad with.
    """

    inputs: tuple[str | int, ...]
    dim: int
    lengths: tuple[int, ...]
    fill: float | bool = 0

    def __post_init__(self) -> None:
        """Refuse lengths that no call could use.

        Raises:
            ValueError: a value is of another kind, inputs or lengths are empty, a position is
                negative, or lengths do not ascend from at least 1.
        """
        what = "a tuple of keywords or positions"
        if not isinstance(self.inputs, tuple | list):
            message = f"Bucket: inputs={shown(self.inputs)} must be {what}"
            raise ValueError(message)
        for name in self.inputs:
            if not isinstance(name, str) and not (is_whole(name) and name >= 0):
                message = f"Bucket: inputs holds {shown(name)} and must be {what}, from 0 on"
                raise ValueError(message)
        object.__setattr__(self, "inputs", tuple(self.inputs))
        check_kind("Bucket", "dim", self.dim, int, "a whole number")
        lengths = whole_numbers("Bucket", "lengths", self.lengths, "lengths that ascend")
        object.__setattr__(self, "lengths", lengths)
        check_kind("Bucket", "fill", self.fill, Real, "a number, True or False")
        ascends = list(lengths) == sorted(set(lengths))
        if not self.inputs or not lengths or not ascends or lengths[0] < 1:
            message = (
                f"Bucket: inputs={list(self.inputs)} and lengths={list(lengths)} must not be empty,"
                f" and lengths ascend from at least 1"
            )
            raise ValueError(message)

    def length_of(self, args: Sequence[Any], kwargs: dict[str, Any]) -> int:
        """Length of the inputs of this call.

        Raises:
            ValueError: an input is missing, is no tensor, lacks the dimension, or lengths differ.
        """
        found = {}
        for name in self.inputs:
            value = _pick(args, kwargs, name)
            if not isinstance(value, Tensor) or not -value.dim() <= self.dim < value.dim():
                what = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
                message = (
                    f"Bucket: input {name!r} is {what}; it must be a tensor with dimension "
                    f"{self.dim}"
                )
                raise ValueError(message)
            found[name] = value.shape[self.dim]
        if len(set(found.values())) != 1:
            message = f"Bucket: dimension {self.dim} differs between inputs: {found}"
            raise ValueError(message)
        return next(iter(found.values()))

    def padded(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The call with its inputs padded; ``None`` when they are longer than every bucket."""
        length = self.length_of(args, kwargs)
        target = next((bound for bound in self.lengths if bound >= length), None)
        if target is None:
            return None
        positional, named = list(args), dict(kwargs)
        for name in self.inputs:
            if isinstance(name, int):
                positional[name] = self._pad(positional[name], target)
            else:
                named[name] = self._pad(named[name], target)
        return tuple(positional), named

    def _pad(self, x: Tensor, target: int) -> Tensor:
        missing = target - x.shape[self.dim]
        if missing == 0:
            return x
        shape = list(x.shape)
        shape[self.dim] = missing
        filler = torch.full(shape, self.fill, dtype=x.dtype, device=x.device)
        return torch.cat([x, filler], dim=self.dim)


def _pick(args: Sequence[Any], kwargs: dict[str, Any], name: str | int) -> Any:
    if isinstance(name, str):
        return kwargs.get(name)
    return args[name] if name < len(args) else None
