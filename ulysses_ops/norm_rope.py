"""``ulysses::qk_norm_rope``: RMSNorm and RoPE of Q and K in one pass over both.

    z = x + bias
    n = z * weight / sqrt(mean(z^2) + eps)     mean over D (per head), or over H and D (across)
    y_a = n_a cos - n_b sin,  y_b = n_b cos + n_a sin     for every pair (a, b) of a head

All in float32, rounded once at the end. On CUDA one kernel of ``_C_kernels``; elsewhere, and where
that library is not loaded, PyTorch.

NOTE [parts]: ``qk_norm_rope_into`` takes Q and K as lists of parts, ``(B, S, heads, D)`` each,
whose heads side by side make up the tensor, and writes lists of parts that may be cut elsewhere.
So one launch reads what GEMMs for several destinations wrote, and fills the staging of every peer
and the own view of a window.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn, cast

import torch
from torch import Tensor

from ._native import NATIVE
from .norm_rope_checks import Norm, Options, Rope, check, check_layout, is_in_place, refuse
from .part_norm_rope import rotate

_PARAMETERS = (
    "Tensor? q_weight=None, Tensor? k_weight=None, Tensor? q_bias=None, Tensor? k_bias=None, "
    'Tensor? cos=None, Tensor? sin=None, str norm="per_head", str rope="interleaved", '
    "float eps=1e-06"
)
SCHEMAS = {
    # (B, S, H, D) -> (B, S, H, D), fresh and contiguous
    "qk_norm_rope": f"(Tensor q, Tensor k, {_PARAMETERS}) -> (Tensor, Tensor)",
    # parts of one launch; an empty list leaves Q or K out
    "qk_norm_rope_into": (
        f"(Tensor[] q, Tensor[] k, Tensor(a!)[] q_out, Tensor(b!)[] k_out, {_PARAMETERS}) -> ()"
    ),
}


# ---- in PyTorch ----------------------------------------------------------------------------------


def _norm_rope(x: Tensor, weight: Tensor | None, bias: Tensor | None, o: Options) -> Tensor:
    """The equations at the top, in float32; ``x`` is (B, S, H, D)."""
    x = x.float()
    heads_by_dim = x.shape[2:]
    if bias is not None:
        x = x + bias.float().view(heads_by_dim)
    if o.norm != "none":
        over = (3,) if o.norm == "per_head" else (2, 3)
        x = x * torch.rsqrt(x.square().mean(over, keepdim=True) + o.eps)
        if weight is not None:
            x = x * weight.float().view(heads_by_dim[-len(over) :])
    if o.rope == "none":
        return x
    assert o.cos is not None and o.sin is not None
    cos, sin = (_by_pair(table, x.shape[-1], o.rope) for table in (o.cos, o.sin))
    return rotate(x, cos, sin, o.rope)


def _by_pair(table: Tensor, head_dim: int, rope: str) -> Tensor:
    """``(S, D / 2)``; a table as wide as a head holds each value at both places of its pair."""
    if table.shape[-1] != head_dim:
        return table
    return table[:, 0::2] if rope == "interleaved" else table[:, : head_dim // 2]


def _into_by_pytorch(
    q: list[Tensor], k: list[Tensor], q_out: list[Tensor], k_out: list[Tensor], *options: Any
) -> None:
    o = Options(*options)
    check("qk_norm_rope_into", (q, k), (q_out, k_out), o)
    for name, parts in (("q", q), ("k", k), ("q_out", q_out), ("k_out", k_out)):
        check_layout("qk_norm_rope_into", name, parts)
    for parts, outs, weight, bias in (
        (q, q_out, o.q_weight, o.q_bias),
        (k, k_out, o.k_weight, o.k_bias),
    ):
        if parts:
            result = _norm_rope(torch.cat(parts, dim=2), weight, bias, o)
            pieces = result.split([out.shape[2] for out in outs], dim=2)
            for out, piece in zip(outs, pieces, strict=True):
                out.copy_(piece)


# ---- the functional operator, and fakes ----------------------------------------------------------


def _functional(q: Tensor, k: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    check("qk_norm_rope", ([q], [k]), ([q], [k]), Options(*options))
    outs = (q.new_empty(q.shape), k.new_empty(k.shape))
    q, k = (x if is_in_place(x) else x.clone(memory_format=torch.contiguous_format) for x in (q, k))
    torch.ops.ulysses.qk_norm_rope_into([q], [k], [outs[0]], [outs[1]], *options)
    return outs


def _fake_functional(q: Tensor, k: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    check("qk_norm_rope", ([q], [k]), ([q], [k]), Options(*options))
    return q.new_empty(q.shape), k.new_empty(k.shape)


def _fake_into(
    q: list[Tensor], k: list[Tensor], q_out: list[Tensor], k_out: list[Tensor], *options: Any
) -> None:
    check("qk_norm_rope_into", (q, k), (q_out, k_out), Options(*options))


def _no_backward(ctx: Any, *grads: Tensor) -> NoReturn:
    message = "qk_norm_rope: it has no backward; call it under torch.no_grad()"
    raise NotImplementedError(message)


# ---- registration --------------------------------------------------------------------------------

COMPILED = ("qk_norm_rope_into",)  # on CUDA, by the compiled library


def _register() -> torch.library.Library:
    library = torch.library.Library("ulysses", "FRAGMENT")
    for name, schema in SCHEMAS.items():
        library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    implementations: dict[str, Any] = {
        "qk_norm_rope": _functional,
        "qk_norm_rope_into": _into_by_pytorch,
    }
    for name, implementation in implementations.items():
        library.impl(name, implementation, "CPU")
        if name not in COMPILED or not NATIVE.kernels:
            library.impl(name, implementation, "CUDA")
    torch.library.register_fake("ulysses::qk_norm_rope", _fake_functional, lib=library)
    torch.library.register_fake("ulysses::qk_norm_rope_into", _fake_into, lib=library)
    torch.library.register_autograd("ulysses::qk_norm_rope", _no_backward, lib=library)
    return library


LIBRARY = _register()  # registrations last as long as this object


# ---- Python wrappers -----------------------------------------------------------------------------


def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    *,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    q_bias: Tensor | None = None,
    k_bias: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    norm: Norm = "per_head",
    rope: Rope = "interleaved",
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """Normalise and rotate Q and K in one pass, into fresh tensors.

    The equations are at the top of this module; everything is in float32, rounded once.

    Args:
        q: ``(B, S, H, D)``, bf16, fp16 or fp32; D a multiple of 8 up to 256. Read in place where
            heads and D are dense (a view of a fused projection is), else after one copy.
        k: ``(B, S, H_k, D)``, as ``q``.
        q_weight: ``(D,)`` with ``norm="per_head"``, ``(H * D,)`` with ``"across_heads"``; in the
            dtype of ``q`` or fp32, contiguous. All ones when left out.
        k_weight: The same for ``k``; of the dtype of ``q_weight``.
        q_bias: ``(H * D,)``, added before the norm; in the dtype of ``q`` or fp32.
        k_bias: The same for ``k``; of the dtype of ``q_bias``.
        cos: ``(S, D/2)`` fp32, contiguous: one value for each pair; or ``(S, D)`` with each value
            at both places of its pair, of which the first is read.
        sin: As ``cos``.
        norm: RMS over D (``"per_head"``), over all elements of a row (``"across_heads"``), or none.
        rope: Pairs ``(2i, 2i + 1)`` (``"interleaved"``), ``(i, i + D/2)`` (``"half_split"``), or
            no rotation.
        eps: Added to the mean of the squares.

    Returns:
        Both, contiguous, owned by the caller, ready on the current stream.

    Raises:
        ValueError: a shape, dtype, device or option is wrong.
        RuntimeError: with ``norm="across_heads"`` on CUDA, a row is too long for the kernel: more
            than 32,768 elements in 16 bit (16,384 in fp32), D a power of two.
        NotImplementedError: on backward; there is none.

    Not collective: nothing leaves this rank.

    Source: RMSNorm, arXiv:1910.07467; RoPE, arXiv:2104.09864.
    """
    options = (q_weight, k_weight, q_bias, k_bias, cos, sin, norm, rope, eps)
    return cast(tuple[Tensor, Tensor], torch.ops.ulysses.qk_norm_rope(q, k, *options))


def qk_norm_rope_into(
    q: Sequence[Tensor],
    k: Sequence[Tensor],
    q_out: Sequence[Tensor],
    k_out: Sequence[Tensor],
    *,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    q_bias: Tensor | None = None,
    k_bias: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    norm: Norm = "per_head",
    rope: Rope = "interleaved",
    eps: float = 1e-6,
) -> None:
    """Normalise and rotate Q and K in one launch, into memory that the caller has.

    Args:
        q: Parts ``(B, S, heads, D)`` whose heads, in this order, make up Q: the whole of it, or the
            outputs of a GEMM for each destination. Empty to leave Q out. Each lies with heads and D
            dense and rows at multiples of 16 bytes; the pitch of rows is free.
        k: The same for K.
        q_out: Parts that the result goes to, head by head in this order: staging for peers, views
            of windows. They may be cut at other heads than ``q``, and none may overlap an input.
        k_out: The same for K.
        q_weight: As in :func:`qk_norm_rope`, for the heads of all parts.
        k_weight: The same for K.
        q_bias: As in :func:`qk_norm_rope`, for the heads of all parts.
        k_bias: The same for K.
        cos: As in :func:`qk_norm_rope`.
        sin: As in :func:`qk_norm_rope`.
        norm: As in :func:`qk_norm_rope`; across heads means those of all parts.
        rope: As in :func:`qk_norm_rope`.
        eps: As in :func:`qk_norm_rope`.

    Raises:
        ValueError: a shape, dtype, device, stride or option is wrong, or an input requires grad.
        RuntimeError: as :func:`qk_norm_rope`; or parts cut Q and K into more than 32 pieces, or
            an output overlaps an input.

    Not collective: nothing leaves this rank.

    Source: as :func:`qk_norm_rope`.
    """
    options = (q_weight, k_weight, q_bias, k_bias, cos, sin, norm, rope, eps)
    check("qk_norm_rope_into", (q, k), (q_out, k_out), Options(*options))
    given = [*q, *k, *(x for x in options if isinstance(x, Tensor))]
    if torch.is_grad_enabled() and any(x.requires_grad for x in given):
        refuse("qk_norm_rope_into", "an input requires grad; call it under torch.no_grad()")
    torch.ops.ulysses.qk_norm_rope_into(list(q), list(k), list(q_out), list(k_out), *options)
