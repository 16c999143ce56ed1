"""What keeps a group of ranks off the copy engines, cause by cause.

Everything here is pure: from the topologies of all ranks to sentences. It fails closed: each
condition has to be known to hold, on each rank and for each directed pair.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from .facts import Answer, Fact, Pair, Process, Reading, Topology

Ends = tuple[str, str]  # UUIDs of source and target
WORST_FIRST: tuple[Answer, ...] = ("no", "unknown", "yes")

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
        *_mode_obstacles(topologies),
    ]


def _place_obstacles(topologies: Sequence[Topology]) -> list[Obstacle]:
    """One host, one PID namespace, one process per rank."""
    processes = [topology.process for topology in topologies]
    everyone = range(len(processes))
    boot_ids = [p.boot_id for p in processes]
    found = _unread("boot id", boot_ids)
    found += _differences("boot id", processes, boot_ids, everyone, "ce works within one host")
    spaces = [p.pid_namespace for p in processes]
    found += _unread("PID namespace", spaces)
    remedy = "start the ranks in one container or with one PID namespace"
    for ranks in group_by((known(boot_ids[rank]), rank) for rank in everyone).values():
        # What two hosts call their namespaces says nothing; that they are two is said already.
        found += _differences("PID namespace", processes, spaces, ranks, remedy)
    homes = group_by(
        ((known(p.boot_id), known(p.pid_namespace), p.pid), rank)
        for rank, p in enumerate(processes)
    )
    for (boot_id, space, pid), ranks in homes.items():
        if len(ranks) > 1:
            text = f"{name_ranks(ranks)}: one process (pid {pid}); start a process per rank"
            found.append(Obstacle(text, certain=boot_id is not None and space is not None))
    return found


def known(reading: Reading) -> str | None:
    """Return what names a place, or None where it is not known; blank text names nothing."""
    text = "" if reading.value is None else str(reading.value).strip()
    return text or None


def _unread(what: str, readings: Sequence[Reading]) -> list[Obstacle]:
    """Say which ranks do not know ``what``."""
    return [
        Obstacle(f"rank {rank}: {what} unknown: {reading.reason or 'empty'}", certain=False)
        for rank, reading in enumerate(readings)
        if known(reading) is None
    ]


def _differences(
    what: str,
    processes: Sequence[Process],
    readings: Sequence[Reading],
    ranks: Iterable[int],
    remedy: str,
) -> list[Obstacle]:
    """Say which of ``ranks`` have which value, if they differ."""
    values = group_by((known(readings[rank]), rank) for rank in ranks)
    values.pop(None, None)
    if len(values) < 2:
        return []
    where = ", ".join(
        f"{name_ranks(who)} on {processes[who[0]].hostname} ({what} {value})"
        for value, who in values.items()
    )
    return [Obstacle(f"ranks differ in {what}: {where}; {remedy}")]


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
        unlisted = Fact("unknown", "nvml", f"GPU {topology.device_uuid} is not listed just once")
        mig = unlisted if topology.gpu is None else topology.gpu.mig
        conditions.append(("MIG", mig, "no"))
    return conditions


def _mode_obstacles(topologies: Sequence[Topology]) -> list[Obstacle]:
    """Return what NVML's compute mode forbids: every process, or more than one on a GPU."""
    cards = group_by((t.device_uuid, rank) for rank, t in enumerate(topologies) if t.gpu)
    found = []
    for ranks in cards.values():
        gpus = [gpu for gpu in (topologies[rank].gpu for rank in ranks) if gpu is not None]
        modes = sorted(str(gpu.compute_mode.value) for gpu in gpus)
        forbids = [m for m in modes if m == "prohibited" or (len(ranks) > 1 and "exclusive" in m)]
        if forbids:
            index = gpus[0].nvml_index
            text = (
                f"{name_ranks(ranks)}: compute mode of NVML {index} is {forbids[-1]}, and allows "
                f"{'no process' if forbids[-1] == 'prohibited' else 'one process'}; as root: "
                f"nvidia-smi -i {index} -c DEFAULT"
            )
            found.append(Obstacle(text))
    return found


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
    already and is left out. So are ranks of another host: they are no pair, and see none here.
    """
    able = [
        rank
        for rank, t in enumerate(topologies)
        if t.nvml.answer == "yes" and t.identity.answer == "yes" and t.gpu is not None
    ]
    pairs = {rank: pairs_by_ends(topologies[rank]) for rank in able}
    near = _same_host(topologies, able)
    found = {}
    for source in able:
        for target in near[source]:
            ends = (topologies[source].device_uuid or "", topologies[target].device_uuid or "")
            if ends[0] == ends[1]:
                continue
            faults = group_by(
                (fault, witness)
                for witness in min(near[source], near[target], key=len)
                for fault in pair_faults(pairs[witness].get(ends))
            )
            if faults:
                found[source, target] = faults
    return found


def _same_host(topologies: Sequence[Topology], ranks: Sequence[int]) -> dict[int, list[int]]:
    """Return, for each of ``ranks``, those that are not known to be on another host."""
    homes = group_by((known(topologies[rank].process.boot_id), rank) for rank in ranks)
    lost = homes.pop(None, [])
    near: dict[int, list[int]] = {rank: list(ranks) for rank in lost}
    for members in homes.values():
        near.update(dict.fromkeys(members, sorted([*members, *lost])))
    return near


def pairs_by_ends(topology: Topology) -> dict[Ends, Pair]:
    """Return the directed pairs by their ends; of a pair told of twice, the worse answers."""
    found: dict[Ends, Pair] = {}
    for pair in topology.pairs:
        ends = (pair.source_uuid, pair.target_uuid)
        found[ends] = _worse(found[ends], pair) if ends in found else pair
    return found


def _worse(a: Pair, b: Pair) -> Pair:
    told = [fact for fact in (a.peer_access, b.peer_access) if fact is not None]
    return replace(
        a,
        read=_worst(a.read, b.read),
        write=_worst(a.write, b.write),
        nvlink=_worst(a.nvlink, b.nvlink),
        peer_access=_worst(*told) if told else None,
        atomics=_worst(a.atomics, b.atomics),
    )


def _worst(*facts: Fact) -> Fact:
    return min(facts, key=lambda fact: WORST_FIRST.index(fact.answer))


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
