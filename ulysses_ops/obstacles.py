"""What keeps a group of ranks off the copy engines, cause by cause.

Everything here is pure: from the topologies of all ranks to sentences. It fails closed: each
condition has to be known to hold, on each rank and for each directed pair.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import TypeVar

from .facts import Answer, Fact, Pair, Process, Reading, Topology

_Key = TypeVar("_Key", bound=Hashable)


@dataclass(frozen=True)
class Obstacle:
    """What keeps a group off ``ce``; ``certain`` unless a missing answer is all it is."""

    text: str
    certain: bool = True


def find_obstacles(
    topologies: Sequence[Topology], *, allow_shared_devices: bool
) -> tuple[Obstacle, ...]:
    """Return what keeps the group off the copy engines, cause by cause; empty if nothing does."""
    return (
        *obstacles_but_pairs(topologies, allow_shared_devices=allow_shared_devices),
        *_pair_obstacles(topologies),
    )


def obstacles_but_pairs(
    topologies: Sequence[Topology], *, allow_shared_devices: bool
) -> list[Obstacle]:
    """Return the same without the pairs of GPUs."""
    shared = [] if allow_shared_devices else shared_devices(topologies)
    return [
        *_place_obstacles(topologies),
        *_rank_obstacles(topologies),
        *map(Obstacle, shared),
    ]


def _place_obstacles(topologies: Sequence[Topology]) -> list[Obstacle]:
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
    homes = group_by(
        ((p.boot_id.value, p.pid_namespace.value, p.pid), rank) for rank, p in enumerate(processes)
    )
    for (_, _, pid), ranks in homes.items():
        if len(ranks) > 1:
            text = f"{name_ranks(ranks)}: one process (pid {pid}); start a process per rank"
            found.append(Obstacle(text))
    return found


def _differences(
    what: str, processes: Sequence[Process], readings: Sequence[Reading], remedy: str
) -> list[Obstacle]:
    """Say which ranks do not know ``what``, and which ranks have which value if they differ."""
    found = [
        Obstacle(f"rank {rank}: {what} unknown: {reading.reason}", certain=False)
        for rank, reading in enumerate(readings)
        if reading.value is None
    ]
    known = [(rank, reading.value) for rank, reading in enumerate(readings) if reading.value]
    if len({value for _, value in known}) > 1:
        homes = group_by((f"{processes[r].hostname} ({what} {v})", r) for r, v in known)
        where = ", ".join(f"{name_ranks(ranks)} on {home}" for home, ranks in homes.items())
        found.append(Obstacle(f"ranks differ in {what}: {where}; {remedy}"))
    return found


def _rank_obstacles(topologies: Sequence[Topology]) -> list[Obstacle]:
    """Return what ranks lack by themselves, equal causes together."""
    found = group_by(
        ((fact.reason or f"{name}: {fact.answer}", fact.answer != "unknown"), rank)
        for rank, topology in enumerate(topologies)
        for name, fact, good in _rank_conditions(topology)
        if fact.answer != good
    )
    return [
        Obstacle(f"{name_ranks(ranks)}: {text}", certain)
        for (text, certain), ranks in found.items()
    ]


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


def shared_devices(topologies: Sequence[Topology]) -> list[str]:
    """Say which ranks share a GPU."""
    owners = group_by(
        (t.device_uuid, rank) for rank, t in enumerate(topologies) if t.device_uuid is not None
    )
    remedy = "give each rank its own GPU"
    return [f"{name_ranks(r)}: share {uuid}; {remedy}" for uuid, r in owners.items() if len(r) > 1]


def _pair_obstacles(topologies: Sequence[Topology]) -> list[Obstacle]:
    found = []
    for (source, target), faults in faulty_pairs(topologies).items():
        what = "; ".join(f"{text} (seen by {name_ranks(who)})" for (text, _), who in faults.items())
        cards = " -> ".join(_card(topologies[rank]) for rank in (source, target))
        certain = any(certain for _, certain in faults)
        found.append(Obstacle(f"rank {source} -> rank {target} [{cards}]: {what}", certain))
    return found


def faulty_pairs(
    topologies: Sequence[Topology],
) -> dict[tuple[int, int], dict[tuple[str, bool], list[int]]]:
    """Return every directed pair of ranks whose GPUs are not known, by all ranks, to be connected.

    With each come its faults, whether they are certain, and which ranks see them. Two ranks on one
    GPU are connected here. A rank that cannot tell for want of NVML or of a GPU is an obstacle
    already and is left out.
    """
    able = [
        rank
        for rank, t in enumerate(topologies)
        if t.nvml.answer == "yes" and t.identity.answer == "yes" and t.gpu is not None
    ]
    known = {
        rank: {(p.source_uuid, p.target_uuid): p for p in topologies[rank].pairs} for rank in able
    }
    found = {}
    for source, target in permutations(able, 2):
        ends = (topologies[source].device_uuid or "", topologies[target].device_uuid or "")
        if ends[0] == ends[1]:
            continue
        faults = group_by(
            (fault, witness) for witness in able for fault in pair_faults(known[witness].get(ends))
        )
        if faults:
            found[source, target] = faults
    return found


def pair_faults(pair: Pair | None) -> list[tuple[str, bool]]:
    """Return what is wrong with a directed pair, and whether that is certain.

    CUDA's answer is needed where it could be asked for. ``CUDA_VISIBLE_DEVICES`` may hide a GPU
    that is reachable all the same.
    """
    if pair is None:
        return [("NVML does not list this pair", False)]
    needed = [("nvlink", pair.nvlink), ("write", pair.write), ("read", pair.read)]
    if pair.peer_access is not None:
        needed.append(("peer access", pair.peer_access))
    return [
        (fact.reason or f"P2P {name} is {fact.answer}", fact.answer == "no")
        for name, fact in needed
        if fact.answer != "yes"
    ]


def _card(topology: Topology) -> str:
    gpu = topology.gpu
    if gpu is None:
        return str(topology.device_uuid)
    return f"{gpu.uuid} PCI {gpu.pci_bus_id} NVML {gpu.nvml_index} CUDA {gpu.cuda_ordinal}"


def group_by(items: Iterable[tuple[_Key, int]]) -> dict[_Key, list[int]]:
    """Collect the ranks of equal keys, in the order in which the keys first come."""
    groups: dict[_Key, list[int]] = {}
    for key, rank in items:
        groups.setdefault(key, []).append(rank)
    return groups


def name_ranks(ranks: Sequence[int]) -> str:
    """Write ``rank 1`` or ``ranks 0, 1``."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(str(rank) for rank in ranks)}"
