"""Attention whose queries are divided by heads, and whose keys and values every rank has in full.

What heads cannot divide (the latents of MLA, a single KV head, indexer keys) is gathered along the
sequence, while queries are scattered by heads as always:

    q_r   = scatter(q)                (B, S_global, H_r, D)
    c     = all_gather(c_local)       (B, S_global, 1, C), the same on every rank
    out   = gather(attend(q_r, c))    (B, S_local, H, value_dim)

A row of latents is C elements, where its keys and values would be ``H * (D + value_dim)``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from .branches import Branches, Fork
from .communicator import UlyssesCommunicator
from .exchange import Exchange, check_source
from .functional import all_heads
from .kinds import check_callable, check_kind, check_tensors, is_whole, shown
from .names import check_communicator
from .plan import as_tuple, checked_splits, even_splits, layout_of_source
from .window_spec import WindowSpec
from .windows import refuse, reserve

Source = Tensor | Callable[[], Tensor]
OP = "mixed_attention"


@lru_cache(maxsize=1024)
def mixed_spec(
    name: str,
    shape: torch.Size,
    dtype: torch.dtype,
    rank: int,
    seq_splits: tuple[int, ...],
    head_splits: tuple[int, ...] | None,
    channel: str,
) -> WindowSpec:
    """Spec for a local shape: by heads, or in full where there are no head splits."""
    world_size = len(seq_splits)
    by_heads = (head_splits, None)
    heads = all_heads(shape, world_size) if head_splits is None else by_heads
    layout = layout_of_source(OP, "scatter", shape, rank, world_size, seq_splits, *heads)
    return WindowSpec.of_layout(name, layout, dtype, channel)


def mixed_attention(
    q: Source,
    shared: Sequence[Source],
    comm: UlyssesCommunicator,
    *,
    attend: Callable[..., Tensor],
    value_dim: int,
    beside: Sequence[Callable[[], Tensor]] = (),
    seq_splits: Sequence[int] | None = None,
    head_splits: Sequence[int] | None = None,
    copy_out: bool = True,
    name: str = "mixed",
) -> Tensor:
    """Attend with this rank's heads of all queries, over what every rank has of all rows.

    Sources that are functions run on streams of their own, forked here and joined before
    ``attend``: what is shared is made and sent first, and travels under the queries' projection. So
    do the functions ``beside``, which may exchange as well (an indexer gathers its keys, selects
    rows, and gathers the choice); their exchanges leave behind those of the sources.

    Args:
        q: ``(B, S_local, H, D)``, or a function that returns it.
        shared: What all heads share, ``(B, S_local, H_c, C)`` each, or functions.
        comm: An open communicator.
        attend: ``attend(q, *shared, *beside)`` with ``(B, S_global, H_local, D)``, the gathered
            ``(B, S_global, H_c, C)`` and what the functions ``beside`` returned; gives
            ``(B, S_global, H_local, value_dim)``. Not called on a rank without heads or rows.
        value_dim: Features of a head of the result.
        beside: Functions that return what ``attend`` needs besides.
        seq_splits: Rows of each rank, some may be 0; ``(S_local,) * world_size`` when left out.
        head_splits: Query heads of each rank; as even as it goes when left out.
        copy_out: Return a tensor of the caller's own, and not the window itself.
        name: Layers that share it, and their shapes, share windows.

    Returns:
        ``(B, S_local, H, value_dim)``, ready on the current stream.

    Raises:
        ValueError: shapes, splits, dtypes or devices are wrong; raised before anything is sent, on
            all ranks if they are about to meet over these shapes.
        UlyssesError: closed, or a capture needs windows that are not reserved.

    Collective: every rank calls it with matching shapes, in the same order. No gradients: windows
    have none; with gradients call ``scatter``, ``all_gather`` and ``gather``.
    """
    _check_kinds(q, shared, comm, attend, beside, value_dim)
    check_kind(OP, "name", name, str, "text")
    check_kind(OP, "copy_out", copy_out, bool, "True or False")
    sources = [q, *shared]
    with Exchange(comm) as exchange, Fork(Branches.of(comm)) as fork:
        # Copies leave in order, so what is ready first comes first: queries last.
        order = [*range(1, len(sources)), 0]
        made: dict[int, Tensor] = {}
        for number in order:
            with fork.branch(number):
                source = sources[number]
                made[number] = source if isinstance(source, Tensor) else source()
        tensors = [made[number] for number in range(len(sources))]
        check_tensors(OP, **{f"source_{number}": x for number, x in enumerate(tensors)})
        specs, out_spec = _specs(tensors, comm, value_dim, seq_splits, head_splits, name)
        *windows, out_window = reserve(comm, [*specs, out_spec])
        for x, window in zip(tensors, windows, strict=True):  # all, before the first one leaves
            check_source(comm, window, x, None, "scatter_into")
        for number in order:
            with fork.branch(number):
                exchange.send(tensors[number], windows[number])
        extra = []
        for number, work in enumerate(beside, start=len(sources)):
            with fork.branch(number):
                extra.append(fork.hand_over(work()))
    arrived = [window.tensor for window in windows]
    attended = arrived[0].new_empty((*arrived[0].shape[:3], value_dim))
    if attended.numel():
        attended = attend(*arrived, *extra)
    with exchange:
        exchange.send(attended, out_window)
    return out_window.tensor.clone() if copy_out else out_window.tensor


def _check_kinds(
    q: object, shared: object, comm: object, attend: object, beside: object, value_dim: object
) -> None:
    """Refuse what is of another kind, before any source is made."""
    check_communicator(OP, comm)
    check_callable(OP, "attend", attend, "a function of what arrived")
    for name, given in (("shared", shared), ("beside", beside)):
        if not isinstance(given, list | tuple):
            message = f"{OP}: {name}={shown(given)} must be a list"
            raise ValueError(message)
    for name, source in (("q", q), *(("each of shared", x) for x in shared)):  # type: ignore[attr-defined]
        if not isinstance(source, Tensor):
            check_callable(OP, name, source, "a tensor, or a function that returns one")
    for work in beside:  # type: ignore[attr-defined]
        check_callable(OP, "each of beside", work, "a function")
    if not is_whole(value_dim) or value_dim < 1:  # type: ignore[operator]
        message = f"{OP}: value_dim={shown(value_dim)} must be a whole number from 1"
        raise ValueError(message)


def _specs(
    tensors: Sequence[Tensor],
    comm: UlyssesCommunicator,
    value_dim: int,
    seq_splits: Sequence[int] | None,
    head_splits: Sequence[int] | None,
    name: str,
) -> tuple[list[WindowSpec], WindowSpec]:
    """Specs of what is sent, one channel, and of the way back."""
    world_size, rank = comm.world_size, comm.rank
    for x in tensors:
        if x.dim() != 4:
            message = f"{OP}: sources must have shape (B, S_local, H, D), got {list(x.shape)}"
            raise ValueError(message)
    queries = tensors[0]
    given = (queries.shape[1],) * world_size if seq_splits is None else seq_splits
    splits = checked_splits(OP, "seq", given, None, world_size)
    heads = checked_splits(
        OP,
        "head",
        as_tuple(head_splits) or even_splits(queries.shape[2], world_size),
        queries.shape[2],
        world_size,
    )

    def spec(number: int, x: Tensor, shape: torch.Size) -> WindowSpec:
        by_heads = heads if number == 0 else None
        where = (rank, splits, by_heads, f"{name}.in")
        return mixed_spec(f"{name}.{number}", shape, x.dtype, *where)

    batch = queries.shape[0]
    declared = [torch.Size((batch, splits[rank], *x.shape[2:])) for x in tensors]
    specs = [spec(number, x, declared[number]) for number, x in enumerate(tensors)]
    out_shape = (*specs[0].shape[:3], value_dim)
    out = WindowSpec(f"{name}.out", "gather", out_shape, queries.dtype, None, splits, heads)
    rows = [x.shape[1] for x in tensors]
    if any(count != splits[rank] for count in rows):
        message = (
            f"{OP}: rank {rank} holds {rows} rows of queries and shared sources, "
            f"seq_splits={list(splits)} give it {splits[rank]}; give the rows that all ranks hold"
        )
        refuse(comm, [*specs, out], message)
    batches = [x.shape[0] for x in tensors]
    if any(count != batch for count in batches):
        message = (
            f"{OP}: batches of queries and shared sources are {batches} on rank {rank}; give all "
            f"of one batch"
        )
        refuse(comm, [*specs, out], message)
    return specs, out
