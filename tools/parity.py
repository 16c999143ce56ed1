"""Rows of small exchanges checked against the single-process references; no GPU needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ulysses_ops.attention import sdpa, ulysses_attention
from ulysses_ops.communicator import UlyssesCommunicator
from ulysses_ops.ops import gather, scatter
from ulysses_ops.reference import gather_reference, scatter_reference
from ulysses_ops.tools.launch import RankContext
from ulysses_ops.tools.results import Row
from ulysses_ops.tools.shapes import Shape
from ulysses_ops.tools.timing import Effort, Variant, measure


@dataclass(frozen=True)
class ParityJob:
    """Shapes and element types to check.

    Attributes:
        shapes: Those that cannot be split evenly are left out.
        dtypes: Names of torch dtypes.
        effort: How long to measure.
        transport: Transport to insist on.
    """

    shapes: tuple[Shape, ...]
    dtypes: tuple[str, ...]
    effort: Effort
    transport: str | None = None


@dataclass(frozen=True)
class _Case:
    op: str
    run: Callable[[], Tensor]
    expected: Tensor


def parity_rows(context: RankContext, job: ParityJob) -> list[Row]:
    """Check, then time. Collective."""
    rows = []
    comm = UlyssesCommunicator(
        device=context.device,
        transport=job.transport,
        name="parity",
        max_windows=32,
        allow_shared_devices=context.shares_devices,
    )
    with comm:
        for shape in job.shapes:
            for dtype in job.dtypes if shape.fits(context.world_size) else ():
                cases = _cases(context, comm, shape, getattr(torch, dtype))
                rows += [_row_of(context, comm, shape, dtype, case, job.effort) for case in cases]
    return rows


def _noise(shape: tuple[int, ...], context: RankContext, rank: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(77 + rank)
    return torch.randn(shape, generator=generator).to(dtype).to(context.device)


def _cases(
    context: RankContext, comm: UlyssesCommunicator, shape: Shape, dtype: torch.dtype
) -> list[_Case]:
    world, rank = context.world_size, context.rank
    rows = [_noise(shape.local_source(world), context, peer, dtype) for peer in range(world)]
    heads = [_noise(shape.local_window(world), context, peer, dtype) for peer in range(world)]
    cases = [
        _Case("scatter", lambda: scatter(rows[rank], comm), scatter_reference(rows)[rank]),
        _Case("gather", lambda: gather(heads[rank], comm), gather_reference(heads)[rank]),
    ]
    if dtype.is_floating_point:
        # q, k and v alike, so that a reference of one tensor does; the kernel sees the same heads.
        attended = [sdpa(part, part, part) for part in scatter_reference(rows)]
        cases.append(
            _Case(
                "attention",
                lambda: ulysses_attention(rows[rank], rows[rank], rows[rank], comm),
                gather_reference(attended)[rank],
            )
        )
    return cases


def _row_of(
    context: RankContext,
    comm: UlyssesCommunicator,
    shape: Shape,
    dtype: str,
    case: _Case,
    effort: Effort,
) -> Row:
    what = f"{shape.title}, {dtype}, {case.op}"
    context.line_up(what)
    found = case.run()
    context.finish(what)
    exact = context.agree(torch.equal(found, case.expected))
    times = measure(context, {case.op: Variant(case.run)}, effort, what)[case.op]
    return Row.of_times(
        case.op,
        shape,
        world_size=context.world_size,
        transport=comm.transport,
        mode="eager",
        times=times,
        exact=exact,
        bytes_per_peer=shape.bytes_per_peer(context.world_size, found.element_size()),
        is_exchange=case.op != "attention",
        dtype=dtype,
    )
