"""GPU memory that something takes, as the caching allocator counts it."""

from __future__ import annotations

import torch


def allocated_bytes(device: torch.device) -> int:
    """Bytes in use now; 0 on the CPU."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def reset_peak(device: torch.device) -> int:
    """Begin to look for a peak, and return the bytes in use now."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    return allocated_bytes(device)


def peak_bytes(device: torch.device, before: int, buffers: int = 0) -> int | None:
    """The peak since ``reset_peak`` above ``before``, and ``buffers``; ``None`` on the CPU."""
    if device.type != "cuda":
        return None
    return buffers + torch.cuda.max_memory_allocated(device) - before
