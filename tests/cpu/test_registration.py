"""What torch knows of the operators: schemas, tags, one kernel each, and what opcheck says."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_pool import RankPool
from torch import Tensor
from torch.library import opcheck
from torch.testing._internal.optests import OpCheckError
from whole_tensors import layout_of, numbered

import ulysses_ops
from ulysses_ops import UlyssesCommunicator, WindowSpec, reserve
from ulysses_ops.collective import CollectiveRounds
from ulysses_ops.plan import Direction
from ulysses_ops.reference import shard_of
from ulysses_ops.windows import Window

FUNCTIONAL = (
    "Tensor x, int world_size, str group_name, SymInt[]? seq_splits=None, int[]? head_splits=None"
)
INTO = "Tensor x, Tensor(a!) window, Tensor(b!) token, int world_size, str group_name, int? peer"
COMPLETE = "Tensor(a!)[] windows, Tensor[] sources, Tensor(b!) token, int world_size"
NORM_ROPE = (
    "Tensor? q_weight=None, Tensor? k_weight=None, Tensor? q_bias=None, Tensor? k_bias=None, "
    'Tensor? cos=None, Tensor? sin=None, str norm="per_head", str rope="interleaved", '
    "float eps=9.9999999999999995e-07"
)
SCHEMAS = {
    "scatter": f"({FUNCTIONAL}, int[]? head_starts=None) -> Tensor",
    "gather": f"({FUNCTIONAL}, SymInt[]? seq_starts=None) -> Tensor",
    "all_gather": (
        "(Tensor x, int world_size, str group_name, SymInt[]? seq_splits=None) -> Tensor"
    ),
    "scatter_into": f"({INTO}=None) -> ()",
    "gather_into": f"({INTO}=None) -> ()",
    "all_gather_into": f"({INTO}=None) -> ()",
    "complete": f"({COMPLETE}, str group_name) -> ()",
    "qk_norm_rope": f"(Tensor q, Tensor k, {NORM_ROPE}) -> (Tensor, Tensor)",
    "qk_norm_rope_into": (
        f"(Tensor[] q, Tensor[] k, Tensor(a!)[] q_out, Tensor(b!)[] k_out, {NORM_ROPE}) -> ()"
    ),
    "project_qkv_into": (
        "(Tensor x, Tensor qkv_weight, Tensor? qkv_bias, Tensor(a!)[] q_out, Tensor(b!)[] k_out, "
        "Tensor(c!)[] v_out, Tensor? q_weight=None, Tensor? k_weight=None, Tensor? cos=None, "
        'Tensor? sin=None, str norm="per_head", str rope="interleaved", '
        "float eps=9.9999999999999995e-07) -> ()"
    ),
}
DEFERRED = ("scatter_into", "gather_into", "all_gather_into", "complete")
MUTATED = {
    "scatter_into": ["window", "token"],
    "gather_into": ["window", "token"],
    "all_gather_into": ["window", "token"],
    "complete": ["windows", "token"],
    "qk_norm_rope_into": ["q_out", "k_out"],
    "project_qkv_into": ["q_out", "k_out", "v_out"],
}


def overload(name: str) -> Any:
    return getattr(torch.ops.ulysses, name).default


def registered_names() -> list[str]:
    names = torch._C._dispatch_get_all_op_names()
    return [name.partition("::")[2] for name in names if name.startswith("ulysses::")]


def registrations(qualified_name: str) -> list[str]:
    """Dispatch keys that have a kernel, from torch's own list; shadowed kernels say so."""
    dump: str = torch._C._dispatch_dump(qualified_name)
    return re.findall(r"^([\w\[\]]+(?: \(inactive\))?): registered at", dump, flags=re.MULTILINE)


# ---- schemas, tags, kernels ----------------------------------------------------------------------


@pytest.mark.parametrize("name", SCHEMAS)
def test_schema(name: str) -> None:
    assert str(overload(name)._schema) == f"ulysses::{name}{SCHEMAS[name]}"


def test_the_public_operators_are_these_and_all_others_have_an_underscore() -> None:
    public = {name for name in registered_names() if not name.startswith("_")}
    assert public == set(SCHEMAS)


@pytest.mark.parametrize("name", SCHEMAS)
def test_tags_and_mutability(name: str) -> None:
    tags, schema = overload(name).tags, overload(name)._schema
    assert (torch.Tag.flexible_layout in tags) == (name in DEFERRED)
    assert (torch.Tag.pt2_compliant_tag in tags) == (name not in DEFERRED)
    mutated = [arg.name for arg in schema.arguments if arg.alias_info and arg.alias_info.is_write]
    assert mutated == MUTATED.get(name, [])


@pytest.mark.parametrize("name", SCHEMAS)
def test_one_kernel_for_each_device_and_a_fake(name: str) -> None:
    keys = registrations(f"ulysses::{name}")
    for key in ("CPU", "CUDA", "Meta"):
        assert keys.count(key) == 1, keys
    assert (name in MUTATED) == ("Autograd[alias]" not in keys)


def test_nothing_is_registered_twice() -> None:
    by_name = {name: registrations(f"ulysses::{name}") for name in registered_names()}
    assert by_name.keys() >= SCHEMAS.keys()
    assert [name for name, keys in by_name.items() if any("inactive" in key for key in keys)] == []


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
def test_the_check_sees_a_second_registration() -> None:
    """Torch itself says nothing that a test could catch: it warns once and goes on."""
    first = torch.library.Library("ulysses_twice", "FRAGMENT")
    first.define("f(Tensor x) -> Tensor")
    first.impl("f", lambda x: x + 1, "CPU")
    assert "CPU (inactive)" not in registrations("ulysses_twice::f")
    second = torch.library.Library("ulysses_twice", "FRAGMENT")
    second.impl("f", lambda x: x + 2, "CPU", allow_override=True)
    assert "CPU (inactive)" in registrations("ulysses_twice::f")


def test_the_plan_library_registers_private_operators_alone() -> None:
    """``_C`` loaded with nothing of ours around it."""
    library = Path(ulysses_ops.__file__).parent / "_C.so"
    script = (
        "import torch\n"
        f"torch.ops.load_library({str(library)!r})\n"
        "print(*(n for n in torch._C._dispatch_get_all_op_names() if n.startswith('ulysses')))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["ulysses::_plan_copies"]


# ---- opcheck: functional operators ---------------------------------------------------------------


def inputs(permuted: bool, batch: int, rows: int, requires_grad: bool) -> Tensor:
    shape = (batch, 4, rows, 8) if permuted else (batch, rows, 4, 8)
    x = torch.randn(shape)
    return (x.transpose(1, 2) if permuted else x).requires_grad_(requires_grad)


@pytest.fixture
def alone() -> Iterator[UlyssesCommunicator]:
    with UlyssesCommunicator(device="cpu") as comm:
        yield comm


@pytest.mark.parametrize("direction", ["scatter", "gather"])
@pytest.mark.parametrize("permuted", [False, True])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("rows", [1, 7])
def test_opcheck_of_functional_operators(
    alone: UlyssesCommunicator, direction: str, permuted: bool, batch: int, rows: int
) -> None:
    opcheck(overload(direction), (inputs(permuted, batch, rows, False), 1, alone.name))
    x = inputs(permuted, batch, rows, True)
    opcheck(overload(direction), (x, 1, alone.name, [rows], [4]))


@pytest.mark.parametrize("permuted", [False, True])
@pytest.mark.parametrize(("batch", "rows"), [(1, 1), (2, 7)])
def test_opcheck_of_all_gather(
    alone: UlyssesCommunicator, permuted: bool, batch: int, rows: int
) -> None:
    opcheck(overload("all_gather"), (inputs(permuted, batch, rows, False), 1, alone.name))
    x = inputs(permuted, batch, rows, True)
    opcheck(overload("all_gather"), (x, 1, alone.name, [rows]))


def opcheck_all_gather(rank: int, world_size: int) -> None:
    with UlyssesCommunicator(timeout_s=10) as comm:
        for splits in (None, (1, 7), (0, 3)):
            for requires_grad in (False, True):
                rows = 4 if splits is None else splits[rank]
                x = numbered(2, rows, 3, 5).requires_grad_(requires_grad)
                opcheck(overload("all_gather"), (x, world_size, comm.name, splits))


def test_opcheck_of_all_gather_between_ranks(ranks: Any) -> None:
    pool: RankPool = ranks(2)
    pool.run(opcheck_all_gather, timeout_s=60)


def opcheck_between_ranks(rank: int, world_size: int, direction: Direction) -> None:
    with UlyssesCommunicator(timeout_s=10) as comm:
        for splits in ((None, None), ((1, 7), None), ((3, 5), (1, 3))):
            whole = numbered(2, 8, 4, 3)
            layout = layout_of(direction, whole, world_size, *splits)
            for requires_grad in (False, True):
                x = shard_of(whole, layout, rank).requires_grad_(requires_grad)
                opcheck(overload(direction), (x, world_size, comm.name, *splits))
        for requires_grad in (False, True):
            x = numbered(2, (3, 5)[rank] if direction == "scatter" else 8, 4, 3)
            x = x.requires_grad_(requires_grad)
            # Ranges that overlap, and for rank 1 one that ends before the last.
            rows, heads = ((3, 5), (3, 2)) if direction == "scatter" else ((5, 4), (4, 4))
            opcheck(overload(direction), (x, world_size, comm.name, rows, heads, (0, 1)))


@pytest.mark.parametrize("direction", ["scatter", "gather"])
def test_opcheck_between_ranks_with_uneven_splits(ranks: Any, direction: Direction) -> None:
    pool: RankPool = ranks(2)
    pool.run(opcheck_between_ranks, direction, timeout_s=60)


# ---- opcheck: deferred operators -----------------------------------------------------------------


def accept_copies(monkeypatch: pytest.MonkeyPatch, window: Window) -> None:
    """Take any tensor for the window: opcheck hands clones to an operator, which ours refuse.

    What is sent is written at once, so that a round is never left open.
    """

    def window_of(comm: UlyssesCommunicator, tensor: Tensor, op: str) -> Window:
        return replace(window, tensor=tensor)

    def send(rounds: CollectiveRounds, op: str, x: Tensor, window: Window, peer: Any) -> None:
        window.tensor.copy_(x)

    def complete(rounds: CollectiveRounds, comm: Any, windows: Any, sources: Any) -> None:
        for window, source in zip(windows, sources, strict=True):
            window.tensor.copy_(source * 2)

    monkeypatch.setattr(ulysses_ops.ops, "window_of", window_of)
    monkeypatch.setattr(CollectiveRounds, "send", send)
    monkeypatch.setattr(CollectiveRounds, "complete", complete)


@pytest.mark.parametrize("name", DEFERRED)
@pytest.mark.parametrize("permuted", [False, True])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("rows", [1, 7])
def test_opcheck_of_deferred_operators(
    monkeypatch: pytest.MonkeyPatch,
    alone: UlyssesCommunicator,
    name: str,
    permuted: bool,
    batch: int,
    rows: int,
) -> None:
    direction: Direction = "gather" if name == "gather_into" else "scatter"
    spec = WindowSpec("w", direction, (batch, rows, 4, 8), torch.float32)
    (window,) = reserve(alone, [spec])
    x = inputs(permuted, batch, rows, False)
    after = (alone.token, 1, alone.name)
    accept_copies(monkeypatch, window)
    if name == "complete":
        opcheck(overload(name), ([window.tensor], [x], *after))
    else:
        opcheck(overload(name), (x, window.tensor, *after))
        opcheck(overload(name), (x, window.tensor, *after, 0))


def test_opcheck_sees_a_mutation_that_the_schema_hides() -> None:
    def put(x: Tensor, window: Tensor) -> None:
        window.copy_(x)

    library = torch.library.Library("ulysses_hidden", "FRAGMENT")
    library.define("put(Tensor x, Tensor window) -> ()")
    library.impl("put", put, "CPU")
    torch.library.register_fake("ulysses_hidden::put", lambda x, window: None, lib=library)
    with pytest.raises(OpCheckError, match="window is not defined as mutable but was mutated"):
        opcheck(torch.ops.ulysses_hidden.put.default, (torch.ones(2), torch.zeros(2)))
