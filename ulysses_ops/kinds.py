"""Arguments of a wrong kind: refused in one sentence, before anything is done with them."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor

Kind = TypeVar("Kind")

PLAIN = (str, bytes, bool, int, float, type(None))


def shown(value: object) -> str:
    """The value, where it is short and says something; else what it is."""
    text = repr(value) if isinstance(value, PLAIN) else f"a value of type {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:80]}..."


def check_kind(op: str, name: str, value: object, kind: type[Any], what: str) -> None:
    """Refuse what is of another type.

    Args:
        op: Name for the message.
        name: Of the argument.
        value: What was given.
        kind: The type; a bool is no whole number.
        what: The type in words.

    Raises:
        ValueError: it is.
    """
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        message = f"{op}: {name}={shown(value)} must be {what}"
        raise ValueError(message)


def check_tensors(op: str, **tensors: object) -> None:
    """Refuse what is no tensor.

    Raises:
        ValueError: the first that is none, by name.
    """
    for name, value in tensors.items():
        check_kind(op, name, value, Tensor, "a tensor")


def check_data(op: str, x: Tensor) -> None:
    """Refuse a meta tensor: an operator would do nothing, and say nothing.

    Raises:
        ValueError: it is one.
    """
    if x.device.type == "meta":
        message = f"{op}: x is a meta tensor, which holds no data; give one of a real device"
        raise ValueError(message)


def check_dense(op: str, x: Tensor, name: str = "x") -> None:
    """Refuse what has no strides, or more than elements: no range of it can be copied.

    Raises:
        ValueError: it is sparse, nested, or quantized.
    """
    if x.layout is not torch.strided or x.is_nested or x.is_quantized:
        kind = "nested" if x.is_nested else "quantized" if x.is_quantized else str(x.layout)
        message = f"{op}: {name} is {kind}, and must be a dense tensor; convert it"
        raise ValueError(message)


def check_readable(op: str, x: Tensor) -> None:
    """Refuse what has no elements to read, as :func:`check_dense` and :func:`check_data`.

    Raises:
        ValueError: as they do.
    """
    check_dense(op, x)
    check_data(op, x)


def each_of(op: str, name: str, values: object, kind: type[Kind], what: str) -> tuple[Kind, ...]:
    """Values of one kind, of a list or of anything that is gone through once.

    Args:
        op: Name for the message.
        name: Of the argument.
        values: What was given.
        kind: Of each.
        what: A list of these, in words.

    Raises:
        ValueError: it cannot be gone through, or one of them is of another kind.
    """
    if isinstance(values, str) or not isinstance(values, Iterable):
        message = f"{op}: {name}={shown(values)} must be {what}"
        raise ValueError(message)
    held = tuple(values)
    for value in held:
        check_kind(op, f"each of {name}", value, kind, f"in {what}")
    return held


def check_callable(op: str, name: str, value: object, what: str) -> None:
    """Refuse what cannot be called.

    Raises:
        ValueError: it cannot.
    """
    if not callable(value):
        message = f"{op}: {name}={shown(value)} must be {what}"
        raise ValueError(message)


def check_sizes(op: str, name: str, value: object, what: str = "sizes, one for each rank") -> None:
    """Refuse what is no sequence of whole numbers; ``None`` is left out and passes.

    Raises:
        ValueError: it is none.
    """
    if value is None:
        return
    is_sequence = isinstance(value, list | tuple) or (
        hasattr(value, "__iter__")
        and not isinstance(value, str | bytes)
        and not (isinstance(value, Tensor) and value.ndim == 0)
    )
    if not is_sequence:
        message = f"{op}: {name}={shown(value)} must be {what}"
        raise ValueError(message)
    for entry in value:  # type: ignore[attr-defined]
        if type(entry) is not int and not is_whole(entry):  # most are, and this is quick
            message = f"{op}: {name} holds {shown(entry)} and must be {what}"
            raise ValueError(message)


def is_whole(value: object) -> bool:
    """Whether this is a whole number: of Python, of NumPy, or the symbol of a compiler for one."""
    return (isinstance(value, int) and not isinstance(value, bool)) or (
        hasattr(value, "__index__") and not isinstance(value, bool | Tensor)
    )


def whole_numbers(op: str, name: str, values: Any, what: str) -> tuple[int, ...]:
    """Whole numbers of anything that is gone through once, such as a generator.

    Args:
        op: Name for the message.
        name: Of the argument.
        values: What was given.
        what: What it must be, in words.

    Raises:
        ValueError: it cannot be gone through, or an entry is no whole number.
    """
    try:
        held: object = values if isinstance(values, str | bytes) else tuple(values)
    except TypeError:
        held = values
    if held is None:
        message = f"{op}: {name}=None must be {what}"
        raise ValueError(message)
    check_sizes(op, name, held, what)
    return tuple(operator.index(entry) for entry in held)  # type: ignore[attr-defined]


def check_at_least_1(op: str, **numbers: object) -> None:
    """Refuse what is no whole number, or below 1.

    Raises:
        ValueError: the first that is, by name.
    """
    for name, value in numbers.items():
        if not is_whole(value) or value < 1:  # type: ignore[operator]
            message = f"{op}: {name}={shown(value)} must be a whole number >= 1"
            raise ValueError(message)
