"""Pictures of results, drawn from the JSON files alone: time, tax, and what ran when.

``python -m ulysses_ops.tools.plots docs/results/h200-x2`` draws what the files of a folder have:
``block_time.png`` and ``block_tax.png`` from ``block.json``, ``block_timeline.png`` from
``block_timeline.json``, ``step_time.png`` and ``step_tax.png`` from all ``step_*.json``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ulysses_ops.tools.block_table import OTHER_SCHEDULES, TITLES
from ulysses_ops.tools.block_variants import COMPUTE, NAIVE, OURS, VARIANTS
from ulysses_ops.tools.kept_rows import describe_commits
from ulysses_ops.tools.layer_variants import PLANNED
from ulysses_ops.tools.out_folder import refuse_folder
from ulysses_ops.tools.results import Row, read_results, rows_from_json
from ulysses_ops.tools.step_rows import OP as STEP
from ulysses_ops.tools.step_table import STEP_TITLES
from ulysses_ops.tools.step_variants import STEP_VARIANTS
from ulysses_ops.tools.timeline import Kind, Timeline

BLOCK = "DiT block"
GROUP = 0.8  # width of all bars of a shape
COLOURS: dict[Kind, str] = {"kernel": "tab:blue", "exchange": "tab:red", "copy": "tab:orange"}
SHOWN = tuple(f"{name}/graph" for name in (COMPUTE, OURS, PLANNED, NAIVE, "packed", "zero-CTA"))

ByModel = dict[str, dict[str, Row]]
# By model and variant: a figure, and its quartiles.
Heights = dict[str, dict[str, tuple[float | None, tuple[float, float] | None]]]


def rows_by_model(content: Mapping[str, Any], op: str, mode: str) -> ByModel:
    """Rows of blocks or steps in one mode, by model and variant, models from fast to slow."""
    found: ByModel = {}
    for row in rows_from_json(content.get("rows", [])):
        if row.op == op and row.mode == mode and row.details:
            found.setdefault(row.model, {})[row.details["variant"]] = row

    def slowest(model: str) -> float:
        return max(row.median_us or 0.0 for row in found[model].values())

    return {model: found[model] for model in sorted(found, key=slowest)}


def draw_results(folder: Path, out: Path) -> list[Path]:
    """Draw every picture that the files of a folder allow.

    Args:
        folder: ``docs/results/<gpu>-x<count>``.
        out: Where the pictures go.

    Returns:
        The pictures that were written.

    Raises:
        ImportError: matplotlib is not installed.
    """
    written = []
    block, timeline = folder / "block.json", folder / "block_timeline.json"
    out.mkdir(parents=True, exist_ok=True)
    if block.exists():
        written += _draw_bars_of(read_results(block), "block", BLOCK, out)
    if timeline.exists():
        content = read_results(timeline)
        lines = {key: Timeline.from_json(entry) for key, entry in content["timelines"].items()}
        draw_timelines(lines, _caption(content, "rank 0"), out / "block_timeline.png")
        written.append(out / "block_timeline.png")
    steps = [read_results(path) for path in sorted(folder.glob(f"{STEP}_*.json"))]
    if steps:
        rows = [row for content in steps for row in content.get("rows", [])]
        written += _draw_bars_of({**steps[-1], "rows": rows}, STEP, "denoising step", out)
    return written


def _draw_bars_of(content: Mapping[str, Any], op: str, what: str, out: Path) -> list[Path]:
    """Times and taxes of blocks or steps."""
    mode = "graph" if rows_by_model(content, op, "graph") else "eager"
    rows = rows_by_model(content, op, mode)
    if not rows:
        return []
    paths = [out / f"{op}_time.png", out / f"{op}_tax.png"]
    draw_times(rows, what, _caption(content, mode), paths[0])
    draw_tax(rows, what, _caption(content, mode), paths[1])
    return paths


def _caption(content: Mapping[str, Any], more: str) -> str:
    where = "CPU" if content["gpu"] == "cpu" else f"{content['gpu_count']}x {content['gpu']}"
    commit = describe_commits(content)
    return f"{where}, torch {content['torch']}, NCCL {content['nccl']}, {commit}, {more}"


def draw_times(rows: ByModel, what: str, caption: str, path: Path) -> None:
    """Median time of a block or step by shape, one bar a variant, on a logarithmic scale."""
    figure, axes = _new_picture(1, (11.0, 5.5))
    times: Heights = {
        model: {name: (row.median_us, None) for name, row in by.items()}
        for model, by in rows.items()
    }
    _draw_bars(axes[0], rows, times, what)
    axes[0].set_yscale("log")
    axes[0].set_ylabel(f"time of a {what}, us, slowest rank")
    _save(figure, axes[0], f"{what}: {caption}", path)


def draw_tax(rows: ByModel, what: str, caption: str, path: Path) -> None:
    """Communication tax by shape, one bar a variant, with the quartiles of the rounds."""
    figure, axes = _new_picture(1, (11.0, 5.5))
    taxes: Heights = {
        model: {
            name: (row.tax_percent, row.tax_quartiles)
            for name, row in by.items()
            if row.tax_percent is not None
        }
        for model, by in rows.items()
    }
    _draw_bars(axes[0], rows, taxes, what)
    axes[0].axhline(0.0, color="k", linewidth=0.8)
    axes[0].set_ylabel("time over compute only, %")
    _save(figure, axes[0], f"Communication tax of a {what}: {caption}", path)


def _draw_bars(axes: Any, rows: ByModel, heights: Heights, what: str) -> None:
    # More than ten would share colours, and the layer's other schedules have a table.
    drawn = {name for by in heights.values() for name in by} - OTHER_SCHEDULES
    titles = TITLES if what == BLOCK else STEP_TITLES
    known = dict.fromkeys([*(v.name for v in VARIANTS), *(v.name for v in STEP_VARIANTS)])
    names = [name for name in known if name in drawn]
    width = GROUP / max(len(names), 1)
    for number, name in enumerate(names):
        spots, tops, below, above = [], [], [], []
        for place, model in enumerate(heights):
            top, quartiles = heights[model].get(name, (None, None))
            if top is None:
                continue
            low, high = quartiles or (top, top)
            spots.append(place - GROUP / 2 + (number + 0.5) * width)
            tops.append(top)
            below.append(max(top - low, 0.0))
            above.append(max(high - top, 0.0))
        has_range = any((*below, *above))
        error = [below, above] if has_range else None
        axes.bar(spots, tops, width, yerr=error, label=titles.get(name, name), capsize=2)
    axes.set_xticks(range(len(rows)))
    axes.set_xticklabels([_label(model, by) for model, by in rows.items()], fontsize=8)
    axes.legend(fontsize=8)


def _label(model: str, by_variant: Mapping[str, Row]) -> str:
    _, seq, heads, _ = next(iter(by_variant.values())).shape
    return model if f"S={seq}" in model else f"{model}\nS={seq}, H={heads}"


def draw_timelines(lines: Mapping[str, Timeline], caption: str, path: Path) -> None:
    """Kernels and copies of one step by stream, one panel a variant, all on one scale."""
    from matplotlib.patches import Patch

    shown = [key for key in SHOWN if key in lines] or list(lines)
    figure, panels = _new_picture(len(shown), (12.0, 1.6 + 1.7 * len(shown)))
    longest = max(lines[key].numbers()["step_us"] for key in shown)
    for axes, key in zip(panels, shown, strict=True):
        _draw_timeline(axes, key, lines[key])
        axes.set_xlim(0.0, longest * 1.01)
    panels[-1].set_xlabel("us since the first kernel of the step")
    marks = [Patch(color=colour, label=kind) for kind, colour in COLOURS.items()]
    panels[-1].legend(handles=marks, fontsize=7, ncols=len(marks))
    _save(figure, panels[0], caption, path)


def _draw_timeline(axes: Any, key: str, line: Timeline) -> None:
    streams = list(dict.fromkeys(activity.stream for activity in line.activities))
    for kind, colour in COLOURS.items():
        for lane, stream in enumerate(streams):
            spans = [
                (a.start_us, a.end_us - a.start_us)
                for a in line.activities
                if a.kind == kind and a.stream == stream
            ]
            axes.broken_barh(spans, (lane - 0.4, 0.8), facecolors=colour, edgecolor="white", lw=0.3)
    axes.set_yticks(range(len(streams)))
    axes.set_yticklabels([f"stream {stream}" for stream in streams], fontsize=7)
    axes.invert_yaxis()
    figures = line.numbers()
    told = ", ".join(
        f"{name.removesuffix('_us')} {figures[name]:,.0f}"
        for name in ("step_us", "compute_us", "exchange_us", "hidden_us", "exposed_us", "idle_us")
    )
    axes.text(0.0, 1.03, f"{key}: {told} us", transform=axes.transAxes, fontsize=8)


def _new_picture(panels: int, size: tuple[float, float]) -> tuple[Any, Sequence[Any]]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(panels, squeeze=False)[:, 0]
    for one in axes:
        one.spines[["top", "right"]].set_visible(False)
    return figure, list(axes)


def _save(figure: Any, axes: Any, title: str, path: Path) -> None:
    figure.suptitle(title, fontsize=9)
    axes.margins(x=0.01)
    figure.savefig(path)


def plot_results(
    folder: Annotated[Path, typer.Argument(help="Folder of results, docs/results/h200-x2, say.")],
    out: Annotated[Path | None, typer.Option(help="Where pictures go; beside the results.")] = None,
) -> None:
    """Draw pictures of the results in a folder."""
    refuse_folder(out or folder)
    try:
        written = draw_results(folder, out or folder)
    except ImportError as error:
        typer.echo("no pictures: pip install matplotlib", err=True)
        raise typer.Exit(1) from error
    for path in written:
        typer.echo(f"written: {path}")
    if not written:
        typer.echo(
            f"{folder}: neither block.json nor block_timeline.json nor step_*.json to draw",
            err=True,
        )
        raise typer.Exit(1)


def main() -> None:
    """Entry point."""
    typer.run(plot_results)


if __name__ == "__main__":
    main()
