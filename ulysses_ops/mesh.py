"""Ranks in a mesh of data, sequence and tensor parallelism, so that each group can use ``ce``.

Ranks that share a matrix meet most often and are the closest; then those that share a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh

from .errors import TopologyError
from .facts import Topology
from .suggestions import equal_groups

Order = tuple[tuple[tuple[int, ...], ...], ...]  # [dp][sp][tp] -> rank
NAMES = ("dp", "sp", "tp")


def order_ranks(
    topologies: Sequence[Topology],
    sp: int,
    tp: int,
    *,
    allow_shared_devices: bool = False,
) -> Order:
    """Find groups of ``sp * tp`` ranks that all reach each other, and order the ranks in them.

    Pure: from the same topologies every rank gets the same order.

    Args:
        topologies: What every rank knows, by rank; see :func:`ulysses_ops.topology.probe`.
        sp: Ranks that a sequence is sharded between.
        tp: Ranks that every matrix is sharded between.
        allow_shared_devices: Whether ranks may share a GPU.

    Returns:
        ``order[d][s][t]`` is a rank.

    Raises:
        ValueError: ``sp * tp`` does not divide the number of ranks.
        TopologyError: there are not enough such groups.
    """
    count = len(topologies)
    if min(sp, tp) < 1 or count % (sp * tp):
        message = f"order_ranks: sp={sp} times tp={tp} must divide the {count} ranks"
        raise ValueError(message)
    groups = _exact(topologies, sp * tp, allow_shared_devices=allow_shared_devices)
    order = []
    for group in groups:
        members = [topologies[rank] for rank in group]
        inner = _exact(members, tp, allow_shared_devices=allow_shared_devices)
        order.append(tuple(tuple(group[member] for member in part) for part in inner))
    return tuple(order)


def _exact(
    topologies: Sequence[Topology], size: int, *, allow_shared_devices: bool
) -> list[tuple[int, ...]]:
    if size == 1:
        return [(member,) for member in range(len(topologies))]
    groups = equal_groups(topologies, size, allow_shared_devices=allow_shared_devices)
    if len(groups) * size < len(topologies):
        message = (
            f"order_ranks: of {len(topologies)} ranks, {len(groups)} groups of {size} that all "
            f"reach each other can be made: {[list(group) for group in groups]}; choose smaller "
            f"groups, or other GPUs"
        )
        raise TopologyError(message)
    return groups


def build_mesh(order: Order, device_type: str) -> DeviceMesh:
    """The mesh with dimensions ``dp``, ``sp`` and ``tp``; ``mesh.get_group("sp")`` is a group.

    Args:
        order: From :func:`order_ranks`, the same on every rank.
        device_type: ``"cuda"`` or ``"cpu"``.

    Collective: it makes process groups.
    """
    return DeviceMesh(device_type, torch.tensor(order), mesh_dim_names=NAMES)
