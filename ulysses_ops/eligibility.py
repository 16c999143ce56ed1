"""From the topologies of all ranks to one transport for the group.

:func:`decide` is pure. Every rank calls it with the same list and request and so reaches the same
verdict in the same words. It fails closed: the copy engines (``ce``) are eligible only when each
condition is known to hold on each rank and for each directed pair; ``unknown`` does not hold.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import TypeVar

from .facts import Answer, Fact, Pair, Process, Reading, Topology

_Key = TypeVar("_Key", bound=Hashable)

TRANSPORTS = ("ce", "nccl", "gloo")


@dataclass(frozen=True)
class Request:
    """What the caller asks for; it has to be the same on every rank.

    Attributes:
        transport: ``ce``, ``nccl`` or ``gloo`` to have that one or none; None to let facts choose.
        backends: What the process group offers for CUDA tensors, for example ``("nccl",)``.
        allow_shared_devices: Whether ranks that share a GPU count as connected (for tests).
    """

    transport: str | None = None
    backends: tuple[str, ...] = ()
    allow_shared_devices: bool = False

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
    """

    transport: str | None
    reasons: tuple[str, ...]
    warnings: tuple[str, ...] = ()


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
    obstacles = _obstacles(topologies, request)
    if request.transport in (None, "ce") and not obstacles:
        reasons = (_why_eligible(topologies), *_left_out(topologies))
        return Decision("ce", reasons, _warnings(topologies))
    return decide_without_ce(topologies, request, obstacles)


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
            shared = _shared_devices(topologies) if transport == "nccl" else []
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
    groups = _group_by((kind or "none", rank) for rank, kind in enumerate(kinds))
    found = ", ".join(f"{kind} on {_ranks(ranks)}" for kind, ranks in sorted(groups.items()))
    return f"devices differ or are not supported: {found}; give every rank cpu, or every rank cuda"


def _obstacles(topologies: Sequence[Topology], request: Request) -> tuple[str, ...]:
    """Return what keeps the group off the copy engines, cause by cause; empty if nothing does."""
    shared = [] if request.allow_shared_devices else _shared_devices(topologies)
    return (
        *_place_obstacles(topologies),
        *_rank_obstacles(topologies),
        *shared,
        *_pairs(topologies),
    )


def _place_obstacles(topologies: Sequence[Topology]) -> list[str]:
    """One host, one PID namespace, one process per rank."""
    processes = [topology.process for topology in topologies]
    found = _differences(
        "boot id", processes, [p.boot_id for p in processes], "ce works within one host"
    )
    found += _differences(
        "PID namespace",
        processes,
        [p.pid_namespace for p in processes],
        "start the ranks in one container or with one PID namespace",
    )
    homes = _group_by(
        ((p.boot_id.value, p.pid_namespace.value, p.pid), rank) for rank, p in enumerate(processes)
    )
    for (_, _, pid), ranks in homes.items():
        if len(ranks) > 1:
            found.append(f"{_ranks(ranks)}: one process (pid {pid}); start a process per rank")
    return found


def _differences(
    what: str, processes: Sequence[Process], readings: Sequence[Reading], remedy: str
) -> list[str]:
    """Say which ranks do not know ``what``, and which ranks have which value if they differ."""
    found = [
        f"rank {rank}: {what} unknown: {reading.reason}"
        for rank, reading in enumerate(readings)
        if reading.value is None
    ]
    known = [(rank, reading.value) for rank, reading in enumerate(readings) if reading.value]
    if len({value for _, value in known}) > 1:
        homes = _group_by((f"{processes[r].hostname} ({what} {v})", r) for r, v in known)
        where = ", ".join(f"{_ranks(ranks)} on {home}" for home, ranks in homes.items())
        found.append(f"ranks differ in {what}: {where}; {remedy}")
    return found


def _rank_obstacles(topologies: Sequence[Topology]) -> list[str]:
    """Return what ranks lack by themselves, equal causes together."""
    found = _group_by(
        (fact.reason or f"{name}: {fact.answer}", rank)
        for rank, topology in enumerate(topologies)
        for name, fact, good in _rank_conditions(topology)
        if fact.answer != good
    )
    return [f"{_ranks(ranks)}: {text}" for text, ranks in found.items()]


def _rank_conditions(topology: Topology) -> list[tuple[str, Fact, Answer]]:
    """Return name, fact and needed answer; what would only repeat an earlier cause is left out."""
    conditions: list[tuple[str, Fact, Answer]] = [
        ("library _C_cuda loaded", topology.library, "yes"),
        ("NVML readable", topology.nvml, "yes"),
        ("MPS", topology.mps, "no"),
    ]
    if topology.library.answer == "yes":
        conditions.append(("64-bit stream memory operations", topology.stream_memory_64bit, "yes"))
    if topology.nvml.answer == "yes":
        conditions.append(("GPU identified", topology.identity, "yes"))
    if topology.identity.answer == "yes":
        mig = Fact("unknown", "nvml") if topology.gpu is None else topology.gpu.mig
        conditions.append(("MIG", mig, "no"))
    return conditions


def _shared_devices(topologies: Sequence[Topology]) -> list[str]:
    owners = _group_by(
        (t.device_uuid, rank) for rank, t in enumerate(topologies) if t.device_uuid is not None
    )
    remedy = "give each rank its own GPU"
    return [f"{_ranks(r)}: share {uuid}; {remedy}" for uuid, r in owners.items() if len(r) > 1]


def _pairs(topologies: Sequence[Topology]) -> list[str]:
    """Return every directed pair of ranks whose GPUs are not known, by all ranks, to be connected.

    Two ranks on one GPU are connected here. A rank that cannot tell for want of NVML or of a GPU
    is an obstacle already and is left out.
    """
    able = [
        rank
        for rank, t in enumerate(topologies)
        if t.nvml.answer == "yes" and t.identity.answer == "yes" and t.gpu is not None
    ]
    known = {
        rank: {(p.source_uuid, p.target_uuid): p for p in topologies[rank].pairs} for rank in able
    }
    found: list[str] = []
    for source, target in permutations(able, 2):
        ends = (topologies[source].device_uuid or "", topologies[target].device_uuid or "")
        if ends[0] == ends[1]:
            continue
        faults = _group_by(
            (fault, witness) for witness in able for fault in _pair_faults(known[witness].get(ends))
        )
        if faults:
            what = "; ".join(f"{fault} (seen by {_ranks(who)})" for fault, who in faults.items())
            cards = " -> ".join(_card(topologies[rank]) for rank in (source, target))
            found.append(f"rank {source} -> rank {target} [{cards}]: {what}")
    return found


def _pair_faults(pair: Pair | None) -> list[str]:
    """Return what is wrong with a directed pair.

    CUDA's answer is needed where it could be asked for. ``CUDA_VISIBLE_DEVICES`` may hide a GPU
    that is reachable all the same.
    """
    if pair is None:
        return ["NVML does not list this pair"]
    needed = [("nvlink", pair.nvlink), ("write", pair.write), ("read", pair.read)]
    if pair.peer_access is not None:
        needed.append(("peer access", pair.peer_access))
    return [
        fact.reason or f"P2P {name} is {fact.answer}"
        for name, fact in needed
        if fact.answer != "yes"
    ]


def _card(topology: Topology) -> str:
    gpu = topology.gpu
    if gpu is None:
        return str(topology.device_uuid)
    return f"{gpu.uuid} PCI {gpu.pci_bus_id} NVML {gpu.nvml_index} CUDA {gpu.cuda_ordinal}"


def _why_eligible(topologies: Sequence[Topology]) -> str:
    cards = len({topology.device_uuid for topology in topologies})
    return (
        f"{len(topologies)} ranks on {cards} GPUs of one host, "
        f"every directed pair connected over NVLink"
    )


def _warnings(topologies: Sequence[Topology]) -> tuple[str, ...]:
    """Return what costs speed on the copy-engine path."""
    slow = [rank for rank, topology in enumerate(topologies) if topology.max_connections == "1"]
    return (
        (f"{_ranks(slow)}: CUDA_DEVICE_MAX_CONNECTIONS=1 loses overlap; unset it",) if slow else ()
    )


def _left_out(topologies: Sequence[Topology]) -> tuple[str, ...]:
    """Return what the copy-engine path does without."""
    without = [
        rank
        for rank, topology in enumerate(topologies)
        if topology.flush_remote_writes.answer != "yes"
    ]
    return (
        (f"{_ranks(without)}: no flush of remote writes, waits go without it",) if without else ()
    )


def _group_by(items: Iterable[tuple[_Key, int]]) -> dict[_Key, list[int]]:
    """Collect the ranks of equal keys, in the order in which the keys first come."""
    groups: dict[_Key, list[int]] = {}
    for key, rank in items:
        groups.setdefault(key, []).append(rank)
    return groups


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(str(rank) for rank in ranks)}"
