"""The wheel: built from a copy of the sources, looked at, installed beside nothing else, loaded."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = (
    "CMakeLists.txt",
    "LICENSE",
    "MANIFEST.in",
    "README.md",
    "csrc",
    "graphs",
    "pyproject.toml",
    "setup.py",
    "tools",
    "ulysses_commands.py",
    "ulysses_ops",
)
STARTER = "ulysses_commands.py"  # the one module beside the package
PRESENT = (
    "ulysses_ops/__init__.py",
    "ulysses_ops/constants.json",
    "ulysses_ops/_C.so",
    "ulysses_ops/graphs/__init__.py",
    "ulysses_ops/ops.py",
    "ulysses_ops/py.typed",
    "ulysses_ops/tools/replay_benchmark.py",
    STARTER,
)
OPTIONAL = tuple(f"ulysses_ops/{name}.so" for name in ("_C_cuda", "_C_kernels", "_C_projection"))
# Without a CUDA compiler, and for one architecture: what compiles takes minutes.
BUILDS = {"without CUDA": {"CUDACXX": ""}, "for Hopper": {"TORCH_CUDA_ARCH_LIST": "9.0a"}}
SUFFIXES = {".json", ".py", ".so", ".typed"}
LOAD = """
import sys
sys.path.insert(0, sys.argv[1])
import ulysses_ops, ulysses_ops.graphs, ulysses_ops.tools
from ulysses_ops._native import NATIVE
assert ulysses_ops.__file__.startswith(sys.argv[1]), ulysses_ops.__file__
assert NATIVE.plan, NATIVE
print("loaded")
"""


def complaints(names: list[str], *, optional: Sequence[str] = ()) -> list[str]:
    """What is missing from, or too much in, a wheel with these members."""
    members = [name for name in names if ".dist-info/" not in name]
    required = [*PRESENT, *optional]
    missing = [f"missing: {name}" for name in required if name not in members]
    outside = [
        f"outside the package: {name}"
        for name in members
        if name.split("/")[0] != "ulysses_ops" and name != STARTER
    ]
    unwanted = [f"unwanted: {name}" for name in members if Path(name).suffix not in SUFFIXES]
    return missing + outside + unwanted


@pytest.fixture(
    scope="module",
    params=["without CUDA", pytest.param("for Hopper", marks=pytest.mark.long)],
)
def build(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def wheel(build: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if importlib.util.find_spec("pip") is None:
        pytest.skip("pip is not installed")
    folder = tmp_path_factory.mktemp("wheel")
    copy = folder / "source"
    copy.mkdir()
    ignore = shutil.ignore_patterns("*.so", "__pycache__")
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, symlinks=True, ignore=ignore)
        else:
            shutil.copy2(source, copy / name)
    command = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps"]
    built = subprocess.run(
        [*command, "--no-index", "-w", str(folder), str(copy)],
        capture_output=True,
        text=True,
        env={**os.environ, **BUILDS[build]},
    )
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = folder.glob("*.whl")
    return path


@pytest.mark.slow
def test_one_wheel_serves_every_python(wheel: Path) -> None:
    name, version, *tag = wheel.stem.split("-")
    assert (name, version) == ("ulysses_ops", "0.1.0")
    assert tag == ["py3", "none", f"linux_{platform.machine()}"]


@pytest.mark.slow
def test_wheel_holds_the_package_and_no_sources(wheel: Path, build: str) -> None:
    built_here = [name for name in OPTIONAL if (ROOT / name).exists()]
    optional = built_here if build == "for Hopper" else []
    names = zipfile.ZipFile(wheel).namelist()
    assert complaints(names, optional=optional) == []
    assert [name for name in names if name in OPTIONAL] == optional


@pytest.mark.slow
def test_wheel_loads_from_another_folder(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    loaded = subprocess.run(
        [sys.executable, "-c", LOAD, str(tmp_path)], capture_output=True, text=True, cwd=tmp_path
    )
    assert loaded.stdout == "loaded\n", loaded.stdout + loaded.stderr


def test_the_check_sees_a_wrong_wheel() -> None:
    good = [*PRESENT, "ulysses_ops-0.1.0.dist-info/licenses/LICENSE"]
    assert complaints(good) == []
    assert complaints(good, optional=OPTIONAL) == [f"missing: {name}" for name in OPTIONAL]
    assert complaints(good[1:]) == ["missing: ulysses_ops/__init__.py"]
    assert complaints([*good, "graphs/__init__.py"]) == ["outside the package: graphs/__init__.py"]
    assert complaints([*good, "ulysses_ops/plan.cpp"]) == ["unwanted: ulysses_ops/plan.cpp"]
