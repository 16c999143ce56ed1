"""docs/api.md: the public API, from its docstrings: ``python -m ulysses_ops.tools.api_page``.

Signatures are read from the source, so the page is the same under every Python and torch.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

PAGE = Path("docs/api.md")
HEAD = """# API

Made from the docstrings by `python -m ulysses_ops.tools.api_page`. Names without a module are in
`ulysses_ops`.
"""
# Title -> module -> names; the package itself first.
SECTIONS: dict[str, dict[str, tuple[str, ...]]] = {
    "Attention": {
        "attention": ("ulysses_attention", "reserve_attention", "sdpa"),
        "values_first": ("AttentionWindows",),
        "joint": ("JointSequence", "text_comes_first"),
        "joint_attention": ("ulysses_joint_attention", "attend_as_computed", "replicate_rows"),
        "layer": ("UlyssesAttention",),
        "schedule": ("Schedule",),
        "part_norm_rope": ("NormRope",),
        "norm_rope": ("qk_norm_rope", "qk_norm_rope_into"),
        "qkv_projection": ("project_qkv_into",),
    },
    "Communicator": {
        "communicator": ("UlyssesCommunicator",),
        "names": ("shared_communicator",),
    },
    "Exchanges": {
        "ops": ("scatter", "gather", "all_gather"),
        "exchange": ("Exchange",),
        "windows": ("reserve", "Window"),
        "window_spec": ("WindowSpec",),
        "plan": ("even_splits",),
    },
    "Language models": {
        "mixed_attention": ("mixed_attention",),
        "latent": (
            "LatentHeads",
            "attend_latent",
            "attend_selected",
            "partial_attention",
            "merge_partials",
        ),
        "topk": ("distributed_topk", "top_rows"),
        "indexer": ("index_scores", "select_rows", "select_sharded_rows"),
        "sequence_cache": ("SequenceCache",),
        "cached_attention": ("attend_cached", "attend_cached_rows"),
        "weight_shards": ("WeightShards",),
        "workload": ("ModelShape", "Workload"),
        "sequence_plan": ("plan_sequences", "SequencePlan", "data_parallel"),
        "parallelism": ("choose_parallelism", "Choice"),
        "mesh": ("order_ranks", "build_mesh"),
        "debug_exchange": ("debug_exchange", "ExchangeReport"),
    },
    "Several hosts": {
        "usp": ("UspAttention", "host_mesh"),
        "ring": ("RingAttention", "attend_with_lse", "merged"),
    },
    "Graphs": {"graphs": ("capture_step", "CapturedStep", "GraphCache", "Bucket")},
    "Models and other packages": {
        "diffusers_models": ("parallelize", "ParallelModel"),
        "from_deepspeed": ("DistributedAttention",),
        "from_yunchang": ("SeqAllToAll4D", "UlyssesAttention"),
        "from_xdit": ("xFuserLongContextAttention",),
    },
    "Errors": {
        "errors": ("UlyssesError", "AgreementError", "TopologyError", "PeerTimeoutError"),
    },
}


def page() -> str:
    """The whole page."""
    lines = [HEAD]
    public = set(import_module("ulysses_ops").__all__)
    for title, modules in SECTIONS.items():
        lines.append(f"## {title}\n")
        for module, names in modules.items():
            for name in names:
                found = getattr(import_module(f"ulysses_ops.{module}"), name)
                is_plain = name in public and not module.startswith("from_")
                lines += entry(found, name if is_plain else f"{module}.{name}")
    return "\n".join(lines).rstrip() + "\n"


def entry(found: object, name: str) -> Iterator[str]:
    """One function or class with its public methods."""
    node = _definition(found)
    yield f"### `{name}`\n"
    if isinstance(node, ast.ClassDef):
        yield from _class(node)
    else:
        yield _signature(node, node.name)
        yield _described(node)


def _class(node: ast.ClassDef) -> Iterator[str]:
    methods = {item.name: item for item in node.body if isinstance(item, ast.FunctionDef)}
    constructor = methods.get("__init__")
    if constructor is not None:
        yield _signature(constructor, node.name)
    # Quotes as the formatter has them, which reads code on pages too.
    fields = [
        ast.unparse(item).replace("'", '"') for item in node.body if isinstance(item, ast.AnnAssign)
    ]
    if constructor is None and fields:
        yield (
            "```text\n"
            f"class {node.name}:\n"
            + "\n".join(f"    {line}" for line in fields if not line.startswith("_"))
            + "\n```\n"
        )
    yield _described(node)
    if constructor is not None:
        yield _described(constructor)
    for name, method in methods.items():
        if name in ("__call__", "forward") or not name.startswith("_"):
            yield f"#### `{node.name}.{name}`\n"
            is_property = any("property" in ast.unparse(d) for d in method.decorator_list)
            if not is_property:
                yield _signature(method, name)
            yield _described(method)


def _definition(found: object) -> ast.FunctionDef | ast.ClassDef:
    source = inspect.cleandoc("\n" + inspect.getsource(found))  # type: ignore[arg-type]
    node = ast.parse(source).body[0]
    assert isinstance(node, ast.FunctionDef | ast.ClassDef)
    return node


def _signature(node: ast.FunctionDef | ast.ClassDef, name: str) -> str:
    assert isinstance(node, ast.FunctionDef)
    taken = ast.arguments(**{field: getattr(node.args, field) for field in node.args._fields})
    taken.args = [argument for argument in taken.args if argument.arg != "self"]
    returned = "" if node.returns is None else f" -> {ast.unparse(node.returns)}"
    if name != node.name:  # a constructor
        returned = ""
    text = f"{name}({ast.unparse(taken)}){returned}"
    return f"```text\n{text}\n```\n"


def _described(node: ast.FunctionDef | ast.ClassDef) -> str:
    """The docstring: its first paragraphs as prose, its sections as they are."""
    text = re.sub(r":\w+:`~?([^`]+)`", r"``\1``", ast.get_docstring(node) or "")
    prose, sections = text, ""
    for title in ("Args:", "Attributes:", "Returns:", "Raises:"):
        place = text.find(f"\n{title}\n")
        if place >= 0 and place < len(prose):
            prose, sections = text[:place], text[place + 1 :]
    prose = prose.strip().replace("``", "`")
    if prose and sections:
        return f"{prose}\n\n```text\n{sections.strip()}\n```\n"
    return f"{prose}\n" if prose else f"```text\n{sections.strip()}\n```\n"


def main() -> None:
    """Write the page; exit status 1 where it was out of date."""
    text = page()
    was_current = PAGE.exists() and PAGE.read_text(encoding="utf-8") == text
    PAGE.write_text(text, encoding="utf-8")
    sys.exit(0 if was_current else 1)


if __name__ == "__main__":
    main()
