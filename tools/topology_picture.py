"""A picture of how GPUs are joined: as text for Graphviz, or drawn by matplotlib."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from ulysses_ops.facts import Topology
from ulysses_ops.obstacles import pair_faults, pairs_by_ends
from ulysses_ops.tools.topology_table import in_order, joined_by, label

SWITCH = "NVSwitch"


@dataclass(frozen=True)
class Edge:
    """A line between two places; ``one_way`` if it serves the direction from a to b alone."""

    a: str
    b: str
    text: str
    one_way: bool = False


def links(topology: Topology) -> tuple[dict[str, str], list[Edge]]:
    """Return places (name -> what is written there) and the lines between them.

    GPUs of one switch are joined with the switch if every pair of them is connected; all other
    connected pairs get lines of their own.
    """
    gpus = in_order(topology)
    places = {label(gpu): f"{label(gpu)}\n{gpu.name.removeprefix('NVIDIA ')}" for gpu in gpus}
    good = {ends for ends, pair in pairs_by_ends(topology).items() if not pair_faults(pair)}
    switched = [gpu for gpu in gpus if gpu.has_switch]
    full = len(switched) > 1 and all(
        (a.uuid, b.uuid) in good for a in switched for b in switched if a is not b
    )
    edges = [Edge(label(gpu), SWITCH, f"NV{gpu.nvlinks.value}") for gpu in switched if full]
    if full:
        places[SWITCH] = SWITCH
    for number, a in enumerate(gpus):
        for b in gpus[number + 1 :]:
            if full and a in switched and b in switched:
                continue
            there, back = (a.uuid, b.uuid) in good, (b.uuid, a.uuid) in good
            first, second = (a, b) if there else (b, a)
            if there or back:
                text = joined_by(first, second)
                edges.append(Edge(label(first), label(second), text, one_way=there != back))
    return places, edges


def to_dot(topology: Topology) -> str:
    """Write the picture in the language of Graphviz."""
    places, edges = links(topology)
    lines = ["digraph topology {", "  edge [dir=none];", "  node [shape=box];"]
    for name, text in places.items():
        shape = ", shape=ellipse" if name == SWITCH else ""
        written = text.replace("\n", "\\n").replace('"', "'")
        lines.append(f'  "{name}" [label="{written}"{shape}];')
    for edge in edges:
        style = ", dir=forward, style=dashed, color=red" if edge.one_way else ""
        lines.append(f'  "{edge.a}" -> "{edge.b}" [label="{edge.text}"{style}];')
    return "\n".join([*lines, "}", ""])


def draw(topology: Topology, path: Path) -> None:
    """Draw the picture into a file of the type that its name says.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: matplotlib knows no such type of file.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    places, edges = links(topology)
    around = [name for name in places if name != SWITCH]
    spots = {
        name: (math.sin(2 * math.pi * i / len(around)), math.cos(2 * math.pi * i / len(around)))
        for i, name in enumerate(around)
    }
    spots[SWITCH] = (0.0, 0.0)
    figure = Figure(figsize=(7, 7))
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set_axis_off()
    axes.set_xlim(-1.4, 1.4)
    axes.set_ylim(-1.4, 1.4)
    for edge in edges:
        (x0, y0), (x1, y1) = spots[edge.a], spots[edge.b]
        arrow = {
            "arrowstyle": "->" if edge.one_way else "-",
            "color": "red" if edge.one_way else "k",
        }
        axes.annotate("", (x1, y1), (x0, y0), arrowprops=arrow)
        axes.text((x0 + x1) / 2, (y0 + y1) / 2, edge.text, ha="center", color="green")
    for name, text in places.items():
        box = {"boxstyle": "round", "facecolor": "white"}
        axes.text(*spots[name], text, ha="center", va="center", bbox=box)
    figure.savefig(path)
