"""Attention whose tensors leave as soon as they are computed: V, then K, then Q. The one loop.

While K is computed V is on its way, and while Q is, K; what runs beside the copies is the caller's
projections, norms and rotations. Finished tensors are the case in which computing takes no time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from torch import Tensor

from .communicator import UlyssesCommunicator
from .exchange import Exchange
from .heads import HeadShare
from .joint import JointSequence
from .ops import gather, scatter
from .windows import Window

# (q, k, v), each (B, S_global, heads, D), -> (B, S_global, heads, D)
AttentionKernel = Callable[[Tensor, Tensor, Tensor], Tensor]
Producer = Callable[[], Tensor]  # () -> (B, S_local, heads, D)
Producers = tuple[Producer, Producer, Producer]  # of V, K and Q


@dataclass(frozen=True)
class AttentionWindows:
    """The windows of one attention layer; layers of the same shape share them.

    ``v``, ``k`` and ``q`` are one channel: they leave one by one and are completed together. So are
    ``out`` and ``text``, where text is replicated: the rows of the image, and those of the text.
    """

    v: Window
    k: Window
    q: Window
    out: Window
    text: Window | None = None


def attend(
    attention: AttentionKernel, share: HeadShare, rank: int, q: Tensor, k: Tensor, v: Tensor
) -> Tensor:
    """The kernel on this rank's heads; a rank without any, or without rows, calls none."""
    if 0 in q.shape:
        return q
    return attention(q, share.expand(k, rank), share.expand(v, rank))


def attend_in_windows(
    comm: UlyssesCommunicator,
    producers: Producers,
    windows: AttentionWindows,
    share: HeadShare,
    attention: AttentionKernel,
    *,
    replicated: JointSequence | None = None,
    copy_out: bool = True,
) -> Tensor:
    """``gather(attention(scatter(q), scatter(k), scatter(v)))`` through windows.

    Args:
        comm: An open communicator.
        producers: Of V, K and Q, called in this order, each once.
        windows: For the shapes that they return.
        share: Heads of every rank.
        attention: The kernel.
        replicated: The rows, where every rank holds all of the text: it is not sent. A rank writes
            its own heads of it beside the rows that arrive, and gets all heads of its result.
        copy_out: Return a tensor of the caller's own, not a window.

    Collective; see :func:`ulysses_ops.ulysses_attention`.
    """
    with comm.turn.of("attention"):  # until nothing reads the windows any more
        return _in_windows(comm, producers, windows, share, attention, replicated, copy_out)


def _in_windows(
    comm: UlyssesCommunicator,
    producers: Producers,
    windows: AttentionWindows,
    share: HeadShare,
    attention: AttentionKernel,
    replicated: JointSequence | None,
    copy_out: bool,
) -> Tensor:
    inputs = (windows.v, windows.k, windows.q)
    with Exchange(comm) as exchange:
        for produce, window in zip(producers, inputs, strict=True):
            x = produce()
            if replicated is None:
                exchange.send(x, window)
                continue
            text, image = replicated.split(x, comm.rank)
            exchange.send(image, window)
            first, count = window.layout.head_offset(comm.rank), window.tensor.shape[2]
            beside = window.tensor.narrow(1, replicated.text_start, replicated.text_rows)
            beside.copy_(text.narrow(2, first, count))
    values, keys, queries = (window.tensor for window in inputs)
    attended = attend(attention, share, comm.rank, queries, keys, values)
    with Exchange(comm) as exchange:
        exchange.send(attended, windows.out)
        if windows.text is not None:
            exchange.send(attended, windows.text)
    out = windows.out.tensor
    if replicated is not None and windows.text is not None:
        return replicated.join(windows.text.tensor, out)
    return out.clone() if copy_out else out


def attend_functionally(
    comm: UlyssesCommunicator,
    producers: Producers,
    share: HeadShare,
    attention: AttentionKernel,
    *,
    replicated: JointSequence | None = None,
    seq_splits: Sequence[int] | None = None,
) -> Tensor:
    """The same by the functional operators: differentiable, and traceable by a compiler.

    ``seq_splits`` are of the rows that are sent; other arguments as in :func:`attend_in_windows`.
    """
    q_heads, kv_heads, kv_starts = (
        (None, None, None) if share.is_even else (share.q_splits, share.kv_splits, share.kv_starts)
    )
    kv: dict[str, Any] = {"head_splits": kv_heads, "head_starts": kv_starts}
    own_kv = (share.kv_starts[comm.rank], share.kv_splits[comm.rank])
    first = tuple(accumulate(share.q_splits, initial=0))[comm.rank]
    own_q = (first, share.q_splits[comm.rank])
    wholes = []
    for produce, heads, own in zip(
        producers, (kv, kv, {"head_splits": q_heads}), (own_kv, own_kv, own_q), strict=True
    ):
        x = produce()
        if replicated is None:
            wholes.append(scatter(x, comm, seq_splits=seq_splits, **heads))
            continue
        text, image = replicated.split(x, comm.rank)
        arrived = scatter(image, comm, seq_splits=seq_splits, **heads)
        wholes.append(replicated.join(text.narrow(2, *own), arrived))
    values, keys, queries = wholes
    attended = attend(attention, share, comm.rank, queries, keys, values)
    if replicated is None:
        return gather(attended, comm, seq_splits=seq_splits, head_splits=q_heads)
    rows, ranks = replicated.text_rows, comm.world_size
    text = attended.narrow(1, replicated.text_start, rows)
    image = attended.narrow(1, replicated.image_starts()[0], sum(replicated.image_splits))
    return replicated.join(
        gather(
            text,
            comm,
            seq_splits=(rows,) * ranks,
            head_splits=share.q_splits,
            seq_starts=(0,) * ranks,
        ),
        gather(image, comm, seq_splits=seq_splits, head_splits=q_heads),
    )
