"""The compiled libraries: loaded once, or the reason why not."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

# The CUDA library is built against one major version of the runtime, which torch has loaded.
CUDA_MAJOR = "13"


@dataclass(frozen=True)
class NativeLibraries:
    """What could be loaded.

    Attributes:
        plan: Whether ``_C`` (layout arithmetic) is loaded.
        plan_reason: Why not; empty when it is.
        cuda: Whether ``_C_cuda`` (the copy-engine transport) is loaded.
        cuda_reason: Why not; empty when it is.
    """

    plan: bool
    plan_reason: str
    cuda: bool
    cuda_reason: str


def _load(path: Path) -> str:
    """Load one library and return why that failed, or an empty string."""
    if not path.exists():
        return f"{path.name} was not built; reinstall ulysses-ops where its compiler is found"
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        return f"{path.name} cannot be loaded: {error}"
    return ""


def load() -> NativeLibraries:
    """Load both libraries from the package's folder. Creates no CUDA context."""
    folder = Path(__file__).resolve().parent
    plan_reason = _load(folder / "_C.so")
    version = torch.version.cuda
    if version is None:
        cuda_reason = "this build of torch has no CUDA"
    elif version.split(".")[0] != CUDA_MAJOR:
        cuda_reason = f"torch uses CUDA {version}, _C_cuda.so needs CUDA {CUDA_MAJOR}.x"
    else:
        cuda_reason = _load(folder / "_C_cuda.so")
    return NativeLibraries(
        plan=not plan_reason,
        plan_reason=plan_reason,
        cuda=not cuda_reason,
        cuda_reason=cuda_reason,
    )


NATIVE = load()
