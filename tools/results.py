"""Results as JSON files: machine facts and rows, written by the tools alone."""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

import torch

from ulysses_ops.kinds import is_whole, shown
from ulysses_ops.tools.revision import read_commit
from ulysses_ops.tools.shapes import Shape
from ulysses_ops.tools.timing import Summary
from ulysses_ops.topology import probe

Mode = Literal["eager", "graph"]

MISSING = object()
OR_NONE = (str, type(None))
# What each file begins with, and what some hold.
HEADER: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("gpu", "torch", "date"), (str,)),
    "gpu_count": (int,),
    **dict.fromkeys(("driver", "cuda", "nccl", "commit"), OR_NONE),
}
SOMETIMES: dict[str, tuple[type, ...]] = {
    "rows": (list,),
    "transport": (str,),
    "insisted": (dict,),
    "finished": (list, dict),
    "not_run": (dict, list),  # reasons by what did not run; of tests, their names
}
# What JSON has where a row's annotation says so.
OF_ROWS: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "str | None": OR_NONE,
    "int | None": (int, type(None)),
    "float | None": (int, float, type(None)),
    "bool | None": (bool, type(None)),
    "tuple[int, int, int, int]": (tuple,),
    "tuple[float, float] | None": (tuple, type(None)),
    "dict[str, Any] | None": (dict, type(None)),
}


@dataclass(frozen=True)
class Machine:
    """Where something ran. ``gpu`` is ``cpu`` where no GPU took part."""

    host: str
    gpu: str
    gpu_count: int
    driver: str | None
    torch: str
    cuda: str | None
    nccl: str | None
    python: str

    @property
    def folder(self) -> str:
        """``<gpu>-x<count>`` as in ``docs/results``, or ``cpu``."""
        return "cpu" if self.gpu == "cpu" else f"{gpu_slug(self.gpu)}-x{self.gpu_count}"


@dataclass(frozen=True)
class Row:
    """One measured or checked operation; what does not apply is ``None``.

    Attributes:
        op: What was run.
        shape: ``[B, S_global, H, D]``.
        dtype: Element type.
        world_size: Number of ranks.
        transport: What moved the bytes; ``"none"`` for computation alone.
        mode: Launched call by call, or replayed as part of a graph.
        median_us: Median time a call of the slowest rank, in microseconds.
        p99_us: 99th percentile of the slowest rank.
        exact: Whether the output was found bit-exact; ``None`` where there is nothing to compare.
        bytes_per_peer: Bytes sent to each peer.
        model: Whose shape it is.
        spread_us: Smallest and largest median of a round.
        samples: Samples of a rank.
        algbw_gbs: All bytes of a rank's tensor over the median, 1e9 bytes a second.
        busbw_gbs: Bytes sent to peers over the median.
        percent_of_flat: Of the speed of flat peer copies of the same bytes in the same rounds.
        nccl_us: Median of NCCL in the same mode.
        x_nccl_eager: NCCL's eager time over this, paired by round.
        x_nccl_graph: NCCL's time in a graph over this, paired by round.
        tax_percent: Time added to computation alone, paired by round: the median of the rounds.
        tax_quartiles: Its first and third quartile.
        hidden_percent: Of the exchange alone, what other work beside it hides, paired by round.
        hidden_quartiles: Its first and third quartile.
        slowest_rank: The rank whose median this is.
        host_us: Time of the host to enqueue one call, in microseconds, the slowest rank's median.
        launches: Launches of kernels, copies and graphs that the host makes for one call.
        peak_bytes: GPU memory beside input and weights: windows, buffers, and the peak of a call.
        details: What only this operation has.
        commit: Commit that was run; that of the file where it is left out.
    """

    op: str
    shape: tuple[int, int, int, int]
    dtype: str
    world_size: int
    transport: str
    mode: Mode
    median_us: float | None
    p99_us: float | None
    exact: bool | None
    bytes_per_peer: int
    model: str = ""
    spread_us: tuple[float, float] | None = None
    samples: int | None = None
    algbw_gbs: float | None = None
    busbw_gbs: float | None = None
    percent_of_flat: float | None = None
    nccl_us: float | None = None
    x_nccl_eager: float | None = None
    x_nccl_graph: float | None = None
    tax_percent: float | None = None
    tax_quartiles: tuple[float, float] | None = None
    hidden_percent: float | None = None
    hidden_quartiles: tuple[float, float] | None = None
    slowest_rank: int | None = None
    host_us: float | None = None
    launches: int | None = None
    peak_bytes: int | None = None
    details: dict[str, Any] | None = None
    commit: str | None = None

    @classmethod
    def of_times(
        cls,
        op: str,
        shape: Shape,
        *,
        world_size: int,
        transport: str,
        mode: Mode,
        times: Summary,
        exact: bool | None,
        bytes_per_peer: int,
        dtype: str = "bfloat16",
        is_exchange: bool = True,
        **more: Any,
    ) -> Row:
        """A row of measured times; an exchange alone has bandwidths, too."""
        to_peers = bytes_per_peer * (world_size - 1) if is_exchange else 0
        seconds = times.median_us * 1e-6
        return cls(
            op,
            shape.dims,
            dtype,
            world_size,
            transport,
            mode,
            times.median_us,
            times.p99_us,
            exact,
            bytes_per_peer,
            model=shape.title,
            spread_us=times.spread_us,
            samples=times.samples,
            slowest_rank=times.slowest_rank,
            algbw_gbs=bytes_per_peer * world_size / seconds / 1e9 if to_peers else None,
            busbw_gbs=to_peers / seconds / 1e9 if to_peers else None,
            **more,
        )


def gpu_slug(name: str) -> str:
    """Name of a GPU as part of a path: ``NVIDIA H200`` is ``h200``."""
    words = re.findall(r"[a-z0-9]+", name.lower())
    return "-".join(word for word in words if word not in ("nvidia", "geforce", "tesla")) or "gpu"


def read_machine(device: torch.device, gpu_count: int) -> Machine:
    """Facts about this machine; asks the GPU of a process that uses it already."""
    on_gpu = device.type == "cuda"
    nccl = torch.cuda.nccl.version() if on_gpu else None
    driver = probe(device).driver_version.value if on_gpu else None
    return Machine(
        host=platform.node(),
        gpu=torch.cuda.get_device_name(device) if on_gpu else "cpu",
        gpu_count=gpu_count,
        driver=None if driver is None else str(driver),
        torch=str(torch.__version__),
        cuda=torch.version.cuda,
        nccl=None if nccl is None else ".".join(str(part) for part in nccl),
        python=platform.python_version(),
    )


def write_results(
    folder: Path,
    name: str,
    machine: Machine,
    commit: str | None,
    content: dict[str, Any],
) -> Path:
    """Write ``<folder>/<gpu>-x<count>/<name>.json`` and return its path.

    The file is replaced whole: whoever reads it while a benchmark goes on finds valid JSON.

    Args:
        folder: ``docs/results``, usually.
        name: What was run, without suffix.
        machine: Where it ran.
        commit: What was run; read from git when ``None``.
        content: More entries, after the header.
    """
    path = folder / machine.folder / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    header = {
        **asdict(machine),
        "commit": commit or read_commit(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps({**header, **content}, indent=1) + "\n")
    unfinished.replace(path)
    return path


def read_results(path: Path, *, needs_rows: bool = False) -> dict[str, Any]:
    """What :func:`write_results` has written.

    Args:
        path: The file.
        needs_rows: Whether a file without rows will not do.

    Raises:
        ValueError: it cannot be read, or is not as results are; the text names the file.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        why = _why_no_results(content, needs_rows)
    except (OSError, ValueError) as error:  # what is no JSON, and what is no text, are both such
        why = str(error)
    if why:
        message = f"results: {path} is no file of results: {why}; mend it or move it away"
        raise ValueError(message)
    found: dict[str, Any] = content
    return found


def check_results(folder: Path, names: Iterable[str]) -> None:
    """Refuse a folder in which files that rows are to be added to are not as results are.

    It is known before ranks start; of which machine they are is not, so all are looked at.

    Raises:
        ValueError: the first that is not, by its path.
    """
    for name in names:
        for path in sorted(folder.glob(f"*/{name}.json")):
            read_results(path, needs_rows=True)


def _why_no_results(content: object, needs_rows: bool) -> str:
    if not isinstance(content, dict):
        return "it holds no object"
    for name, kinds in HEADER.items():
        if not isinstance(content.get(name, MISSING), kinds):
            return f"'{name}' is {shown(content[name]) if name in content else 'missing'}"
    for name, kinds in SOMETIMES.items():
        if name in content and not isinstance(content[name], kinds):
            return f"'{name}' is {shown(content[name])}"
    if needs_rows and "rows" not in content:
        return "'rows' is missing"
    rows_from_json(content.get("rows", []))
    return ""


def rows_to_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Rows for :func:`write_results`; what does not apply is left out, ``exact`` never is."""
    kept = ("median_us", "p99_us", "exact")
    return [
        {key: _rounded(v) for key, v in asdict(row).items() if v is not None or key in kept}
        for row in rows
    ]


def rows_from_json(entries: Sequence[dict[str, Any]]) -> list[Row]:
    """Rows of a results file.

    Raises:
        ValueError: an entry has a field that no row has, lacks one that every row has, or has
            something else in it than rows have.
    """
    known = {field.name for field in fields(Row)}
    rows = []
    for entry in entries:
        if not isinstance(entry, dict):
            message = f"results: a row is {shown(entry)}, and must be an object"
            raise ValueError(message)
        unknown = sorted(set(entry) - known)
        if unknown:
            message = (
                f"results: a row has unknown fields {unknown}; it was written by another version"
            )
            raise ValueError(message)
        lists = {key: tuple(v) for key, v in entry.items() if isinstance(v, list)}
        try:
            rows.append(Row(**{**entry, **lists}))
        except TypeError as error:
            message = f"results: a row is incomplete: {error}"
            raise ValueError(message) from error
        _check_row(rows[-1])
    return rows


def _check_row(row: Row) -> None:
    for field in fields(Row):
        value = getattr(row, field.name)
        if not isinstance(value, OF_ROWS.get(str(field.type), object)):
            message = f"results: a row of {shown(row.op)} has {field.name}={shown(value)}"
            raise ValueError(message)
    if len(row.shape) != 4 or not all(is_whole(size) for size in row.shape):
        message = f"results: a row of {shown(row.op)} has shape={list(row.shape)}"
        raise ValueError(message)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 3)
    if isinstance(value, tuple):
        return [_rounded(item) for item in value]
    return value
