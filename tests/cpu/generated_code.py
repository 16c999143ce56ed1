"""What Inductor's generated code does with our operators, read from its text."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import NamedTuple


class Call(NamedTuple):
    """A call of one of our operators in generated code."""

    op: str
    args: list[str]
    line: int


def wrapper_of(codes: Sequence[str], namespace: str) -> ast.FunctionDef:
    """The function that runs one compiled graph, from Inductor's generated code."""
    (source,) = [code for code in codes if f"torch.ops.{namespace}." in code]
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    (wrapper,) = [function for function in functions if function.name == "call"]
    return wrapper


def calls_in(wrapper: ast.FunctionDef, namespace: str) -> list[Call]:
    found = []
    for node in ast.walk(wrapper):
        if isinstance(node, ast.Call):
            path = ast.unparse(node.func).split(".")
            if path[:3] == ["torch", "ops", namespace]:
                found.append(Call(path[3], [ast.unparse(arg) for arg in node.args], node.lineno))
    return sorted(found, key=lambda call: call.line)


def inputs_of(wrapper: ast.FunctionDef) -> set[str]:
    """Names of the graph's inputs: what the wrapper unpacks first."""
    unpack = wrapper.body[0]
    assert isinstance(unpack, ast.Assign)
    (target,) = unpack.targets
    return {ast.unparse(name) for name in ast.walk(target) if isinstance(name, ast.Name)}


def faults(codes: Sequence[str], namespace: str, expected_order: list[str]) -> list[str]:
    """What is wrong with one round of sends and its completion in generated code."""
    wrapper = wrapper_of(codes, namespace)
    calls = calls_in(wrapper, namespace)
    found = []
    if [call.op for call in calls] != expected_order:
        found.append(f"order {[call.op for call in calls]}")
        return found
    *sends, complete = calls
    sources, windows = (f"[{', '.join(send.args[i] for send in sends)}]" for i in (0, 1))
    if complete.args[1] != sources:
        found.append(f"sources sent {sources}, completed {complete.args[1]}")
    if complete.args[0] != windows or not {send.args[1] for send in sends} <= inputs_of(wrapper):
        found.append(f"windows sent {windows}, completed {complete.args[0]}")
    for node in ast.walk(wrapper):
        # A name that is bound again while it is being sent, or a buffer handed on for reuse.
        if isinstance(node, ast.Assign) and sends[0].line <= node.lineno <= complete.line:
            names = {ast.unparse(name) for name in ast.walk(node) if isinstance(name, ast.Name)}
            found += [f"line {ast.unparse(node)}" for send in sends if send.args[0] in names]
    return found
