"""Global tensors whose every element is told from its place, and what a rank holds of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ulysses_ops import UlyssesCommunicator, gather, scatter
from ulysses_ops.plan import Direction, Layout, layout_of_global
from ulysses_ops.reference import shard_of, window_of


def numbered(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Value = flat index; where the dtype is too small for that, its bytes are counted instead.

    Sub-byte patterns that a dtype has no value for are avoided: bool gets 0 and 1.
    """
    num_elems = 1
    for size in shape:
        num_elems *= size
    if dtype == torch.bool:
        return (torch.arange(num_elems) % 3 == 0).view(shape)
    if dtype.itemsize == 1 or not (dtype.is_floating_point or dtype.is_complex):
        return (
            (torch.arange(num_elems * dtype.itemsize) % 113).to(torch.uint8).view(dtype).view(shape)
        )
    return torch.arange(num_elems, dtype=torch.float64).to(dtype).view(shape)


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Equality of shape, dtype and every bit, for dtypes too that cannot be compared."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    flat = (t.contiguous().view(-1).view(torch.uint8) for t in (a, b))
    return torch.equal(*flat)


def layout_of(
    direction: Direction,
    whole: Tensor,
    world_size: int,
    seq_splits: Sequence[int] | None = None,
    head_splits: Sequence[int] | None = None,
) -> Layout:
    """Layout of the exchange of ``whole``."""
    return layout_of_global("test", direction, whole.shape, world_size, seq_splits, head_splits)


def check_service(comm: UlyssesCommunicator, addend: int = 0) -> None:
    """There and back are right; each communicator can have values of its own."""
    whole = numbered(1, 3 * comm.world_size, 2 * comm.world_size, 2) + addend
    layout = layout_of("scatter", whole, comm.world_size)
    x = shard_of(whole, layout, comm.rank)
    y = scatter(x, comm)
    assert torch.equal(y, window_of(whole, layout, comm.rank))
    assert torch.equal(gather(y, comm), x)
