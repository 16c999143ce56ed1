"""What the built libraries ask of the machine that loads them: the stable ABI, and no paths."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def folder_of(package: str) -> Path:
    """Where a package is installed, found without importing it."""
    spec = importlib.util.find_spec(package)
    assert spec is not None, package
    assert spec.submodule_search_locations is not None, package
    return Path(next(iter(spec.submodule_search_locations)))


LIBTORCH_PYTHON = folder_of("torch") / "lib" / "libtorch_python.so"

# Demangled: torch's C++ interface, which changes from one release to the next, and CPython's.
UNSTABLE = re.compile(r"\b(?:c10|at|torch|caffe2)::|^_?Py[A-Z_]")
# libc, libstdc++, libgcc and the CUDA runtime version their symbols; torch's C interface does not.
STABLE = re.compile(
    r"@(?:GLIBC|GLIBCXX|CXXABI|GCC|libcudart\.so\.)[\w.]+$|^(?:aoti_torch|torch)_\w+$"
)
SOURCE_PATH = re.compile(rb"(?<![\w.+-])(?:/[\w.+-]+)+/[\w.+-]+\.(?:cpp|cc|cuh?|hpp?)\b")

# With a C++ runtime of its own inside, a library crashes when an exception leaves it.
BASE = {"libtorch_cpu.so", "libc10.so", "libstdc++.so.6"}
SYSTEM = {"libm.so.6", "libgcc_s.so.1", "libc.so.6", "ld-linux-x86-64.so.2"}
NEEDED = {
    "_C": BASE,
    "_C_cuda": BASE | {"libtorch_cuda.so", "libcudart.so.13"},
    "_C_kernels": BASE | {"libtorch_cuda.so", "libcudart.so.13"},
    "_C_projection": BASE | {"libtorch_cuda.so", "libcudart.so.13"},
}


def nvcc_release() -> tuple[int, ...]:
    """The release of nvcc, as the build looks for it; empty when there is none."""
    nvcc = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    if nvcc is None:
        return ()
    text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    return tuple(int(part) for part in re.findall(r"release (\d+)\.(\d+)", text)[0])


def output_of(*command: str | Path) -> str:
    if shutil.which(str(command[0])) is None:
        pytest.skip(f"{command[0]} is not installed")
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def undefined_symbols(library: Path, *options: str) -> list[tuple[str, str]]:
    """(kind, name) of every symbol the library takes from elsewhere: U, or w and v for weak."""
    listing = output_of("nm", "-D", "--undefined-only", *options, library)
    return [
        (kind, name) for kind, name in (line.split(maxsplit=1) for line in listing.splitlines())
    ]


def unstable_symbols(library: Path) -> list[str]:
    return [name for _, name in undefined_symbols(library, "-C") if UNSTABLE.search(name)]


def unexplained_symbols(library: Path) -> list[str]:
    return [
        name for kind, name in undefined_symbols(library) if kind == "U" and not STABLE.search(name)
    ]


def dynamic_entries(library: Path, tag: str) -> list[str]:
    return re.findall(rf"\({tag}\).*\[(.*)\]", output_of("readelf", "-dW", library))


def run_paths(library: Path) -> list[str]:
    return dynamic_entries(library, "RPATH") + dynamic_entries(library, "RUNPATH")


def absolute_source_paths(content: bytes) -> list[bytes]:
    return SOURCE_PATH.findall(content)


@pytest.fixture(params=list(NEEDED))
def library(request: pytest.FixtureRequest) -> Path:
    path = folder_of("ulysses_ops") / f"{request.param}.so"
    if request.param != "_C" and not path.exists() and nvcc_release() < (13,):
        pytest.skip(f"no nvcc of CUDA 13 or later: {request.param} is not built here")
    needs_cutlass = request.param in ("_C_kernels", "_C_projection")
    if needs_cutlass and importlib.util.find_spec("cutlass_library") is None:
        pytest.skip(f"no headers of CUTLASS: {request.param} is not built here")
    assert path.exists(), f"{path.name} was not built: run make build"
    return path


def test_takes_only_stable_symbols(library: Path) -> None:
    assert unstable_symbols(library) == []
    assert unexplained_symbols(library) == []


def test_the_check_sees_unstable_symbols() -> None:
    found = unstable_symbols(LIBTORCH_PYTHON)
    for start in ("c10::", "at::", "Py"):
        assert any(name.startswith(start) for name in found), start
    unexplained = unexplained_symbols(LIBTORCH_PYTHON)
    assert any("c10" in name for name in unexplained)
    assert any(name.startswith("Py") for name in unexplained)


def test_is_built_against_torchs_c_interface(library: Path) -> None:
    assert "aoti_torch_library_init_impl" in {name for _, name in undefined_symbols(library)}


def test_needs_these_libraries_and_no_path_to_them(library: Path) -> None:
    needed = set(dynamic_entries(library, "NEEDED"))
    assert needed >= NEEDED[library.stem]
    assert needed <= NEEDED[library.stem] | SYSTEM
    assert run_paths(library) == []


def test_the_check_sees_a_run_path() -> None:
    assert run_paths(LIBTORCH_PYTHON) != []


def test_messages_carry_no_path_of_the_build_machine(library: Path) -> None:
    content = library.read_bytes()
    assert absolute_source_paths(content) == []
    assert str(ROOT).encode() not in content
    assert b"csrc/" in content  # messages do name the source, from the top of the project


def test_the_check_sees_a_path() -> None:
    assert absolute_source_paths(b"\0/build/csrc/plan.cpp\0csrc/plan.cpp\0") == [
        b"/build/csrc/plan.cpp"
    ]
    assert absolute_source_paths(b"\0csrc/cuda/a.cu\0torch/csrc/stable/library.h\0") == []
