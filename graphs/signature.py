"""What makes two calls of a step the same graph: structure, shapes, dtypes, scalars, autocast."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

# Values that a graph bakes in; another value is another graph.
CONSTANTS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, Enum)

# What random generators of a step must be.
GENERATORS = (torch.Generator, "a list of torch.Generators")
LeafKey = tuple[torch.Size, torch.dtype] | tuple[type, str]


@dataclass(frozen=True)
class Signature:
    """Key of a graph; made at every call, so nothing in it is text that nobody reads.

    Attributes:
        leaves: Shape and dtype of each tensor, type and ``repr`` of each constant: ``True`` is not
            1, and nan is itself.
        autocast: Dtype of autocast; ``None`` when it is off.
        spec: Nesting of dicts, lists, tuples and registered classes.
    """

    leaves: tuple[LeafKey, ...]
    autocast: torch.dtype | None
    spec: pytree.TreeSpec

    def __hash__(self) -> int:
        """Structure counts in comparisons alone; a spec may hold what has no hash."""
        return hash((self.leaves, self.autocast))

    def _entries(self, describe: Callable[[LeafKey], str]) -> list[tuple[str, str]]:
        names = pytree.tree_unflatten(list(range(len(self.leaves))), self.spec)
        paths = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(names)[0]]
        return list(zip(paths, map(describe, self.leaves), strict=True))

    def __str__(self) -> str:
        """The leaves by path."""
        text = ", ".join(f"{path}={key}" for path, key in self._entries(_text))
        return f"({text}{f'; autocast {self.autocast}' if self.autocast else ''})"

    def kind(self) -> str:
        """What is alike on ranks whose shards differ in size: no sizes, no values of constants."""
        text = ", ".join(f"{path}={kind}" for path, kind in self._entries(_kind))
        return f"({text}; autocast {self.autocast or 'off'})"

    def difference(self, other: Signature) -> str:
        """The first thing in which this one differs; empty when nothing does."""
        for (path, one), (other_path, two) in zip(
            self._entries(_text), other._entries(_text), strict=False
        ):
            if path != other_path:
                return f"input {path} is where {other_path} was"
            if one != two:
                return f"input {path} is {one}, was {two}"
        if self.spec != other.spec:
            return f"the inputs have {len(self.leaves)} leaves, had {len(other.leaves)}"
        if self.autocast != other.autocast:
            return f"autocast is {self.autocast or 'off'}, was {other.autocast or 'off'}"
        return ""


def _kind(key: LeafKey) -> str:
    first, second = key
    if isinstance(first, torch.Size):
        return f"{len(first)}-d {str(second).removeprefix('torch.')}"
    return first.__name__


def _text(key: LeafKey) -> str:
    first, second = key
    if isinstance(first, torch.Size):
        return f"{list(first)} {str(second).removeprefix('torch.')}"
    return str(second)


@dataclass(frozen=True)
class Flat:
    """A call taken apart.

    Attributes:
        signature: Its key.
        values: All leaves.
    """

    signature: Signature
    values: tuple[Any, ...]

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors among the leaves."""
        return [value for value in self.values if isinstance(value, Tensor)]

    def with_tensors(self, tensors: Sequence[Tensor]) -> Any:
        """The same structure and constants around other tensors."""
        rest = iter(tensors)
        leaves = [next(rest) if isinstance(value, Tensor) else value for value in self.values]
        return pytree.tree_unflatten(leaves, self.signature.spec)


def flatten(op: str, inputs: Any, device: torch.device) -> Flat:
    """Take nested dicts, lists, tuples and registered classes of tensors and constants apart.

    Raises:
        ValueError: a tensor on another device: its values would be baked in.
        TypeError: a leaf that is neither a tensor nor a constant.
    """
    values, spec = pytree.tree_flatten(inputs)
    keys: list[LeafKey] = []
    for index, value in enumerate(values):
        if isinstance(value, Tensor) and value.device == device:
            keys.append((value.shape, value.dtype))
        elif isinstance(value, CONSTANTS):
            keys.append((type(value), repr(value)))
        else:
            raise _refusal(op, index, value, spec, device)
    return Flat(Signature(tuple(keys), _autocast(device), spec), tuple(values))


def _refusal(
    op: str, index: int, value: Any, spec: pytree.TreeSpec, device: torch.device
) -> Exception:
    numbered = pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
    path = pytree.keystr(pytree.tree_flatten_with_path(numbered)[0][index][0])
    if isinstance(value, Tensor):
        return ValueError(
            f"{op}: input {path} is on {value.device}, and a graph would bake its values in; move "
            f"it to {device}"
        )
    return TypeError(
        f"{op}: input {path} is a {type(value).__name__}; pass tensors, numbers, strings, None, or "
        f"nested dicts, lists and tuples of them"
    )


def _autocast(device: torch.device) -> torch.dtype | None:
    if not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def tensors_of(tree: Any) -> list[Tensor]:
    """The tensors in nested dicts, lists, tuples and registered classes."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same bytes: nan equals itself, and zeros have a sign."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    left, right = (value.contiguous().view(-1).view(torch.uint8) for value in (one, other))
    return torch.equal(left, right)


def clone_tensors(tree: Any) -> Any:
    """The same nesting around copies of the tensors."""
    return pytree.tree_map_only(Tensor, Tensor.clone, tree)
