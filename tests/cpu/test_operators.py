"""The types of the operators are those of their schemas."""

from __future__ import annotations

import inspect
import typing

import pytest
import torch
from torch import Tensor

from ulysses_ops import UlyssesCommunicator
from ulysses_ops.operators import Operators, operators
from ulysses_ops.ops import SCHEMAS

TYPES = {
    "Tensor": "Tensor",
    "int": "int",
    "str": "str",
    "List[Tensor]": "list[Tensor]",
    "Optional[List[int]]": "Sequence[int] | None",
    "Optional[int]": "int | None",
}


def declared(name: str) -> list[tuple[str, str, object]]:
    """Name, type and default of each argument of the schema."""
    schema = getattr(torch.ops.ulysses, name).default._schema
    return [
        (argument.name, TYPES[str(argument.type)], argument.default_value)
        for argument in schema.arguments
    ]


@pytest.mark.parametrize("name", SCHEMAS)
def test_types_are_those_of_the_schema(name: str) -> None:
    signature = inspect.signature(getattr(Operators, name))
    parameters = list(signature.parameters.values())[1:]
    typed = [
        (p.name, str(p.annotation), None if p.default is inspect.Parameter.empty else p.default)
        for p in parameters
    ]
    assert typed == declared(name)
    returns = getattr(torch.ops.ulysses, name).default._schema.returns
    assert signature.return_annotation == ("Tensor" if returns else "None")


def test_every_operator_has_types_and_is_itself() -> None:
    typed = {name for name in vars(Operators) if not name.startswith("_")}
    assert typed == set(SCHEMAS)
    assert operators is typing.cast("Operators", torch.ops.ulysses)
    with UlyssesCommunicator(device="cpu") as comm:
        x: Tensor = torch.arange(16.0).view(1, 2, 2, 4)
        y: Tensor = operators.scatter(x, comm.world_size, comm.name)
        assert torch.equal(operators.gather(y, comm.world_size, comm.name), x)
