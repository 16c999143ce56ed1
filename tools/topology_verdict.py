"""From a topology to a verdict on the machine, and to what can be done about each "no"."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ulysses_ops.eligibility import Decision, Request, decide
from ulysses_ops.facts import Topology
from ulysses_ops.suggestions import suggest
from ulysses_ops.tools.pair_check import PairFailure

Word = Literal["eligible", "not eligible", "unknown"]
EXIT_CODES: dict[Word, int] = {"eligible": 0, "not eligible": 1, "unknown": 2}

# What a reason or a note matches -> what to do. Reasons that name their remedy are not here.
ADVICE = (
    (
        r"Error 802|not yet initialized|fabric state is (not started|in progress)",
        (
            "start NVIDIA's fabric manager on the host, in the version of the driver "
            "(systemctl status nvidia-fabricmanager), and try again"
        ),
    ),
    (
        r"Shared Library Not Found",
        "install the NVIDIA driver, or start the container with access to the GPUs",
    ),
    (r"DriverNotLoaded", "load the NVIDIA kernel module; nvidia-smi has to work first"),
    (
        r"LibRmVersionMismatch",
        "the driver was updated under its loaded kernel module: reload the module, or reboot",
    ),
    (r"NoPermission", "give this user access to /dev/nvidia*, or the container its devices"),
    (
        r"GpuIsLost|GPU is lost",
        "a GPU fell off the bus: look for Xid 79 in the kernel log, then reset the GPU or reboot",
    ),
    (r"NVML not importable", "pip install nvidia-ml-py"),
    (
        r"NVML does not start: AttributeError",
        "another package has the name pynvml: remove it, then pip install nvidia-ml-py",
    ),
    (
        r"library _C_cuda not loaded",
        "build ulysses_ops where nvcc 13 is installed, for a torch of CUDA 13",
    ),
    (r"MIG is enabled", "switch MIG off on the idle GPU, as root: nvidia-smi -i <NVML> -mig 0"),
    (
        r"P2P nvlink status is (NOT_SUPPORTED|GPU_NOT_SUPPORTED)",
        "no NVLink joins these GPUs: use a group that is joined, or leave it to NCCL",
    ),
    (
        r"CHIPSET_NOT_SUPPORTED|IOH_TOPOLOGY_NOT_SUPPORTED",
        "the board's bridges do not carry peer traffic between these GPUs: choose others",
    ),
    (
        r"DISABLED_BY_REGKEY",
        (
            "a parameter of the kernel module switches peer access off: see NVreg_RegistryDwords "
            "in /proc/driver/nvidia/params"
        ),
    ),
    (
        r"CUDA refuses peer access",
        "compare with nvidia-smi topo -p2p w; look at ACS, the IOMMU and the container's devices",
    ),
    (
        r"failed data check",
        (
            "peer access is advertised, yet data does not arrive: switch off ACS on PCIe bridges "
            "or the IOMMU; until then pass transport='nccl', with NCCL_P2P_DISABLE=1"
        ),
    ),
    (
        r"P2P \w+ status cannot be read: NVMLError_NotSupported",
        "this driver does not tell about pairs of GPUs: leave it to NCCL",
    ),
    (
        r"is not among the \d+ GPUs that NVML lists|does not list this pair",
        (
            "let NVML see in this container what CUDA sees: pass all GPUs, restrict with "
            "CUDA_VISIBLE_DEVICES"
        ),
    ),
    (
        r"no 64-bit stream memory operations|stream memory operations cannot",
        "use a driver of CUDA 12 or later on bare Linux",
    ),
    (r"virtualisation is vgpu", "vGPUs reach each other only where the host has enabled it"),
)


@dataclass(frozen=True)
class Verdict:
    """What is said of a machine.

    Attributes:
        word: Whether a group of ``world_size`` may use the copy engines.
        line: The same in one line.
        world_size: Number of ranks that were judged.
        reasons: Cause by cause.
        warnings: What to know besides.
        suggestions: Which GPUs could form groups.
        advice: What to do.
    """

    word: Word
    line: str
    world_size: int
    reasons: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    suggestions: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """0 eligible, 1 not, 2 could not tell."""
        return EXIT_CODES[self.word]


def judge(
    topology: Topology, world_size: int | None = None, failures: Sequence[PairFailure] = ()
) -> Verdict:
    """Judge the first ``world_size`` CUDA devices, or all, as a group with a rank on each.

    Args:
        topology: What a process knows that was asked for all its devices.
        world_size: Ranks of a group; None for one on each device.
        failures: What the data check found.
    """
    ranks = topology.as_ranks()
    count = len(ranks) if world_size is None else world_size
    if not ranks or count > len(ranks):
        return _too_few(topology, count)
    if count == 1:
        word: Word = "not eligible" if world_size is None else "eligible"
        return _verdict(topology, word, 1, "one GPU: there is no peer, the operators copy locally")
    group = ranks[:count]
    decision = decide(group, Request(backends=("nccl",)))
    failed = [f for f in failures if f.source < count and f.target < count]
    apart = [(f.source, f.target) for f in failures]
    suggestions = suggest(group, apart=apart) if apart else decision.suggestions
    if failed:  # a certain no, whatever else is known
        others = () if decision.transport == "ce" else decision.reasons
        decision = Decision("nccl", (*map(str, failed), *others), decision.warnings)
    if decision.transport == "ce":
        (line, *more) = decision.reasons
        return _verdict(
            topology, "eligible", count, line, reasons=tuple(more), warnings=decision.warnings
        )
    if count < len(ranks):
        suggestions = suggest(ranks, sizes=(count,), apart=apart)
    word = "not eligible" if decision.certain else "unknown"
    causes = condensed(decision.reasons)
    line = causes[0] + (f" (and {len(causes) - 1} more)" if len(causes) > 1 else "")
    return _verdict(
        topology,
        word,
        count,
        line,
        reasons=decision.reasons,
        warnings=decision.warnings,
        suggestions=suggestions,
    )


def condensed(reasons: Sequence[str]) -> list[str]:
    """Say once what holds for several pairs: ``ranks 0->2 1->2: ...``."""
    pairs: dict[str, list[str]] = {}
    for reason in reasons:
        match = re.fullmatch(r"rank (\d+) -> rank (\d+) \[.*?\]: (.*)", reason)
        what = re.sub(r" \(seen by ranks?[^)]*\)", "", match[3]) if match else reason
        pairs.setdefault(what, []).append(f"{match[1]}->{match[2]}" if match else "")
    return [
        f"{what}: {len(ways)} of the directed pairs, {' '.join(ways)}" if ways[0] else what
        for what, ways in pairs.items()
    ]


def _too_few(topology: Topology, count: int) -> Verdict:
    ranks = topology.as_ranks()
    if not ranks and any(gpu.cuda_ordinal is not None for gpu in topology.gpus):
        line = "this topology tells of one rank alone; save it with ulysses-topology --json"
        return _verdict(topology, "unknown", count, line)
    if ranks:
        line = f"{count} ranks were asked for, and CUDA shows this process {len(ranks)} GPUs"
        return _verdict(topology, "not eligible", count, line)
    causes = [topology.nvml.reason] if topology.nvml.answer != "yes" else []
    if topology.identity.reason not in ("", *causes):
        causes.append(topology.identity.reason)
    sure = topology.nvml.answer != "unknown" and "cannot be asked" not in topology.identity.reason
    word: Word = "not eligible" if sure and not topology.notes else "unknown"
    said = [*causes, *topology.notes, "nothing is known of the GPUs of this process"]
    line = "CUDA shows this process no GPU" if word == "not eligible" else said[0]
    return _verdict(topology, word, count, line, reasons=tuple(causes))


def _verdict(
    topology: Topology,
    word: Word,
    count: int,
    line: str,
    *,
    reasons: tuple[str, ...] = (),
    warnings: tuple[str, ...] = (),
    suggestions: tuple[str, ...] = (),
) -> Verdict:
    said = [*reasons, line, *topology.notes]
    if word != "eligible":
        for gpu in topology.gpus:
            said += [f"fabric state is {gpu.fabric.value}"]
            said += [f"virtualisation is {gpu.virtualisation.value}"]
    advice = [do for pattern, do in ADVICE if any(re.search(pattern, text) for text in said)]
    return Verdict(
        word, line, count, reasons, warnings + topology.notes, suggestions, tuple(advice)
    )
