"""What counts as the same call of a step."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from ulysses_ops.errors import UlyssesError
from ulysses_ops.graphs.refusals import explained
from ulysses_ops.graphs.signature import clone_tensors, flatten, same_bits, tensors_of

CPU = torch.device("cpu")
X = torch.zeros(2, 3)


def signature(*inputs: Any) -> Any:
    return flatten("test", inputs, CPU).signature


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": X, "b": [X, None]}, {"a": X + 1, "b": [X + 1, None]}),
        (X, torch.zeros(3, 2).t()),
        (math.nan, math.nan),
        (torch.bfloat16, torch.bfloat16),
    ],
    ids=["values", "strides", "nan", "dtype"],
)
def test_the_same_graph(one: Any, other: Any) -> None:
    assert signature(one) == signature(other)
    assert hash(signature(one)) == hash(signature(other))
    assert signature(one).difference(signature(other)) == ""


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        (X, torch.zeros(2, 4), "input [0] is [2, 3] float32, was [2, 4] float32"),
        (X, X.half(), "input [0] is [2, 3] float32, was [2, 3] float16"),
        ({"a": [X, 1]}, {"a": [X, True]}, "input [0]['a'][1] is 1, was True"),
        (0.0, -0.0, "input [0] is 0.0, was -0.0"),
        ({"a": X}, {"b": X}, "input [0]['a'] is where [0]['b'] was"),
        ([X], [X, X], "the inputs have 1 leaves, had 2"),
        ((X,), [X], "the inputs have 1 leaves, had 1"),
        (None, X, "input [0] is None, was [2, 3] float32"),
    ],
)
def test_another_graph(one: Any, other: Any, said: str) -> None:
    assert signature(one) != signature(other)
    assert signature(one).difference(signature(other)) == said


def test_autocast_counts() -> None:
    plain = signature(X)
    with torch.autocast("cpu", torch.bfloat16):
        cast = signature(X)
    assert plain != cast
    assert cast.difference(plain) == "autocast is torch.bfloat16, was off"
    assert "autocast" in str(cast)


def test_a_tensor_elsewhere_is_refused() -> None:
    with pytest.raises(ValueError, match=r"test: input \[0\]\['t'\] is on cpu, .* move it to meta"):
        flatten("test", ({"t": X},), torch.device("meta"))


def test_what_is_neither_tensor_nor_constant_is_refused() -> None:
    with pytest.raises(TypeError, match=r"test: input \[0\]\[0\] is a object; pass tensors"):
        flatten("test", ([object()],), CPU)


def test_tensors_are_put_back_where_they_were() -> None:
    inputs = ({"a": X, "b": [None, X + 1]}, "name")
    flat = flatten("test", inputs, CPU)
    again = flat.with_tensors([value + 10 for value in flat.tensors])
    assert torch.equal(again[0]["a"], X + 10)
    assert torch.equal(again[0]["b"][1], X + 11)
    assert again[0]["b"][0] is None
    assert again[1] == "name"


def test_copies_are_copies() -> None:
    tree = {"a": X, "b": (X, 3)}
    copied = clone_tensors(tree)
    assert copied["b"][1] == 3
    for tensor in tensors_of(copied):
        assert torch.equal(tensor, X)
        assert tensor.data_ptr() != X.data_ptr()


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (torch.tensor([math.nan]), torch.tensor([math.nan]), True),
        (torch.tensor([0.0]), torch.tensor([-0.0]), False),
        (torch.zeros(2), torch.zeros(1), False),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int32), False),
        (torch.arange(6).view(2, 3).t(), torch.arange(6).view(2, 3).t().contiguous(), True),
    ],
)
def test_bits(one: Tensor, other: Tensor, same: bool) -> None:
    assert same_bits(one, other) is same


def test_known_errors_say_what_to_do() -> None:
    raw = RuntimeError("CUDA error: operation not permitted when stream is capturing\nmore")
    told = explained(raw)
    assert isinstance(told, UlyssesError)
    assert "synchronises with the host" in str(told)
    assert str(told).endswith("operation not permitted when stream is capturing)")
    other = ValueError("something else")
    assert explained(other) is other
