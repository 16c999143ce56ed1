"""Arguments of a communicator: what is refused before the ranks meet, and what is filled in."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from .copy_engine import SIGNAL_KINDS
from .mapping import MAPPING_KINDS

MAX_TIMEOUT_S = 1e9  # gloo counts nanoseconds in 64 bits: beyond 9.2e9 s it gives up at once


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
    is_number = isinstance(timeout_s, int | float) and not isinstance(timeout_s, bool)
    if not is_number or not 0 < timeout_s <= MAX_TIMEOUT_S:
        message = (
            f"UlyssesCommunicator: timeout_s={timeout_s!r} must be a number of seconds above 0, "
            f"and at most {MAX_TIMEOUT_S:g}"
        )
        raise ValueError(message)


def group_of(given: ProcessGroup | DeviceMesh | None) -> ProcessGroup | None:
    """The ranks that are meant: of a group, of a mesh of one dimension, or of the default group.

    Raises:
        ValueError: the mesh has more dimensions, or this process is not among the ranks.
    """
    if given is None:
        return dist.group.WORLD if dist.is_initialized() else None
    found: object = given
    if isinstance(given, DeviceMesh):
        if given.ndim != 1:
            names = list(given.mesh_dim_names or range(given.ndim))
            message = (
                f"UlyssesCommunicator: the mesh has dimensions {names}, and a communicator spans "
                f"one; pass mesh[{names[-1]!r}], say"
            )
            raise ValueError(message)
        found = None if given.get_coordinate() is None else given.get_group()
    # For ranks outside a group torch hands out a number in its place.
    if not isinstance(found, ProcessGroup):
        message = "UlyssesCommunicator: this process is not a rank of the group given to it"
        raise ValueError(message)
    return found


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
