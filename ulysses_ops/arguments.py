"""Arguments of a communicator: what is refused before the ranks meet, and what is filled in."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from .copy_engine import SIGNAL_KINDS
from .mapping import MAPPING_KINDS


def check_arguments(wanted: dict[str, Any]) -> None:
    """Raise unless every choice is one of those there are.

    Raises:
        ValueError: the first that is not, by name.
    """
    choices: dict[str, tuple[str, ...]] = {
        "transport": ("ce", "nccl", "gloo"),
        "mapping": MAPPING_KINDS,
        "signal": SIGNAL_KINDS,
    }
    for argument, allowed in choices.items():
        value = wanted[argument]
        if value is not None and value not in allowed:
            message = f"{argument}={value!r} must be one of {allowed} or None"
            raise ValueError(message)
    if not isinstance(wanted["max_windows"], int) or wanted["max_windows"] < 1:
        message = f"max_windows={wanted['max_windows']!r} must be a whole number, at least 1"
        raise ValueError(message)
    needs_ce = [name for name in ("mapping", "signal") if wanted[name] is not None]
    if needs_ce and wanted["transport"] not in (None, "ce"):
        message = (
            f"{needs_ce[0]}= goes with transport='ce', not {wanted['transport']!r}; leave it out"
        )
        raise ValueError(message)


def check_timeout(timeout_s: float) -> None:
    """Checked before the first meeting, which it limits."""
    if not isinstance(timeout_s, int | float) or not 0 < timeout_s < float("inf"):
        message = (
            f"UlyssesCommunicator: timeout_s={timeout_s!r} must be a number of seconds above 0"
        )
        raise ValueError(message)


def resolve_device(device: torch.device | str | None) -> torch.device:
    """The device with its index; the current CUDA device, or the CPU, when left out."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    chosen = torch.device(device)
    if chosen.type == "cuda" and chosen.index is None:
        chosen = torch.device("cuda", torch.cuda.current_device())
    return chosen


def backends_of(group: ProcessGroup | None, device: torch.device) -> tuple[str, ...]:
    """What the process group can move tensors of this device with."""
    if group is None:
        return ()
    config = dist.get_backend_config(group)
    pairs = (entry.split(":") for entry in config.split(","))
    return tuple(backend for kind, backend in pairs if kind == device.type)
