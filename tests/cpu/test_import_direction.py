"""Modules import only from their left, and what is fragile has one home."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# From left to right. A module imports only from its left.
ORDER = (
    "errors",
    "kinds",
    "turn",
    "_native",
    "facts",
    "asking",
    "host",
    "nvml",
    "topology",
    "grouping",
    "obstacles",
    "suggestions",
    "mesh",
    "eligibility",
    "agreement",
    "plan",
    "heads",
    "joint",
    "reference",
    "mapping",
    "copy_engine",
    "lifetime",
    "post_mortem",
    "arguments",
    "communicator",
    "names",
    "window_spec",
    "windows",
    "all_to_all",
    "collective",
    "exchange",
    "functional",
    "ops",
    "operators",
    "debug_exchange",
    "weight_shards",
    "topk",
    "indexer",
    "latent",
    "row_slots",
    "sequence_cache",
    "cached_attention",
    "branches",
    "mixed_attention",
    "norm_rope_checks",
    "part_norm_rope",
    "norm_rope",
    "progress",
    "qkv_projection",
    "values_first",
    "attention",
    "ring",
    "usp",
    "joint_attention",
    "from_deepspeed",
    "from_yunchang",
    "from_xdit",
    "diffusers_attention",
    "diffusers_processors",
    "diffusers_plans",
    "diffusers_models",
    "constants",
    "workload",
    "sequence_plan",
    "parallelism",
    "schedule",
    "forecast",
    "planner",
    "peers_first",
    "projections",
    "fused_projection",
    "packed_projection",
    "first_stage",
    "layer_checks",
    "layer",
    "__init__",
    "graphs",
    "tools",
)
PLACE = {module: place for place, module in enumerate(ORDER)}
# Narrower than its place in the order: a reference shares no code with what it checks.
ONLY_FROM = {"reference": {"plan"}}
# Import name -> the one module that may use it.
HOMES = {
    "pynvml": "nvml",
    "torch.distributed._symmetric_memory": "mapping",
    "torch._C._distributed_c10d._SymmetricMemory": "mapping",
}


def module_of(path: Path) -> str:
    """The name by which ORDER knows a file: its package for graphs and tools, else its stem."""
    folder = path.relative_to(ROOT).parts[0]
    return folder if folder in ("graphs", "tools") else path.stem


def source_files() -> list[Path]:
    return sorted(
        path
        for folder in ("ulysses_ops", "graphs", "tools")
        for path in (ROOT / folder).glob("**/*.py")
        if not any(parent.is_symlink() for parent in path.parents)
    )


def imported_names(tree: ast.AST, package: str) -> Iterator[str]:
    """Every dotted name that is imported or reached through an imported package, made absolute."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")[: len(package.split(".")) + 1 - node.level]
            base = ".".join([*(parts if node.level else []), *filter(None, [node.module])])
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute):
            yield ast.unparse(node)


def siblings_imported(source: str, package: str) -> set[str]:
    """The modules of ulysses_ops that a source text imports, by their names in ORDER."""
    found = set()
    for name in imported_names(ast.parse(source), package):
        root, _, rest = name.partition(".")
        if root in ("graphs", "tools"):
            found.add(root)
        elif root == "ulysses_ops":
            head = rest.partition(".")[0]
            found.add(head if head in PLACE else "__init__")
    return found


def breaches(module: str, source: str) -> list[str]:
    """What is wrong with the imports of one module, as sentences."""
    package = f"ulysses_ops.{module}" if module in ("graphs", "tools") else "ulysses_ops"
    imported = siblings_imported(source, package)
    if module in ("graphs", "tools"):
        imported.discard(module)
    allowed = ONLY_FROM.get(module)
    return [
        f"{module} imports {other}"
        for other in sorted(imported)
        if PLACE[other] >= PLACE[module] or (allowed is not None and other not in allowed)
    ]


def strays(module: str, source: str) -> list[str]:
    """Uses, outside their home, of the names in HOMES."""
    names = set(imported_names(ast.parse(source), "ulysses_ops"))
    return [
        f"{module} uses {name}, whose home is {home}"
        for name, home in HOMES.items()
        if module != home and any(f"{used}.".startswith(f"{name}.") for used in names)
    ]


@pytest.mark.parametrize("path", source_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_module_imports_from_its_left_alone(path: Path) -> None:
    module = module_of(path)
    assert module in PLACE, f"{path.name} has no place in the order: give it one in ORDER"
    assert breaches(module, path.read_text()) == []
    assert strays(module, path.read_text()) == []


def test_order_lists_no_module_that_is_gone() -> None:
    assert {module_of(path) for path in source_files()} == set(ORDER)


@pytest.mark.parametrize(
    ("module", "source", "expected"),
    [
        ("plan", "from ulysses_ops.windows import reserve", ["plan imports windows"]),
        ("plan", "from .windows import reserve", ["plan imports windows"]),
        ("plan", "from . import windows", ["plan imports windows"]),
        ("plan", "from ulysses_ops import windows, errors", ["plan imports windows"]),
        ("plan", "import ulysses_ops.windows as w", ["plan imports windows"]),
        ("plan", "from ulysses_ops import scatter", ["plan imports __init__"]),
        ("plan", "def f():\n    from ulysses_ops import ops", ["plan imports ops"]),
        ("plan", "if TYPE_CHECKING:\n    from .ops import x", ["plan imports ops"]),
        ("copy_engine", "from .collective import x", ["copy_engine imports collective"]),
        ("attention", "from ulysses_ops.graphs import x", ["attention imports graphs"]),
        ("attention", "from graphs import capture_step", ["attention imports graphs"]),
        ("graphs", "from ulysses_ops.tools.tables import x", ["graphs imports tools"]),
        ("reference", "from ulysses_ops.errors import x", ["reference imports errors"]),
        ("graphs", "from .capture import x\nfrom ulysses_ops import scatter", []),
        ("ops", "import torch\nfrom .plan import x\nfrom .collective import y", []),
    ],
)
def test_the_check_sees_a_wrong_direction(module: str, source: str, expected: list[str]) -> None:
    assert breaches(module, source) == expected


@pytest.mark.parametrize(
    "source",
    [
        "import pynvml",
        "def f():\n    from pynvml import nvmlInit",
        "import torch.distributed._symmetric_memory as symm_mem",
        "from torch.distributed import _symmetric_memory",
        "import torch\ntorch.distributed._symmetric_memory.empty(1)",
        "from torch._C._distributed_c10d import _SymmetricMemory",
    ],
)
def test_the_check_sees_a_stray_use(source: str) -> None:
    assert len(strays("windows", source)) == 1
    assert strays("windows", "import torch\nimport pynvml_stand_in") == []
