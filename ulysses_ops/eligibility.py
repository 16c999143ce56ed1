"""From the topologies of all ranks to one transport for the group.

:func:`decide` is pure. Every rank calls it with the same list and request and so reaches the same
verdict in the same words. It fails closed: the copy engines (``ce``) are eligible only when each
condition is known to hold on each rank and for each directed pair; ``unknown`` does not hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .facts import Topology
from .obstacles import find_obstacles, group_by, name_ranks, shared_devices
from .suggestions import suggest

TRANSPORTS = ("ce", "nccl", "gloo")
SETTLED_FABRIC = ("completed", "not supported")


@dataclass(frozen=True)
class Request:
    """What the caller asks for; it has to be the same on every rank.

    Attributes:
        transport: ``ce``, ``nccl`` or ``gloo`` to have that one or none; None to let facts choose.
        backends: What the process group offers for CUDA tensors, for example ``("nccl",)``.
        allow_shared_devices: Whether ranks that share a GPU count as connected (for tests).
        suggest: Whether to look for parts of the group that are eligible, where it is not.
    """

    transport: str | None = None
    backends: tuple[str, ...] = ()
    allow_shared_devices: bool = False
    suggest: bool = True

    def __post_init__(self) -> None:
        if self.transport not in (None, *TRANSPORTS):
            raise ValueError(
                f"transport={self.transport!r} is not known; "
                f"pass one of {', '.join(TRANSPORTS)}, or None to let the topology choose"
            )


@dataclass(frozen=True)
class Decision:
    """The verdict for the whole group.

    Attributes:
        transport: ``ce``, ``nccl``, ``gloo``, or ``local`` (one rank: a copy); None if the request
            cannot be served, which every rank turns into a ``TopologyError`` with ``reasons``.
        reasons: Why not ``ce``, cause by cause, or why it is.
        warnings: What to know, without weight in the verdict.
        suggestions: Which of the ranks could use ``ce`` among themselves, where all cannot.
        certain: False where ``ce`` is out for want of answers alone, and no fact forbids it.
    """

    transport: str | None
    reasons: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    suggestions: tuple[str, ...] = ()
    certain: bool = True


def decide(topologies: Sequence[Topology], request: Request) -> Decision:
    """Choose the transport of a group from what its ranks know, ``topologies[rank]`` each.

    Raises:
        ValueError: ``topologies`` is empty.
    """
    if not topologies:
        raise ValueError(
            "decide: topologies is empty; pass the topology of every rank of the group"
        )
    if len(topologies) == 1:
        return Decision("local", ("world size 1: there is no peer, the operators copy locally",))
    kinds = [topology.device_type for topology in topologies]
    if kinds == ["cpu"] * len(kinds):
        return _decide_cpu(request)
    if kinds != ["cuda"] * len(kinds):
        return Decision(None, (_device_kinds(kinds),))
    obstacles = find_obstacles(topologies, allow_shared_devices=request.allow_shared_devices)
    if request.transport in (None, "ce") and not obstacles:
        reasons = (_why_eligible(topologies), *_left_out(topologies))
        return Decision("ce", reasons, _warnings(topologies))
    decision = decide_without_ce(topologies, request, [obstacle.text for obstacle in obstacles])
    if not obstacles:
        return decision
    shared = request.allow_shared_devices
    return replace(
        decision,
        suggestions=suggest(topologies, allow_shared_devices=shared) if request.suggest else (),
        certain=any(obstacle.certain for obstacle in obstacles),
    )


def decide_without_ce(
    topologies: Sequence[Topology], request: Request, causes: Sequence[str]
) -> Decision:
    """Choose between NCCL and gloo for CUDA devices, where ``causes`` rule the copy engines out.

    Also for a group that was eligible until its mapping failed. ``causes`` are the same on every
    rank, and become the reasons.
    """
    if request.transport == "ce":
        remedy = "transport='ce' is not eligible; mend the causes, or pass transport=None"
        return Decision(None, (remedy, *causes))
    wanted = ("nccl", "gloo") if request.transport is None else (request.transport,)
    for transport in wanted:
        if transport in request.backends:
            shared = shared_devices(topologies) if transport == "nccl" else []
            warnings = tuple(f"NCCL may refuse this group: {text}" for text in shared)
            reasons = (f"{transport} was asked for",) if request.transport else tuple(causes)
            return Decision(transport, reasons, warnings)
    offered = ", ".join(request.backends) or "none"
    reason = (
        f"no {' or '.join(wanted)} for CUDA tensors in the process group (it offers: {offered}); "
        f"create the group with one of them"
    )
    return Decision(None, (reason, *causes))


def _decide_cpu(request: Request) -> Decision:
    if request.transport in (None, "gloo"):
        return Decision("gloo", ("every rank has a CPU device",))
    reason = f"transport={request.transport!r} needs CUDA devices, and every rank has a CPU device"
    return Decision(None, (f"{reason}; pass transport=None or 'gloo'",))


def _device_kinds(kinds: Sequence[str]) -> str:
    groups = group_by((kind or "none", rank) for rank, kind in enumerate(kinds))
    found = ", ".join(f"{kind} on {name_ranks(ranks)}" for kind, ranks in sorted(groups.items()))
    return f"devices differ or are not supported: {found}; give every rank cpu, or every rank cuda"


def _why_eligible(topologies: Sequence[Topology]) -> str:
    cards = len({topology.device_uuid for topology in topologies})
    return (
        f"{len(topologies)} ranks on {cards} GPUs of one host, "
        f"every directed pair connected over NVLink"
    )


def _warnings(topologies: Sequence[Topology]) -> tuple[str, ...]:
    """Return what costs speed on the copy-engine path, or may keep memory from being mapped."""
    slow = [rank for rank, topology in enumerate(topologies) if topology.max_connections == "1"]
    places = group_by(
        (str(topology.container.temporary.value), rank)
        for rank, topology in enumerate(topologies)
        if topology.container.temporary.value is not None
    )
    found = []
    if slow:
        found.append(f"{name_ranks(slow)}: CUDA_DEVICE_MAX_CONNECTIONS=1 loses overlap; unset it")
    found += _fabric_warnings(topologies)
    if len(places) > 1:
        where = ", ".join(f"{name_ranks(ranks)} have {place}" for place, ranks in places.items())
        found.append(
            f"temporary folders differ: {where}; ranks may not find each other to map memory, "
            f"give them one TMPDIR"
        )
    return tuple(found)


def _fabric_warnings(topologies: Sequence[Topology]) -> list[str]:
    """Say where a fabric should be up and is not: copies over a switch may fail until it is."""
    states = group_by(
        (str(topology.gpu.fabric.value), rank)
        for rank, topology in enumerate(topologies)
        if topology.gpu is not None and topology.gpu.fabric.value not in (None, *SETTLED_FABRIC)
    )
    return [
        f"{name_ranks(ranks)}: fabric state is {state}; copies over NVSwitch may fail until it is "
        f"completed: look at systemctl status nvidia-fabricmanager"
        for state, ranks in states.items()
    ]


def _left_out(topologies: Sequence[Topology]) -> tuple[str, ...]:
    """Return what the copy-engine path does without."""
    without = [
        rank
        for rank, topology in enumerate(topologies)
        if topology.flush_remote_writes.answer != "yes"
    ]
    return (
        (f"{name_ranks(without)}: no flush of remote writes, waits go without it",)
        if without
        else ()
    )
