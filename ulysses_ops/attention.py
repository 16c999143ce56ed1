"""Attention over a sequence that is sharded between ranks, values first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from .communicator import UlyssesCommunicator
from .exchange import check_source
from .functional import FUNCTIONAL_NAMES
from .heads import share_heads
from .kinds import (
    check_callable,
    check_dense,
    check_kind,
    check_sizes,
    check_tensors,
    shown,
)
from .names import check_communicator
from .plan import as_tuple, checked_splits, layout_of_source
from .values_first import (
    AttentionKernel,
    AttentionWindows,
    attend_functionally,
    attend_in_windows,
)
from .window_spec import WindowSpec
from .windows import refuse, reserve


def qkv_specs(
    comm: UlyssesCommunicator,
    q_shape: tuple[int, ...],
    kv_shape: tuple[int, ...],
    dtype: torch.dtype,
    *,
    seq_splits: Sequence[int] | None = None,
    head_splits: Sequence[int] | None = None,
) -> tuple[WindowSpec, WindowSpec, WindowSpec]:
    """Specs of V, K and Q, in this order, for local shapes ``(B, S_local, H, D)``; one channel."""
    share = share_heads(q_shape[2], kv_shape[2], comm.world_size, as_tuple(head_splits))

    def spec(letter: str, shape: tuple[int, ...]) -> WindowSpec:
        heads = (share.q_splits, None) if letter == "q" else (share.kv_splits, share.kv_starts)
        layout = layout_of_source(
            "ulysses_attention", "scatter", shape, comm.rank, comm.world_size, seq_splits, *heads
        )
        return WindowSpec.of_layout(f"attention.{letter}", layout, dtype, "attention.qkv")

    return spec("v", kv_shape), spec("k", kv_shape), spec("q", q_shape)


def out_specs(queries: WindowSpec, chunks: int = 1) -> list[WindowSpec]:
    """Specs of the attention's output, by chunks of heads, each of which is a channel.

    One chunk goes the way back of the queries; more of them need even heads.
    """
    if chunks == 1:
        return [replace(queries, name="attention.out", direction="gather", channel=None)]
    batch, seq, heads, head_dim = queries.shape
    shape = (batch, seq, heads // chunks, head_dim)
    return [
        WindowSpec(
            f"attention.out.{chunk}/{chunks}",
            "gather",
            shape,
            queries.dtype,
            None,
            queries.seq_splits,
        )
        for chunk in range(chunks)
    ]


def reserve_attention(
    comm: UlyssesCommunicator,
    q_shape: tuple[int, ...],
    kv_shape: tuple[int, ...],
    dtype: torch.dtype,
    *,
    seq_splits: Sequence[int] | None = None,
    head_splits: Sequence[int] | None = None,
) -> AttentionWindows:
    """Reserve the windows of :func:`ulysses_attention` for local shapes ``(B, S_local, H, D)``.

    Splits are those of :func:`ulysses_attention`. Collective; see :func:`ulysses_ops.reserve` for
    what it raises.
    """
    check_communicator("reserve_attention", comm)
    for name, shape in (("q_shape", q_shape), ("kv_shape", kv_shape)):
        check_sizes("reserve_attention", name, shape, "four whole numbers, (B, S_local, H, D)")
        if shape is None or len(shape) != 4:
            message = f"reserve_attention: {name}={shape} must be (B, S_local, H, D)"
            raise ValueError(message)
    options = {"seq_splits": seq_splits, "head_splits": head_splits}
    specs = qkv_specs(comm, q_shape, kv_shape, dtype, **options)
    return AttentionWindows(*reserve(comm, [*specs, *out_specs(specs[2])]))


def sdpa(q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """``softmax(q k^T / sqrt(D) + mask) v`` by ``scaled_dot_product_attention``.

    Heads are in dimension 2. Fewer KV heads than query heads are shared between them (GQA).

    Args:
        q: ``(B, S, H, D)``.
        k: ``(B, S, H_kv, D)``.
        v: As ``k``.
        mask: Over the whole sequence, broadcast to ``(B, H, S, S)``: boolean (true: may attend) or
            added to the scores. ``functools.partial(sdpa, mask=mask)`` is a kernel with this mask.
    """
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return out.transpose(1, 2)


def ulysses_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    comm: UlyssesCommunicator,
    *,
    attention: AttentionKernel = sdpa,
    windows: AttentionWindows | None = None,
    copy_out: bool = True,
    seq_splits: Sequence[int] | None = None,
    head_splits: Sequence[int] | None = None,
    kv: Literal["sharded", "replicated"] = "sharded",
) -> Tensor:
    """Attention of sequence shards over the whole sequence.

    ``out = gather(attention(scatter(q), scatter(k), scatter(v)))``: each rank attends with its
    share of the heads. V leaves first, then K and Q, and one completion ends all three. Inputs may
    be views of a fused projection.

    Args:
        q: ``(B, S_local, H, D)``.
        k: ``(B, S_local, H_kv, D)``; H is a multiple of ``H_kv`` (GQA, MQA). A KV head goes to the
            ranks whose query heads read it, so ``H_kv`` may be smaller than ``comm.world_size``.
        v: As ``k``.
        comm: An open communicator.
        attention: The kernel, on ``(B, S_global, heads, D)``.
        windows: From :func:`reserve_attention`; looked up by shape when left out.
        copy_out: Return a tensor of the caller's own. Without it the result is the window itself:
            no copy, but valid only until the next attention of this shape.
        seq_splits: Rows held by each rank, some may be 0; ``(S_local,) * world_size`` when left
            out. See :func:`ulysses_ops.even_splits`.
        head_splits: Query heads for each rank; as even as it goes when left out, see
            :func:`ulysses_ops.heads.share_heads`.
        kv: ``"replicated"`` where every rank holds all keys and values, ``(B, S_kv, H_kv, D)``, as
            in cross-attention to a text: nothing is exchanged, since each rank can attend with all
            heads of its own rows.

    Returns:
        ``(B, S_local, H, D)``, ready on the current stream.

    Raises:
        ValueError: shapes, splits, dtypes or devices are wrong; raised before any rank waits. Where
            the rows of one rank alone are not those that ``seq_splits`` declare, all ranks raise it
            at the first call with these splits, and that rank alone later.
        UlyssesError: closed, or a capture needs windows that are not reserved.

    Collective: every rank calls it with matching shapes, in the same order; local with
    ``kv="replicated"``. Differentiable where an input requires grad; windows are then left alone.

    Source: DeepSpeed-Ulysses, arXiv:2309.14509.
    """
    check_qkv("ulysses_attention", q, k, v)
    check_communicator("ulysses_attention", comm)
    check_callable("ulysses_attention", "attention", attention, "a function of q, k and v")
    for name, splits in (("seq_splits", seq_splits), ("head_splits", head_splits)):
        check_sizes("ulysses_attention", name, splits)
    _check_kv(q, k, v, kv, seq_splits)
    if kv == "replicated":
        return attention(q, k, v)
    if windows is not None:
        what = "AttentionWindows, as reserve_attention() returned them, or None"
        check_kind("ulysses_attention", "windows", windows, AttentionWindows, what)
        head_splits = _checked_windows(windows, seq_splits, head_splits)
    share = share_heads(q.shape[2], k.shape[2], comm.world_size, as_tuple(head_splits))
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    # Windows have no gradient, and looking one up is host work that a compiler cannot trace.
    functional = needs_grad or (windows is None and torch.compiler.is_compiling())
    if seq_splits is not None:
        splits = checked_splits("ulysses_attention", "seq", seq_splits, None, comm.world_size)
        if not q.shape[1] == k.shape[1] == splits[comm.rank]:
            _refuse_rows(q, k, comm, splits, head_splits, functional, windows)
    producers = (lambda: v, lambda: k, lambda: q)
    if functional:
        return attend_functionally(comm, producers, share, attention, seq_splits=seq_splits)
    if windows is None:
        options = {"seq_splits": seq_splits, "head_splits": head_splits}
        windows = reserve_attention(comm, tuple(q.shape), tuple(k.shape), q.dtype, **options)
    # All of them before the first leaves: a refusal between two sends would leave one in flight.
    for x, window in ((v, windows.v), (k, windows.k), (q, windows.q)):
        check_source(comm, window, x, None, "scatter_into")
    return attend_in_windows(comm, producers, windows, share, attention, copy_out=copy_out)


def check_qkv(op: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Refuse q, k and v that do not fit each other; needs no other rank.

    Raises:
        ValueError: shapes, dtypes or devices differ where they must not.
    """
    check_tensors(op, q=q, k=k, v=v)
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_dense(op, x, name)
    if (
        q.dim() != 4
        or k.dim() != 4
        or k.shape != v.shape
        or q.shape[0] != k.shape[0]
        or q.shape[3] != k.shape[3]
    ):
        message = (
            f"{op}: q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)} must be "
            f"(B, S_local, H, D) and twice (B, S_local, H_kv, D)"
        )
        raise ValueError(message)
    if not q.dtype == k.dtype == v.dtype or not q.device == k.device == v.device:
        message = (
            f"{op}: dtypes {q.dtype}, {k.dtype}, {v.dtype} and devices {q.device}, "
            f"{k.device}, {v.device} must agree; convert them first"
        )
        raise ValueError(message)


def _check_kv(q: Tensor, k: Tensor, v: Tensor, kv: str, seq_splits: Sequence[int] | None) -> None:
    if kv not in ("sharded", "replicated"):
        message = f"ulysses_attention: kv={shown(kv)} must be 'sharded' or 'replicated'"
        raise ValueError(message)
    if kv == "sharded" and seq_splits is None and q.shape[1] != k.shape[1]:
        message = (
            f"ulysses_attention: q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)} must have "
            f"the same rows; pass kv='replicated' if every rank holds all keys and values"
        )
        raise ValueError(message)


def _checked_windows(
    windows: AttentionWindows, seq_splits: Sequence[int] | None, head_splits: Sequence[int] | None
) -> tuple[int, ...]:
    """Head splits of the windows, which splits given beside them must not contradict."""
    layout = windows.q.layout
    for what, given, reserved in (
        ("seq", as_tuple(seq_splits), layout.seq_splits),
        ("head", as_tuple(head_splits), layout.head_splits),
    ):
        if given is not None and given != reserved:
            message = (
                f"ulysses_attention: {what}_splits={list(given)}, but the windows are reserved for "
                f"{list(reserved)}; reserve others, or leave the splits out"
            )
            raise ValueError(message)
    return layout.head_splits


def _refuse_rows(
    q: Tensor,
    k: Tensor,
    comm: UlyssesCommunicator,
    seq_splits: tuple[int, ...],
    head_splits: Sequence[int] | None,
    functional: bool,
    windows: AttentionWindows | None,
) -> NoReturn:
    """Raise for rows that are not as declared; with the other ranks if they are about to meet."""
    message = (
        f"ulysses_attention: rank {comm.rank} holds q {list(q.shape)} and k {list(k.shape)}, but "
        f"seq_splits={list(seq_splits)} give it {seq_splits[comm.rank]} rows; give every rank the "
        f"rows of its own shard, or pass kv='replicated' if every rank holds all keys and values"
    )
    if windows is not None:  # the others need not meet for these
        raise ValueError(message)
    q_shape, k_shape = ((x.shape[0], seq_splits[comm.rank], *x.shape[2:]) for x in (q, k))
    options = {"seq_splits": seq_splits, "head_splits": head_splits}
    v_spec, k_spec, q_spec = qkv_specs(comm, q_shape, k_shape, q.dtype, **options)
    met = [v_spec, k_spec, q_spec, *out_specs(q_spec)]
    if functional:
        met = [replace(v_spec, name=FUNCTIONAL_NAMES["scatter"], channel=None)]
    refuse(comm, met, message)
