"""A topology and the verdict on it as a page that a person reads at a glance."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from ulysses_ops.facts import Gpu, Pair, Reading, Topology
from ulysses_ops.obstacles import pair_faults, pairs_by_ends
from ulysses_ops.tools.page import Side, print_matrix, print_paragraphs, print_rows
from ulysses_ops.tools.pair_bandwidth import FLAT, PairRate, Unmeasured
from ulysses_ops.tools.topology_verdict import Verdict, condensed

UNKNOWN = "??"
CORNER = "from \\ to"
NARROW = 70  # columns below which the verdict gets no column of names
GIB = 1 << 30
COLOURS = {"eligible": "bold green", "not eligible": "bold red", "unknown": "bold yellow"}
ANCESTORS = {
    "internal": "PIX",
    "single": "PIX",
    "multiple": "PXB",
    "hostbridge": "PHB",
    "node": "NODE",
    "system": "SYS",
}
RATE_COLUMNS: tuple[tuple[str, Side], ...] = (
    ("rows", "right"),
    ("row bytes", "right"),
    ("one way, slowest pair", "right"),
    ("fastest", "right"),
    ("both ways, slowest pair", "right"),
    ("fastest", "right"),
)
LEGEND = (
    "row: the GPU that writes; column: the owner of the memory. NV18: links over which the pair is "
    "joined; no, ??: not, or not known to be. PIX, PXB, PHB, NODE, SYS: where they meet on PCI."
)


def label(gpu: Gpu) -> str:
    """A GPU by its CUDA number, or by that of NVML where CUDA does not show it."""
    return f"n{gpu.nvml_index}" if gpu.cuda_ordinal is None else str(gpu.cuda_ordinal)


def in_order(topology: Topology) -> list[Gpu]:
    """GPUs by CUDA number, then those that CUDA does not show."""
    return sorted(
        topology.gpus,
        key=lambda gpu: (gpu.cuda_ordinal is None, gpu.cuda_ordinal or 0, gpu.nvml_index),
    )


def print_topology(console: Console, topology: Topology, verdict: Verdict) -> None:
    """Print GPUs, pairs, the verdict and what to do."""
    for line in _heading(topology):
        console.print(Text(line))
    if topology.gpus:
        print_rows(console, GPU_COLUMNS, [_gpu_row(gpu) for gpu in in_order(topology)])
    if topology.pairs:
        _print_pairs(console, topology)
        console.print(Text(LEGEND, style="dim"))
    print_verdict(console, verdict)


def print_verdict(console: Console, verdict: Verdict) -> None:
    """Print the verdict in one line, then why and what to do."""
    line = Text(verdict.word, style=COLOURS[verdict.word])
    line.append(f": {verdict.line}", style="default")
    causes = condensed(verdict.reasons)
    is_said = bool(causes) and verdict.line.startswith(causes[0])
    entries = [("verdict", line)]
    for name, lines in (
        ("why", causes[1:] if is_said else causes),
        ("note", verdict.warnings),
        ("could", verdict.suggestions),
        ("do", verdict.advice),
    ):
        entries += [(name, Text(text)) for text in lines]
    print_paragraphs(console, entries, NARROW)


def _heading(topology: Topology) -> list[str]:
    container = topology.container
    visible = topology.visible_devices
    where = (
        f"host {topology.process.hostname}, container {_shown(container.runtime)}, "
        f"virtualisation {_shown(container.virtualisation)}"
    )
    what = (
        f"driver {_shown(topology.driver_version)}, torch {topology.torch_version} for CUDA "
        f"{topology.torch_cuda_version or 'none'}, CUDA_VISIBLE_DEVICES "
        f"{'not set' if visible is None else repr(visible)}"
    )
    return [where, what]


def _shown(reading: Reading) -> str:
    return UNKNOWN if reading.value is None else str(reading.value)


GPU_COLUMNS: tuple[tuple[str, Side], ...] = (
    ("CUDA", "right"),
    ("NVML", "right"),
    ("GPU", "left"),
    ("PCI", "left"),
    ("sm", "right"),
    ("GiB", "right"),
    ("NVLinks", "left"),
    ("NUMA", "right"),
    ("CPUs", "left"),
    ("state", "left"),
)


def _gpu_row(gpu: Gpu) -> list[str]:
    memory = gpu.memory_bytes.value
    return [
        "-" if gpu.cuda_ordinal is None else str(gpu.cuda_ordinal),
        str(gpu.nvml_index),
        gpu.name.removeprefix("NVIDIA "),
        gpu.pci_bus_id[4:] if gpu.pci_bus_id else UNKNOWN,
        _shown(gpu.compute_capability),
        str(memory // GIB) if isinstance(memory, int) else UNKNOWN,
        _links(gpu),
        _shown(gpu.numa_node),
        _shown(gpu.cpu_affinity),
        _state(gpu),
    ]


def _links(gpu: Gpu) -> str:
    if gpu.nvlinks.value is None:
        return UNKNOWN
    if not gpu.nvlinks.value:
        return "none"
    rate, version = gpu.nvlink_mbps.value, gpu.nvlink_version.value
    nominal = "~" if gpu.nvlink_mbps.source.startswith("nominal") else ""
    told = [str(gpu.nvlinks.value)]
    if version is not None:
        told.append(f"v{version}" if str(version)[0].isdigit() else f"version {version}")
    if isinstance(rate, int):
        told.append(f"{nominal}{rate / 1000:.1f} GB/s")
    if gpu.has_switch:
        told.append("switch")
    return " ".join(told)


def _state(gpu: Gpu) -> str:
    """What is out of the ordinary."""
    said = []
    if gpu.mig.answer != "no":
        said.append("MIG" if gpu.mig.answer == "yes" else "MIG ??")
    if gpu.compute_mode.value not in ("default", None):
        said.append(str(gpu.compute_mode.value))
    if gpu.persistence.answer == "no":
        said.append("no persistence")
    if gpu.virtualisation.value not in ("none", None):
        said.append(str(gpu.virtualisation.value))
    if gpu.fabric.value not in ("completed", "not supported", None):
        said.append(f"fabric {gpu.fabric.value}")
    return ", ".join(said) or "ok"


def _print_pairs(console: Console, topology: Topology) -> None:
    gpus = in_order(topology)
    pairs = pairs_by_ends(topology)
    cells = [
        [
            Text("-")
            if source is target
            else _cell(source, target, pairs.get((source.uuid, target.uuid)))
            for target in gpus
        ]
        for source in gpus
    ]
    print_matrix(console, CORNER, [label(gpu) for gpu in gpus], cells)


def _cell(source: Gpu, target: Gpu, pair: Pair | None) -> Text:
    faults = pair_faults(pair)
    if pair is None or (faults and not any(certain for _, certain in faults)):
        return Text(UNKNOWN, style="yellow")
    if not faults:
        return Text(joined_by(source, target), style="green")
    near = ANCESTORS.get(str(pair.ancestor.value), "")
    return Text(f"no {near}".strip(), style="red")


def joined_by(source: Gpu, target: Gpu) -> str:
    """How many NVLinks join two GPUs, as ``NV18``; those of the one with fewer, over a switch."""
    direct = sum(
        b.count for b in source.links if b.remote_pci and b.remote_pci == target.pci_bus_id
    )
    counts = [gpu.nvlinks.value for gpu in (source, target)]
    if direct:
        return f"NV{direct}"
    if source.has_switch and target.has_switch:
        return f"NV{min(count for count in counts if isinstance(count, int))}"
    return "NVLink"


def print_rates(console: Console, rates: Sequence[PairRate]) -> None:
    """Print measured rates: a matrix of flat copies, then the slowest pair by form."""
    if not rates:
        return
    labels = [str(n) for n in sorted({n for rate in rates for n in (rate.source, rate.target)})]
    flat = [rate for rate in rates if (rate.rows, rate.row_bytes) == (FLAT.rows, FLAT.row_bytes)]
    for both_ways in (False, True):
        by_way = {
            (str(r.source), str(r.target)): f"{r.gbs:.1f}" for r in flat if r.both_ways == both_ways
        }
        how = "both ways at once" if both_ways else "one way"
        console.print(Text(f"GB/s of each direction, {FLAT.title}, {how}:"))
        cells = [[by_way.get((source, target), "-") for target in labels] for source in labels]
        print_matrix(console, CORNER, labels, cells)
    rows = []
    for form in dict.fromkeys((rate.rows, rate.row_bytes) for rate in rates):
        same = [rate for rate in rates if (rate.rows, rate.row_bytes) == form]
        rows.append([*map(str, form), *_ends(same, both_ways=False), *_ends(same, both_ways=True)])
    print_rows(console, RATE_COLUMNS, rows, title="GB/s by form")


def _ends(rates: Sequence[PairRate], *, both_ways: bool) -> list[str]:
    """The slowest and the fastest; a form that was measured one way alone has none both ways."""
    found = [rate.gbs for rate in rates if rate.both_ways == both_ways]
    return [f"{min(found):.1f}", f"{max(found):.1f}"] if found else ["-", "-"]


def print_unmeasured(console: Console, unmeasured: Sequence[Unmeasured]) -> None:
    """Say which pairs were not measured, equal causes together."""
    ways: dict[str, list[str]] = {}
    for one in unmeasured:
        what = re.sub(r"\S+ -> \S+: ", "", one.what)
        ways.setdefault(what, []).append(f"{one.source}->{one.target}")
    for what, which in ways.items():
        console.print(Text(f"not measured {' '.join(which)}: {what}"))
