"""Arguments of a communicator: what is refused before the ranks meet, and what is filled in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from .copy_engine import SIGNAL_KINDS
from .kinds import shown
from .mapping import MAPPING_KINDS

MAX_TIMEOUT_S = 1e9  # gloo counts nanoseconds in 64 bits: beyond 9.2e9 s it gives up at once
MAX_NAME_BYTES = 1024  # a store takes keys of 8192, and closes the connection at longer ones


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
            message = f"{argument}={shown(value)} must be one of {allowed} or None"
            raise ValueError(message)
    max_windows, shared = wanted["max_windows"], wanted["allow_shared_devices"]
    if not isinstance(max_windows, int) or isinstance(max_windows, bool) or max_windows < 1:
        message = f"max_windows={shown(max_windows)} must be a whole number, at least 1"
        raise ValueError(message)
    if not isinstance(shared, bool):
        message = f"allow_shared_devices={shown(shared)} must be True or False"
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
            f"UlyssesCommunicator: timeout_s={shown(timeout_s)} must be a number of seconds above "
            f"0, and at most {MAX_TIMEOUT_S:g}"
        )
        raise ValueError(message)


def check_name(name: str | None) -> None:
    """Checked before the first meeting, which bears it.

    Raises:
        ValueError: it is no text, an empty one, or too long for the keys of a store.
    """
    if name is not None and (not isinstance(name, str) or not name):
        message = (
            f"UlyssesCommunicator: name={shown(name)} must be a text that is not empty, or None"
        )
        raise ValueError(message)
    if name is not None and len(name.encode(errors="replace")) > MAX_NAME_BYTES:
        message = (
            f"UlyssesCommunicator: name={shown(name)} must be no longer than {MAX_NAME_BYTES} bytes"
        )
        raise ValueError(message)


def folder_of(dump_dir: Path | str | None) -> Path | None:
    """The folder for dumps.

    Raises:
        ValueError: it is no path.
    """
    if dump_dir is not None and not isinstance(dump_dir, str | Path):
        message = (
            f"UlyssesCommunicator: dump_dir={shown(dump_dir)} must be the path of a folder, or None"
        )
        raise ValueError(message)
    return None if dump_dir is None else Path(dump_dir)


def group_of(given: ProcessGroup | DeviceMesh | None) -> ProcessGroup | None:
    """The ranks that are meant: of a group, of a mesh of one dimension, or of the default group.

    Raises:
        ValueError: the mesh has more dimensions, or this process is not among the ranks.
    """
    if given is None:
        return dist.group.WORLD if dist.is_initialized() else None
    if isinstance(given, str):
        message = (
            f"UlyssesCommunicator: group={given!r} must be a ProcessGroup or a DeviceMesh of one "
            f"dimension; the name of one is not enough"
        )
        raise ValueError(message)
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
    try:
        chosen = torch.device(device)
    except (TypeError, RuntimeError):
        message = f"device={shown(device)} must be a device of torch, 'cuda:0' or 'cpu' say"
        raise ValueError(message) from None
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
