"""Other libraries for the same exchange, where they are installed; nothing of them is required."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ulysses_ops.tools.launch import RankContext
from ulysses_ops.tools.shapes import Shape


@dataclass(frozen=True)
class Site:
    """Where a library is to exchange, and what."""

    shape: Shape
    context: RankContext
    dtype: torch.dtype


@dataclass(frozen=True)
class Rival:
    """A library that has been opened for one shape.

    Attributes:
        scatter: ``(x, place)``, ``(B, S_local, H, D) -> (B, S_global, H_local, D)``; results of
            different places are valid together.
        gather: Its inverse, ``(B, S_global, H_local, D) -> (B, S_local, H, D)``.
        close: Gives back what was opened. Collective.
    """

    scatter: Callable[[Tensor, int], Tensor]
    gather: Callable[[Tensor], Tensor]
    close: Callable[[], Any]


def missing(module: str, device: torch.device) -> str:
    """Why a library cannot run on such a device; empty where only trying can tell."""
    if device.type != "cuda":
        return "needs GPUs"
    return "" if importlib.util.find_spec(module) else f"{module} is not installed"


def why_no_all_to_all_nd(device: torch.device) -> str:
    """Why torch's permute-free all-to-all is no variant."""
    if device.type != "cuda":
        return "needs GPUs"
    if not hasattr(torch.ops.symm_mem, "nccl_all_to_all_nd"):
        return f"torch {torch.__version__} has none"
    return (
        "needs NCCL as the one provider of symmetric memory of the process, where the windows of "
        "the same run are of another"
    )


def _outputs(site: Site) -> tuple[list[Tensor], Tensor]:
    def empty(shape: tuple[int, ...]) -> Tensor:
        return torch.empty(shape, dtype=site.dtype, device=site.context.device)

    world_size = site.context.world_size
    windows = [empty(site.shape.local_window(world_size)) for _ in range(3)]
    return windows, empty(site.shape.local_source(world_size))


def open_flashinfer(site: Site) -> Rival:
    """FlashInfer's NVLink kernel, into outputs allocated once. Collective."""
    comm = importlib.import_module("flashinfer.comm")
    local = torch.Size(site.shape.local_source(site.context.world_size))
    communicator = comm.UlyssesCommunicator(
        max_bytes=local.numel() * site.dtype.itemsize, dtype=site.dtype, backend="nvlink"
    )
    windows, out = _outputs(site)
    return Rival(
        lambda x, place: communicator.scatter_heads(x, out=windows[place]),
        lambda x: communicator.gather_heads(x.contiguous(), out=out),
        communicator.close,
    )


def open_fast_ulysses(site: Site) -> Rival:
    """fast_ulysses, whose copy engines write into outputs of its own. Collective."""
    group = importlib.import_module("fast_ulysses").UlyssesGroup(device=site.context.device)
    (window, _, _), local = _outputs(site)
    windows = [group.empty_output(local, mode=0) for _ in range(3)]
    out = group.empty_output(window, mode=1)
    return Rival(
        lambda x, place: group.all_to_all_4d(x, mode=0, out=windows[place]),
        lambda x: group.all_to_all_4d(x, mode=1, out=out),
        group.destroy,
    )
