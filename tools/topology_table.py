"""A topology and the verdict on it as a page that a person reads at a glance."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ulysses_ops.facts import Gpu, Pair, Reading, Topology
from ulysses_ops.obstacles import pair_faults
from ulysses_ops.tools.pair_bandwidth import FLAT, PairRate
from ulysses_ops.tools.topology_verdict import Verdict, condensed

UNKNOWN = "??"
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
        console.print(_gpu_table(topology))
    if topology.pairs:
        console.print(_pair_table(topology))
        console.print(Text(LEGEND, style="dim"))
    print_verdict(console, verdict)


def print_verdict(console: Console, verdict: Verdict) -> None:
    """Print the verdict in one line, then why and what to do."""
    page = Table.grid(padding=(0, 2))
    page.add_column()
    page.add_column(overflow="fold")
    line = Text(verdict.word, style=COLOURS[verdict.word])
    line.append(f": {verdict.line}", style="default")
    page.add_row("verdict", line)
    causes = condensed(verdict.reasons)
    is_said = bool(causes) and verdict.line.startswith(causes[0])
    for name, lines in (
        ("why", causes[1:] if is_said else causes),
        ("note", verdict.warnings),
        ("could", verdict.suggestions),
        ("do", verdict.advice),
    ):
        for text in lines:
            page.add_row(name, Text(text))
    console.print(page)


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


def _gpu_table(topology: Topology) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name, justify in (
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
    ):
        table.add_column(name, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for gpu in in_order(topology):
        memory = gpu.memory_bytes.value
        table.add_row(
            "-" if gpu.cuda_ordinal is None else str(gpu.cuda_ordinal),
            str(gpu.nvml_index),
            gpu.name.removeprefix("NVIDIA "),
            (gpu.pci_bus_id or UNKNOWN)[4:],
            _shown(gpu.compute_capability),
            str(memory // GIB) if isinstance(memory, int) else UNKNOWN,
            _links(gpu),
            _shown(gpu.numa_node),
            _shown(gpu.cpu_affinity),
            _state(gpu),
        )
    return table


def _links(gpu: Gpu) -> str:
    if gpu.nvlinks.value is None:
        return UNKNOWN
    if not gpu.nvlinks.value:
        return "none"
    rate = gpu.nvlink_mbps.value
    speed = f" {rate / 1000:.1f} GB/s" if isinstance(rate, int) else ""
    version = f" v{gpu.nvlink_version.value}" if gpu.nvlink_version.value is not None else ""
    return f"{gpu.nvlinks.value}{version}{speed}{' switch' if gpu.has_switch else ''}"


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


def _pair_table(topology: Topology) -> Table:
    gpus = in_order(topology)
    pairs = {(pair.source_uuid, pair.target_uuid): pair for pair in topology.pairs}
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("from \\ to", justify="right")
    for gpu in gpus:
        table.add_column(label(gpu), justify="left")
    for source in gpus:
        cells = [
            Text("-")
            if source is target
            else _cell(source, target, pairs.get((source.uuid, target.uuid)))
            for target in gpus
        ]
        table.add_row(label(source), *cells)
    return table


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
    count = 1 + max(rate.target for rate in rates)
    flat = [rate for rate in rates if (rate.rows, rate.row_bytes) == (FLAT.rows, FLAT.row_bytes)]
    for both_ways in (False, True):
        by_way = {(r.source, r.target): r.gbs for r in flat if r.both_ways == both_ways}
        how = "both ways at once" if both_ways else "one way"
        console.print(f"GB/s of each direction, {FLAT.title}, {how}:")
        table = Table(box=None, pad_edge=False)
        table.add_column("from \\ to", justify="right")
        for target in range(count):
            table.add_column(str(target), justify="right")
        for source in range(count):
            cells = [by_way.get((source, target)) for target in range(count)]
            table.add_row(str(source), *("-" if c is None else f"{c:.1f}" for c in cells))
        console.print(table)
    table = Table(title="GB/s by form", box=None, pad_edge=False, title_justify="left")
    for name in (
        "rows",
        "row bytes",
        "one way, slowest pair",
        "fastest",
        "both ways, slowest pair",
    ):
        table.add_column(name, justify="right")
    table.add_column("fastest", justify="right")
    for rows, row_bytes in dict.fromkeys((rate.rows, rate.row_bytes) for rate in rates):
        same = [r for r in rates if (r.rows, r.row_bytes) == (rows, row_bytes)]
        ends = [
            f"{pick(r.gbs for r in same if r.both_ways == both):.1f}"
            for both in (False, True)
            for pick in (min, max)
        ]
        table.add_row(str(rows), str(row_bytes), *ends)
    console.print(table)
