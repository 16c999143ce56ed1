"""Attention over text and image rows in one sequence, and of tensors that are still to be computed.

Text that is sharded travels like image rows. Text that is replicated is not sent before attention,
since every rank has it: a rank writes its own heads of it beside the image rows that arrive. After
attention every rank gets all heads of all text rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from .attention import check_qkv, reserve_attention, sdpa, ulysses_attention
from .communicator import UlyssesCommunicator
from .exchange import check_source
from .functional import functional_spec
from .heads import HeadShare, share_heads
from .joint import JointSequence
from .kinds import check_callable, check_kind, check_sizes
from .names import check_communicator
from .ops import scatter
from .plan import Direction, as_tuple
from .values_first import (
    AttentionKernel,
    AttentionWindows,
    Producer,
    Producers,
    attend_functionally,
    attend_in_windows,
)
from .window_spec import WindowSpec
from .windows import refuse, reserve


def ulysses_joint_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    comm: UlyssesCommunicator,
    joint: JointSequence,
    *,
    attention: AttentionKernel = sdpa,
    mask: Tensor | None = None,
    head_splits: Sequence[int] | None = None,
) -> Tensor:
    """Attention over text and image, of which this rank holds a part.

    ``out = gather(attention(scatter(q), scatter(k), scatter(v)))`` over the rows of both.

    Args:
        q: ``(B, S_local, H, D)``, text and image of this rank in the order of the model.
        k: ``(B, S_local, H_kv, D)``; H is a multiple of ``H_kv``.
        v: As ``k``.
        comm: An open communicator.
        joint: Who holds what.
        attention: The kernel, on ``(B, S, heads, D)``; with ``mask`` it is called with that
            keyword.
        mask: Over all rows in the order of the model; see :meth:`JointSequence.arrange`.
        head_splits: As in :func:`ulysses_ops.ulysses_attention`.

    Returns:
        ``(B, S_local, H, D)``, rows as in ``q``, ready on the current stream.

    Raises:
        ValueError: shapes, splits, dtypes or devices are wrong; on every rank or on this rank alone
            as in :func:`ulysses_ops.ulysses_attention`.
        UlyssesError: closed, or a capture needs windows that are not reserved.

    Collective: every rank calls it with matching shapes, in the same order. Differentiable where an
    input requires grad; gradients are those of the sum of all ranks' losses, and those of a
    replicated row have to be added up over the ranks.

    Source: DeepSpeed-Ulysses, arXiv:2309.14509.
    """
    check_qkv("ulysses_joint_attention", q, k, v)
    check_communicator("ulysses_joint_attention", comm)
    check_kind("ulysses_joint_attention", "joint", joint, JointSequence, "a JointSequence")
    check_callable("ulysses_joint_attention", "attention", attention, "a function of q, k and v")
    check_sizes("ulysses_joint_attention", "head_splits", head_splits)
    attention = with_mask("ulysses_joint_attention", comm, joint, attention, mask)
    if joint.text_splits is not None:
        options: dict[str, Any] = {"seq_splits": joint.row_splits, "head_splits": head_splits}
        return ulysses_attention(q, k, v, comm, attention=attention, **options)
    share = share_heads(q.shape[2], k.shape[2], comm.world_size, as_tuple(head_splits))
    specs = _specs(joint, share, tuple(q.shape), tuple(k.shape), q.dtype)
    rows = joint.local_rows(comm.rank)
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    functional = needs_grad or torch.compiler.is_compiling()
    if not q.shape[1] == k.shape[1] == v.shape[1] == rows:
        message = (
            f"ulysses_joint_attention: rank {comm.rank} holds q {list(q.shape)}, "
            f"k {list(k.shape)}, v {list(v.shape)}, but {joint} gives it {rows} rows; shard as it "
            f"says"
        )
        # With the other ranks in their first meeting, which is another one without windows.
        refuse(comm, [_first_scatter(joint, share, k, comm)] if functional else specs, message)
    producers = (lambda: v, lambda: k, lambda: q)
    if functional:
        splits = joint.image_splits
        return attend_functionally(
            comm, producers, share, attention, replicated=joint, seq_splits=splits
        )
    windows = AttentionWindows(*reserve(comm, specs))
    # All of them before the first leaves: a refusal between two sends would leave one in flight.
    for x, window in ((v, windows.v), (k, windows.k), (q, windows.q)):
        check_source(comm, window, joint.split(x, comm.rank)[1], None, "scatter_into")
    return attend_in_windows(comm, producers, windows, share, attention, replicated=joint)


def attend_as_computed(
    comm: UlyssesCommunicator,
    v: Producer,
    k: Producer,
    q: Producer,
    *,
    num_heads: int | None = None,
    joint: JointSequence | None = None,
    attention: AttentionKernel = sdpa,
    mask: Tensor | None = None,
    head_splits: Sequence[int] | None = None,
    copy_out: bool = True,
) -> Tensor:
    """``out = gather(attention(scatter(q()), scatter(k()), scatter(v())))``, V first.

    ``v`` leaves while ``k`` is computed, ``k`` while ``q`` is: the copies hide behind projections,
    norms and rotations.

    Args:
        comm: An open communicator.
        v: Computes the values, ``(B, S_local, H_kv, D)``; may return a view of a fused projection.
        k: Computes the keys, of the same shape.
        q: Computes the queries, ``(B, S_local, H, D)``.
        num_heads: H; as many as ``v`` has when left out.
        joint: Who holds which rows of text and image; without it every rank holds ``S_local`` rows.
        attention: The kernel, as in :func:`ulysses_joint_attention`.
        mask: Likewise; it needs ``joint``.
        head_splits: As in :func:`ulysses_ops.ulysses_attention`.
        copy_out: Return a tensor of the caller's own. Without it the result may be a window, valid
            only until the next attention of this shape.

    Returns:
        ``(B, S_local, H, D)``, rows as in ``q()``, ready on the current stream.

    Raises:
        ValueError: shapes or splits are wrong. What is wrong with the values is raised before any
            rank waits; keys and queries are looked at when they are there, and then the
            communicator has to be closed where it uses the copy engines.
        UlyssesError: closed, or a capture needs windows that are not reserved.

    Collective: every rank calls it with matching shapes, in the same order. Where gradients are
    enabled or code is being compiled, the functional operators are used instead of windows.

    Source: DeepSpeed-Ulysses, arXiv:2309.14509.
    """
    if joint is not None:
        attention = with_mask("attend_as_computed", comm, joint, attention, mask)
    elif mask is not None:
        message = "attend_as_computed: a mask needs joint=, which says in what order the rows are"
        raise ValueError(message)
    values = v()
    batch, rows, kv_heads, head_dim = values.shape
    if joint is not None and rows != joint.local_rows(comm.rank):
        message = (
            f"attend_as_computed: rank {comm.rank} computes v {list(values.shape)}, but {joint} "
            f"gives it {joint.local_rows(comm.rank)} rows; shard as it says"
        )
        raise ValueError(message)
    heads = kv_heads if num_heads is None else num_heads
    share = share_heads(heads, kv_heads, comm.world_size, as_tuple(head_splits))
    producers: Producers = (lambda: values, k, q)
    replicated = joint if joint is not None and joint.text_splits is None else None
    splits = None if joint is None else joint.row_splits
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        if replicated is not None:
            splits = replicated.image_splits
        return attend_functionally(
            comm, producers, share, attention, replicated=replicated, seq_splits=splits
        )
    q_shape, kv_shape = (batch, rows, heads, head_dim), (batch, rows, kv_heads, head_dim)
    if replicated is None:
        options = {"seq_splits": splits, "head_splits": head_splits}
        windows = reserve_attention(comm, q_shape, kv_shape, values.dtype, **options)
    else:
        specs = _specs(replicated, share, q_shape, kv_shape, values.dtype)
        windows = AttentionWindows(*reserve(comm, specs))
    return attend_in_windows(
        comm, producers, windows, share, attention, replicated=replicated, copy_out=copy_out
    )


def replicate_rows(comm: UlyssesCommunicator, x: Tensor) -> Tensor:
    """Give every rank the rows of all ranks: ``y[b, p * R + r, e] = x_p[b, r, e]``.

    Args:
        comm: An open communicator.
        x: ``(B, R, E)``, the same shape on every rank.

    Returns:
        ``(B, R * world_size, E)``, owned by the caller, ready on the current stream.

    Raises:
        UlyssesError: closed, or a capture needs a window that is not reserved.

    Collective and differentiable, as :func:`ulysses_ops.scatter`: it is the scatter of one head
    that every rank has in its range.
    """
    ranks = comm.world_size
    one = x.unsqueeze(2)
    return scatter(one, comm, head_splits=(1,) * ranks, head_starts=(0,) * ranks).squeeze(2)


def with_mask(
    op: str,
    comm: UlyssesCommunicator,
    joint: JointSequence,
    attention: AttentionKernel,
    mask: Tensor | None,
) -> AttentionKernel:
    """The kernel with a mask over all rows in the order of the model; ``op`` names who refuses.

    Raises:
        ValueError: ``joint`` is of another number of ranks, or the mask of other rows.
    """
    if joint.world_size != comm.world_size:
        message = (
            f"{op}: joint is of {joint.world_size} ranks, the communicator of {comm.world_size}; "
            f"divide the rows over the ranks of the communicator"
        )
        raise ValueError(message)
    if mask is None:
        return attention
    rows = joint.total_rows
    is_mask = mask.dtype == torch.bool or mask.dtype.is_floating_point
    if not is_mask or (mask.dim() > 1 and mask.shape[-2] not in (1, rows)):
        message = (
            f"{op}: mask {list(mask.shape)} of {mask.dtype} must be boolean or added to scores, "
            f"and broadcast to (B, H, {rows}, {rows}), the rows of text and image together"
        )
        raise ValueError(message)
    masked = cast("Callable[..., Tensor]", attention)
    return partial(masked, mask=joint.arrange(mask))


def _first_scatter(
    joint: JointSequence, share: HeadShare, v: Tensor, comm: UlyssesCommunicator
) -> WindowSpec:
    """The exchange of V's image rows by the functional operator."""
    heads = (None, None) if share.is_even else (share.kv_splits, share.kv_starts)
    shape = torch.Size((v.shape[0], joint.image_splits[comm.rank], *v.shape[2:]))
    splits = (joint.image_splits, *heads)
    return functional_spec("scatter", shape, v.dtype, comm.rank, comm.world_size, splits)


def _specs(
    joint: JointSequence,
    share: HeadShare,
    q_shape: tuple[int, ...],
    kv_shape: tuple[int, ...],
    dtype: torch.dtype,
) -> list[WindowSpec]:
    """V, K, Q and the output's image and text rows, where text is replicated."""
    rows, ranks = joint.total_rows, joint.world_size

    def spec(name: str, x: tuple[int, ...], heads: Any, splits: Any, starts: Any) -> WindowSpec:
        direction: Direction = "gather" if name in ("out", "text") else "scatter"
        channel = "attention.out" if direction == "gather" else "attention.qkv"
        shape = (x[0], rows, x[2], x[3])
        ranges = (splits, heads[0], starts, heads[1])
        return WindowSpec(f"attention.{name}", direction, shape, dtype, channel, *ranges)

    image = (joint.image_splits, joint.image_starts())
    text = ((joint.text_rows,) * ranks, (joint.text_start,) * ranks)
    kv_heads, q_heads = (share.kv_splits, share.kv_starts), (share.q_splits, None)
    return [
        spec("v", kv_shape, kv_heads, *image),
        spec("k", kv_shape, kv_heads, *image),
        spec("q", q_shape, q_heads, *image),
        spec("out", q_shape, q_heads, *image),
        spec("text", q_shape, q_heads, *text),
    ]
