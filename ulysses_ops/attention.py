"""Attention over a sequence that is sharded between ranks, values first."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .communicator import UlyssesCommunicator
from .exchange import Exchange, check_source
from .ops import gather, scatter
from .plan import layout_of_source
from .window_spec import WindowSpec
from .windows import Window, reserve

# (q, k, v), each (B, S_global, heads, D), -> (B, S_global, heads, D)
AttentionKernel = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class AttentionWindows:
    """The windows of one attention layer; layers of the same shape share them.

    ``v``, ``k`` and ``q`` are one channel: they leave one by one and are completed together.
    """

    v: Window
    k: Window
    q: Window
    out: Window


def qkv_specs(
    comm: UlyssesCommunicator,
    q_shape: tuple[int, ...],
    kv_shape: tuple[int, ...],
    dtype: torch.dtype,
) -> tuple[WindowSpec, WindowSpec, WindowSpec]:
    """Specs of V, K and Q, in this order, for local shapes ``(B, S_local, H, D)``; one channel."""

    def spec(letter: str, shape: tuple[int, ...]) -> WindowSpec:
        layout = layout_of_source("ulysses_attention", "scatter", shape, comm.rank, comm.world_size)
        return WindowSpec.of_layout(f"attention.{letter}", layout, dtype, "attention.qkv")

    return spec("v", kv_shape), spec("k", kv_shape), spec("q", q_shape)


def out_specs(queries: WindowSpec, chunks: int = 1) -> list[WindowSpec]:
    """Specs of the attention's output, by chunks of heads, each of which is a channel."""
    if chunks == 1:
        return [WindowSpec("attention.out", "gather", queries.shape, queries.dtype)]
    batch, seq, heads, head_dim = queries.shape
    shape = (batch, seq, heads // chunks, head_dim)
    return [
        WindowSpec(f"attention.out.{chunk}/{chunks}", "gather", shape, queries.dtype)
        for chunk in range(chunks)
    ]


def reserve_attention(
    comm: UlyssesCommunicator,
    q_shape: tuple[int, ...],
    kv_shape: tuple[int, ...],
    dtype: torch.dtype,
) -> AttentionWindows:
    """Reserve the windows of :func:`ulysses_attention` for local shapes ``(B, S_local, H, D)``.

    Collective; see :func:`ulysses_ops.reserve` for what it raises.
    """
    specs = qkv_specs(comm, q_shape, kv_shape, dtype)
    windows = reserve(comm, [*specs, *out_specs(specs[2])])
    return AttentionWindows(*windows)


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """``softmax(q k^T / sqrt(D)) v`` by ``scaled_dot_product_attention``, heads in dimension 2.

    Fewer KV heads than query heads are shared between them (GQA).
    """
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
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
) -> Tensor:
    """Attention of sequence shards over the whole sequence.

    ``out = gather(attention(scatter(q), scatter(k), scatter(v)))``: each rank attends with its
    share
    of the heads. V leaves first, then K and Q, and one completion ends all three. Inputs may be
    views of a fused projection.

    Args:
        q: ``(B, S_local, H, D)``.
        k: ``(B, S_local, H_kv, D)``; ``H_kv`` may be smaller than H (GQA).
        v: As ``k``.
        comm: An open communicator; H and H_kv must be divisible by ``comm.world_size``.
        attention: The kernel, on ``(B, S_global, heads, D)``.
        windows: From :func:`reserve_attention`; looked up by shape when left out.
        copy_out: Return a tensor of the caller's own. Without it the result is the window itself:
            no copy, but valid only until the next attention of this shape.

    Returns:
        ``(B, S_local, H, D)``, ready on the current stream.

    Raises:
        ValueError: shapes, dtypes or devices are wrong; raised before any rank waits.
        UlyssesError: closed, or a capture needs windows that are not reserved.

    Collective: every rank calls it with matching shapes, in the same order. Differentiable where
    an input requires grad; windows are then left alone.

    Source: DeepSpeed-Ulysses, arXiv:2309.14509.
    """
    _check(q, k, v, comm.world_size)
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    if needs_grad or (windows is None and torch.compiler.is_compiling()):
        # Windows have no gradient, and looking one up is host work that a compiler cannot trace.
        return gather(attention(scatter(q, comm), scatter(k, comm), scatter(v, comm)), comm)
    if windows is None:
        windows = reserve_attention(comm, tuple(q.shape), tuple(k.shape), q.dtype)
    # All of them before the first leaves: a refusal between two sends would leave one in flight.
    for x, window in ((v, windows.v), (k, windows.k), (q, windows.q)):
        check_source(comm, window, x, None, "scatter_into")
    with Exchange(comm) as exchange:
        exchange.send(v, windows.v)
        exchange.send(k, windows.k)
        exchange.send(q, windows.q)
    attended = attention(windows.q.tensor, windows.k.tensor, windows.v.tensor)
    with Exchange(comm) as exchange:
        exchange.send(attended, windows.out)
    return windows.out.tensor.clone() if copy_out else windows.out.tensor


def _check(q: Tensor, k: Tensor, v: Tensor, world_size: int) -> None:
    if q.dim() != 4 or k.shape != v.shape or q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3]:
        message = (
            f"ulysses_attention: q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)} must be "
            f"(B, S_local, H, D) and twice (B, S_local, H_kv, D)"
        )
        raise ValueError(message)
    if q.shape[2] % max(k.shape[2], 1) != 0:
        message = f"ulysses_attention: H={q.shape[2]} must be a multiple of H_kv={k.shape[2]}"
        raise ValueError(message)
    for count, heads in (("H", q.shape[2]), ("H_kv", k.shape[2])):
        if heads % world_size != 0:
            both = math.gcd(q.shape[2], k.shape[2])
            valid = [size for size in range(1, both + 1) if both % size == 0]
            message = (
                f"ulysses_attention: {count}={heads} must be divisible by world_size={world_size}; "
                f"replicate or pad heads, or use one of {valid} ranks"
            )
            raise ValueError(message)
    if not q.dtype == k.dtype == v.dtype or not q.device == k.device == v.device:
        message = (
            f"ulysses_attention: dtypes {q.dtype}, {k.dtype}, {v.dtype} and devices {q.device}, "
            f"{k.device}, {v.device} must agree; convert them first"
        )
        raise ValueError(message)
