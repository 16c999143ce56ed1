"""What :class:`ulysses_ops.UlyssesAttention` refuses of its inputs, before any rank waits."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .constants import Constants
from .kinds import check_callable, check_kind, check_tensors, shown
from .names import check_communicator
from .norm_rope_checks import Rope
from .part_norm_rope import NormRope
from .projections import Projections
from .schedule import Schedule


def check_parts(
    comm: object,
    layers: tuple[object, object, object, object],
    counts: tuple[object, object],
    norm_rope: object,
    attention: object,
) -> None:
    """Refuse what the layer cannot be built of.

    Args:
        comm: A communicator.
        layers: Of q, k, v and out.
        counts: H and ``H_kv``.
        norm_rope: A NormRope.
        attention: The kernel.

    Raises:
        ValueError: one of them is of another kind.
    """
    op = "UlyssesAttention"
    check_communicator(op, comm)
    for name, layer in zip(("q", "k", "v", "out"), layers, strict=True):
        check_kind(op, name, layer, nn.Linear, "a torch.nn.Linear")
    for name, count in zip(("num_heads", "num_kv_heads"), counts, strict=True):
        check_kind(op, name, count, int, "a whole number")
    check_kind(op, "norm_rope", norm_rope, NormRope, "a NormRope")
    check_callable(op, "attention", attention, "a function of q, k and v")


def check_options(
    schedule: object, constants: object, norm_rope_kernel: object, pack_weights: object
) -> None:
    """Refuse options of another kind.

    Args:
        schedule: A Schedule, or ``"auto"``.
        constants: Of the planner, if any.
        norm_rope_kernel: A kernel, if any.
        pack_weights: Whether weights may be held twice.

    Raises:
        ValueError: one of them is.
    """
    op = "UlyssesAttention"
    if not isinstance(schedule, Schedule) and not (
        isinstance(schedule, str) and schedule == "auto"
    ):
        message = f"{op}: schedule={shown(schedule)} must be a Schedule or 'auto'"
        raise ValueError(message)
    if constants is not None:
        check_kind(op, "constants", constants, Constants, "Constants, or left out")
    if norm_rope_kernel is not None:
        what = "a function as apply_norm_rope, or left out"
        check_callable(op, "norm_rope_kernel", norm_rope_kernel, what)
    check_kind(op, "pack_weights", pack_weights, bool, "True or False")


def check_inputs(x: Tensor, sizes: Projections, head_dim: int, device: torch.device) -> None:
    """Refuse rows that the projections cannot take, and projections that no longer fit the heads.

    Args:
        x: ``(B, S_local, width)``.
        sizes: The projections as they are now.
        head_dim: D at construction.
        device: Of the communicator.

    Raises:
        ValueError: shape, dtype or device of ``x``, or of a weight or bias, is wrong.
    """
    sizes.check_weights(head_dim)
    weight = sizes.q.weight
    check_tensors("UlyssesAttention", x=x)
    width = weight.shape[1]
    if x.dim() != 3 or x.shape[2] != width or 0 in x.shape:
        message = (
            f"UlyssesAttention: x is {list(x.shape)} and must be (B, S_local, {width}), none of "
            f"them 0"
        )
        raise ValueError(message)
    if x.dtype != weight.dtype or x.device != weight.device or x.device != device:
        message = (
            f"UlyssesAttention: x is {x.dtype} on {x.device}, weights are {weight.dtype} on "
            f"{weight.device}, the communicator is on {device}; convert x or the layer"
        )
        raise ValueError(message)


def check_no_autocast(device: torch.device) -> None:
    """Refuse autocast where results go into windows, which are of the weights' dtype.

    Raises:
        ValueError: it is on.
    """
    if torch.is_autocast_enabled(device.type):
        message = (
            "UlyssesAttention: autocast is on, and its windows are of the weights' dtype; convert "
            "the layer and x, and call it with autocast off"
        )
        raise ValueError(message)


def check_tables(
    x: Tensor, cos: Tensor | None, sin: Tensor | None, *, rope: Rope, head_dim: int
) -> None:
    """Refuse tables of angles that do not fit the rows of ``x``, or that nobody uses.

    Raises:
        ValueError: a table is missing, of no use, of another shape or elsewhere.
    """
    for name, table in (("cos", cos), ("sin", sin)):
        if table is not None:
            check_tensors("UlyssesAttention", **{name: table})
    given = {name: table for name, table in (("cos", cos), ("sin", sin)) if table is not None}
    if len(given) != (0 if rope == "none" else 2):
        needs = "no tables" if rope == "none" else "cos and sin"
        message = f"UlyssesAttention: rope {rope!r} takes {needs}, given are {list(given)}"
        raise ValueError(message)
    shape = (x.shape[1], head_dim // 2)
    for name, table in given.items():
        fits = tuple(table.shape) in (shape, (x.shape[0], *shape))
        if not fits or table.device != x.device:
            message = (
                f"UlyssesAttention: {name} is {list(table.shape)} on {table.device} and must be "
                f"{list(shape)}, one angle a pair for each local row, or that for each batch, on "
                f"{x.device}"
            )
            raise ValueError(message)


def check_chunks(schedule: Schedule, heads: int, kv_heads: int) -> None:
    """Check that a rank's heads can be attended in the schedule's chunks.

    Raises:
        ValueError: they cannot.
    """
    if heads % schedule.head_chunks or kv_heads % schedule.head_chunks:
        message = (
            f"UlyssesAttention: head_chunks={schedule.head_chunks} must divide the {heads} heads "
            f"and {kv_heads} KV heads of a rank"
        )
        raise ValueError(message)
