"""Ranks in a mesh of data, sequence and tensor parallelism, so that each group can use ``ce``.

Ranks that share a matrix meet most often and are the closest; then those that share a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .errors import TopologyError
from .facts import Topology
from .kinds import check_at_least_1, check_kind, shown
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
        ValueError: something is of a wrong kind, there is no rank, or ``sp * tp`` does not divide
            their number.
        TopologyError: there are not enough such groups.
    """
    if not isinstance(topologies, list | tuple) or not topologies:
        message = f"order_ranks: topologies={shown(topologies)} must be a list, one of each rank"
        raise ValueError(message)
    for found in topologies:
        check_kind("order_ranks", "each of topologies", found, Topology, "a Topology")
    check_at_least_1("order_ranks", sp=sp, tp=tp)
    count = len(topologies)
    if count % (sp * tp):
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

    Raises:
        ValueError: ``order`` is none, ``device_type`` is neither, or there is no process group yet.

    Collective: it makes process groups.
    """
    if device_type not in ("cuda", "cpu"):
        message = f"build_mesh: device_type={shown(device_type)} must be 'cuda' or 'cpu'"
        raise ValueError(message)
    try:
        ranks = torch.tensor(order)
    except (TypeError, ValueError, RuntimeError):
        ranks = torch.tensor(())
    if ranks.dim() != len(NAMES) or ranks.dtype != torch.int64:
        message = "build_mesh: order must be ranks by dp, sp and tp; pass what order_ranks returned"
        raise ValueError(message)
    if not dist.is_initialized():
        message = "build_mesh: there is no process group; call init_process_group first"
        raise ValueError(message)
    return DeviceMesh(device_type, ranks, mesh_dim_names=NAMES)
