"""The compiled libraries: loaded once, or the reason why not."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

# The CUDA libraries are built against one major version of the runtime, which torch has loaded.
CUDA_MAJOR = "13"


@dataclass(frozen=True)
class NativeLibraries:
    """What could be loaded.

    Attributes:
        plan: Whether ``_C`` (layout arithmetic) is loaded.
        plan_reason: Why not; empty when it is.
        cuda: Whether ``_C_cuda`` (the copy-engine transport) is loaded.
        cuda_reason: Why not; empty when it is.
        kernels: Whether ``_C_kernels`` (kernels in CuTe) is loaded.
        kernels_reason: Why not; empty when it is.
        projection: Whether ``_C_projection`` (the fused projection for Hopper) is loaded.
        projection_reason: Why not; empty when it is.
    """

    plan: bool
    plan_reason: str
    cuda: bool
    cuda_reason: str
    kernels: bool = False
    kernels_reason: str = "not asked for"
    projection: bool = False
    projection_reason: str = "not asked for"


def _load(path: Path) -> str:
    """Load one library and return why that failed, or an empty string."""
    if not path.exists():
        return f"{path.name} was not built; reinstall ulysses-ops where its compiler is found"
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        return f"{path.name} cannot be loaded: {error}"
    return ""


def _load_cuda(path: Path) -> str:
    """The same for a library that needs CUDA."""
    version = torch.version.cuda
    if version is None:
        return "this build of torch has no CUDA"
    if version.split(".")[0] != CUDA_MAJOR:
        return f"torch uses CUDA {version}, {path.name} needs CUDA {CUDA_MAJOR}.x"
    return _load(path)


def load() -> NativeLibraries:
    """Load the libraries from the package's folder. Creates no CUDA context."""
    folder = Path(__file__).resolve().parent
    plan_reason = _load(folder / "_C.so")
    cuda_reason = _load_cuda(folder / "_C_cuda.so")
    kernels_reason = _load_cuda(folder / "_C_kernels.so")
    projection_reason = _load_cuda(folder / "_C_projection.so")
    return NativeLibraries(
        plan=not plan_reason,
        plan_reason=plan_reason,
        cuda=not cuda_reason,
        cuda_reason=cuda_reason,
        kernels=not kernels_reason,
        kernels_reason=kernels_reason,
        projection=not projection_reason,
        projection_reason=projection_reason,
    )


NATIVE = load()


def load_kernels(device: torch.device) -> int:
    """Load every compiled kernel onto a GPU, and return how many there are.

    The first launch of a kernel loads it, which can need an idle device: with a wait pending that
    only a peer can end, both would hang. So this comes before the first wait. Does nothing on the
    CPU and for a library that is not loaded, or holds no code for this GPU.
    """
    if device.type != "cuda":
        return 0
    count = 0
    if NATIVE.kernels:
        count += int(torch.ops.ulysses._load_kernels(device.index))
    if NATIVE.projection:
        count += int(torch.ops.ulysses._load_projection(device.index))
    return count
