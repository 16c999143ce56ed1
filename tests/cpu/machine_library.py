"""Machines as the probe sees them; run this file to write them, and what is said of them, anew.

``machines/NAME.json`` is what ``ulysses-topology --json`` would save there as its topology, and
``machines/NAME.txt`` what ``ulysses-topology`` prints.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any
from unittest import mock

import pynvml
from fake_nvml import (
    ATOMICS,
    DOWN,
    FACTS,
    NOT_SUPPORTED,
    NVLINK,
    READ,
    WRITE,
    FakeCuda,
    FakeGpu,
    FakeNvml,
    islands,
    machine,
    rank_topology,
)
from rich.console import Console

from ulysses_ops import nvml as nvml_module
from ulysses_ops.facts import Container, Fact, Process, Reading, Topology
from ulysses_ops.tools.topology_table import print_topology
from ulysses_ops.tools.topology_verdict import judge

FOLDER = Path(__file__).parent / "machines"
WIDTH = 110
NODE, SYSTEM = pynvml.NVML_TOPOLOGY_NODE, pynvml.NVML_TOPOLOGY_SYSTEM
HOST_BRIDGE = pynvml.NVML_TOPOLOGY_HOSTBRIDGE
GPU_NOT_SUPPORTED = pynvml.NVML_P2P_STATUS_GPU_NOT_SUPPORTED
CHIPSET_NOT_SUPPORTED = pynvml.NVML_P2P_STATUS_CHIPSET_NOT_SUPPORTED

Status = dict[tuple[int, int, int], int]
HOPPER: dict[str, Any] = {"name": "NVIDIA H100 80GB HBM3", "memory_gib": 79}
AMPERE: dict[str, Any] = {
    "capability": (8, 0),
    "link_version": pynvml.NVML_NVLINK_VERSION_3_0,
    "link_mbps": 25000,
    "fabric": (0, 0),
}
PCIE: dict[str, Any] = {"links": (), "fabric": (0, 0)}


def gpus(count: int, *, sockets: int = 1, **facts: Any) -> list[FakeGpu]:
    """``count`` GPUs of one kind, spread over ``sockets`` of 48 CPUs."""
    each = max(1, count // sockets)
    return [
        replace(gpu, numa_node=i // each, cpus=(48 * (i // each), 48 * (i // each) + 47), **facts)
        for i, gpu in enumerate(machine(count))
    ]


def levels(count: int, near: int, each: int) -> dict[tuple[int, int], int]:
    """PCI levels: ``near`` among ``each`` GPUs in a row, else the system's."""
    return {
        (a, b): near if a // each == b // each else SYSTEM
        for a in range(count)
        for b in range(count)
    }


def everywhere(count: int, status: int, kinds: Sequence[int]) -> Status:
    return {(a, b, kind): status for a, b in permutations(range(count), 2) for kind in kinds}


def seen(
    nvml: Any,
    cards: Sequence[FakeGpu],
    visible: Sequence[int] | None = None,
    *,
    facts: Callable[[int], Sequence[int]] = lambda _: FACTS,
    environ: Mapping[str, str] | None = None,
    **cuda: Any,
) -> Topology:
    """What a process learns on a machine, without what depends on where the tests run."""
    order = range(len(cards)) if visible is None else visible
    with mock.patch.object(nvml_module, "PCI_DEVICES_PATH", Path("/nowhere")):
        topology = rank_topology(
            nvml,
            FakeCuda(cards, order, **cuda),
            0,
            facts=facts,
            environ=environ,
            every_device=True,
        )
    return replace(
        topology,
        torch_version="2.11.0+cu130",
        torch_cuda_version="13.0",
        process=Process("node", Reading("5eed", "test"), Reading("pid:[1]", "test"), 1000),
        container=Container(
            runtime=Reading("none", "probe", "no sign of a container was found"),
            ptrace_scope=Reading(1, "test"),
            can_ptrace=Fact("no", "test", "no CAP_SYS_PTRACE"),
            temporary=Reading("/tmp (device 1, inode 2)", "test"),
            shared_memory_bytes=Reading(1 << 36, "test"),
            virtualisation=Reading("none", "test"),
        ),
    )


def failing(name: str, code: str) -> dict[Any, Exception]:
    return {name: pynvml.NVMLError(getattr(pynvml, f"NVML_ERROR_{code}"))}


def laptop_without_gpu() -> Topology:
    return seen(FakeNvml([], failures=failing("nvmlInit", "LIBRARY_NOT_FOUND")), [])


def one_gpu() -> Topology:
    cards = gpus(1, name="NVIDIA GeForce RTX 4090", memory_gib=23, capability=(8, 9), **PCIE)
    return seen(FakeNvml(cards), cards)


def h200_x2() -> Topology:
    """NVML tells the rate of each link there, and no common one."""
    cards = gpus(2, name="NVIDIA H200", memory_gib=140, link_mbps=None)
    return seen(FakeNvml(cards, ancestor=SYSTEM), cards)


def h100_x8() -> Topology:
    cards = gpus(8, sockets=2, **HOPPER)
    return seen(FakeNvml(cards, ancestor=levels(8, NODE, 4)), cards)


def a100_x8() -> Topology:
    cards = gpus(
        8,
        sockets=2,
        name="NVIDIA A100-SXM4-80GB",
        memory_gib=80,
        links=(-1,) * 12,
        **AMPERE,
    )
    return seen(FakeNvml(cards, ancestor=levels(8, NODE, 4)), cards, facts=lambda _: [1, 1, 3, 0])


def a100_pcie_x4_bridges() -> Topology:
    cards = gpus(4, name="NVIDIA A100 80GB PCIe", memory_gib=80, **AMPERE)
    cards = [replace(gpu, links=(DOWN,) * 2 + (i ^ 1,) * 12) for i, gpu in enumerate(cards)]
    status = {
        way: code
        for way, code in islands(4, [[0, 1], [2, 3]]).items()
        if way[2] in (NVLINK, ATOMICS)
    }
    return seen(FakeNvml(cards, status, ancestor=levels(4, HOST_BRIDGE, 2)), cards)


def l40s_x4() -> Topology:
    cards = gpus(4, sockets=2, name="NVIDIA L40S", memory_gib=44, capability=(8, 9), **PCIE)
    status = everywhere(4, NOT_SUPPORTED, [NVLINK, ATOMICS])
    return seen(FakeNvml(cards, status, ancestor=levels(4, NODE, 2)), cards)


def rtx4090_x2() -> Topology:
    cards = gpus(2, name="NVIDIA GeForce RTX 4090", memory_gib=23, capability=(8, 9), **PCIE)
    status = everywhere(2, GPU_NOT_SUPPORTED, [READ, WRITE, NVLINK, ATOMICS])
    refused = frozenset(permutations(range(2), 2))
    return seen(FakeNvml(cards, status, ancestor=HOST_BRIDGE), cards, refused=refused)


def mig_slices() -> Topology:
    cards = gpus(1, **HOPPER)
    slices = [replace(cards[0], uuid=f"00000000-0000-0000-0000-00000000b00{i}") for i in range(2)]
    return seen(FakeNvml(cards, mig={0: 1}), slices, refused=frozenset(permutations(range(2), 2)))


def gh200_x2_not_supported() -> Topology:
    cards = gpus(2, name="NVIDIA GH200 480GB", memory_gib=95)
    failures = failing("nvmlDeviceGetP2PStatus", "NOT_SUPPORTED")
    failures |= failing("nvmlDeviceGetTopologyCommonAncestor", "NOT_SUPPORTED")
    return seen(FakeNvml(cards, failures=failures), cards)


def gb10() -> Topology:
    cards = gpus(1, name="NVIDIA GB10", capability=(12, 1), **PCIE)
    failures: dict[Any, Exception] = {}
    for name in ("MemoryInfo", "NumaNodeId", "MigMode", "GpuFabricInfo", "VirtualizationMode"):
        failures |= failing(f"nvmlDeviceGet{name}", "NOT_SUPPORTED")
    return seen(FakeNvml(cards, failures=failures), cards)


def vgpu_x2() -> Topology:
    cards = gpus(
        2, name="GRID A100X-40C", memory_gib=40, capability=(8, 0), virtualisation=2, **PCIE
    )
    status = everywhere(2, NOT_SUPPORTED, [READ, WRITE, NVLINK, ATOMICS])
    failures = failing("nvmlDeviceGetNumaNodeId", "NOT_SUPPORTED")
    refused = frozenset(permutations(range(2), 2))
    nvml = FakeNvml(cards, status, failures, ancestor=HOST_BRIDGE)
    return seen(nvml, cards, facts=lambda _: [0, 0, 2, 0], refused=refused)


def jetson() -> Topology:
    cards = gpus(1, name="Orin", capability=(8, 7), **PCIE)
    return seen(FakeNvml(cards, failures=failing("nvmlInit", "NOT_SUPPORTED")), cards)


def h100_x8_one_lost() -> Topology:
    cards = gpus(8, sockets=2, **HOPPER)
    failures = {("nvmlDeviceGetHandleByIndex", 5): pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)}
    nvml = FakeNvml(cards, failures=failures, ancestor=levels(8, NODE, 4))
    return seen(nvml, cards, [0, 1, 2, 3, 4, 6, 7])


def pcie_x8_asymmetric() -> Topology:
    cards = gpus(8, sockets=2, name="NVIDIA A100-PCIE-40GB", memory_gib=40, **AMPERE)
    cards = [replace(gpu, links=(i ^ 1,) * 12) for i, gpu in enumerate(cards)]
    status = islands(8, [[0, 1], [2, 3], [4, 5], [6, 7]])
    status[0, 1, WRITE] = CHIPSET_NOT_SUPPORTED
    return seen(FakeNvml(cards, status, ancestor=levels(8, NODE, 4)), cards)


def fabric_not_started() -> Topology:
    cards = gpus(8, sockets=2, fabric=(1, 0), **HOPPER)
    text = "Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized"
    return seen(
        FakeNvml(cards, ancestor=levels(8, NODE, 4)),
        cards,
        failures={"get_device_properties": RuntimeError(text)},
    )


def display_card_first() -> Topology:
    """A small card is NVML 0; CUDA counts the fastest first, and is told to show two of four."""
    cards = gpus(4, name="NVIDIA A100 80GB PCIe", memory_gib=80, **AMPERE)
    cards[0] = replace(cards[0], name="NVIDIA T400", memory_gib=4, capability=(7, 5), links=())
    cards = [
        cards[0],
        *(replace(g, links=(2 if i != 2 else 3,) * 12) for i, g in enumerate(cards) if i),
    ]
    cards[1] = replace(cards[1], links=())
    nvml = FakeNvml(cards, islands(4, [[2, 3]]), ancestor=levels(4, HOST_BRIDGE, 4))
    return seen(nvml, cards, [2, 3], environ={"CUDA_VISIBLE_DEVICES": "1,2"})


def zero_devices() -> Topology:
    """The driver is up, in a container that was given no GPU."""
    return seen(FakeNvml([]), [])


def hidden_gpus() -> Topology:
    cards = gpus(2, name="NVIDIA H200", memory_gib=140, link_mbps=None)
    return seen(FakeNvml(cards), cards, [], environ={"CUDA_VISIBLE_DEVICES": ""})


def one_of_two_visible() -> Topology:
    cards = gpus(2, name="NVIDIA H200", memory_gib=140, link_mbps=None)
    return seen(FakeNvml(cards), cards, [1], environ={"CUDA_VISIBLE_DEVICES": "1"})


def cpu_only_torch() -> Topology:
    cards = gpus(2, name="NVIDIA H200", memory_gib=140, link_mbps=None)
    topology = seen(FakeNvml(cards), cards, [])
    return replace(topology, torch_version="2.13.0+cpu", torch_cuda_version=None)


def p2p_status_unknown() -> Topology:
    cards = gpus(2, **HOPPER)
    unknown = pynvml.NVML_P2P_STATUS_UNKNOWN
    return seen(FakeNvml(cards, everywhere(2, unknown, [READ, WRITE, NVLINK])), cards)


def h100_x2_prohibited() -> Topology:
    """An administrator keeps one GPU from use; the fabric is still coming up."""
    cards = gpus(2, fabric=(2, 0), **HOPPER)
    cards[1] = replace(cards[1], compute_mode=pynvml.NVML_COMPUTEMODE_PROHIBITED)
    return seen(FakeNvml(cards, ancestor=SYSTEM), cards)


def v100_x16_two_baseboards() -> Topology:
    """Sixteen GPUs whose switches are joined by halves: more than a terminal is wide."""
    cards = gpus(
        16,
        sockets=2,
        name="NVIDIA V100-SXM3-32GB",
        memory_gib=32,
        capability=(7, 0),
        links=(-1,) * 6,
        link_version=pynvml.NVML_NVLINK_VERSION_2_2,
        link_mbps=None,
        one_link_mbps=None,
        fabric=(0, 0),
    )
    status = islands(16, [range(8), range(8, 16)])
    return seen(FakeNvml(cards, status, ancestor=levels(16, NODE, 8)), cards)


MACHINES: dict[str, Callable[[], Topology]] = {
    build.__name__.replace("_", "-"): build
    for build in (
        laptop_without_gpu, one_gpu, h200_x2, h100_x8, a100_x8, a100_pcie_x4_bridges, l40s_x4,
        rtx4090_x2, mig_slices, gh200_x2_not_supported, gb10, vgpu_x2, jetson, h100_x8_one_lost,
        pcie_x8_asymmetric, fabric_not_started, display_card_first, zero_devices, hidden_gpus,
        one_of_two_visible, cpu_only_torch, p2p_status_unknown, h100_x2_prohibited,
        v100_x16_two_baseboards,
    )
}  # fmt: skip


def written(topology: Topology) -> str:
    """The topology as a file: a line for each GPU, pair and device."""
    content = json.loads(topology.to_json())
    lines = []
    for key, value in content.items():
        text = json.dumps(value)
        if isinstance(value, list) and value:
            text = "[\n  " + ",\n  ".join(json.dumps(item) for item in value) + "\n ]"
        lines.append(f' "{key}": {text}')
    return "{\n" + ",\n".join(lines) + "\n}\n"


def printed(topology: Topology, world_size: int | None = None) -> str:
    """What a person reads."""
    file = io.StringIO()
    console = Console(file=file, width=WIDTH, color_system=None, force_terminal=False)
    print_topology(console, topology, judge(topology, world_size))
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()) + "\n"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, build in MACHINES.items():
        topology = build()
        (FOLDER / f"{name}.json").write_text(written(topology))
        (FOLDER / f"{name}.txt").write_text(printed(topology))
