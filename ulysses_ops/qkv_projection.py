"""``ulysses::project_qkv_into``: Q, K and V of a layer from its input, norm and RoPE included.

    z = x qkv_weight^T + qkv_bias
    q, k:  n = z * weight / sqrt(mean(z^2) + eps) over D,
           y_a = n_a cos - n_b sin,  y_b = n_b cos + n_a sin   for every pair (a, b) of a head
    v:     y = z

On Hopper one GEMM, the kernel of ``_C_projection``, whose epilogue does the rest in registers, in
float32, rounded once. Elsewhere ``F.linear`` and ``qk_norm_rope_into``, which round between them
too.

NOTE [rows of the weight]: heads of D rows each, first those of one destination (of Q, then K, then
V), then those of the next: ``q_out[0]``, ``k_out[0]``, ``v_out[0]``, ``q_out[1]``, ... So one
launch reads packed weights of several ranks, and fills the staging of each, or views of windows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ._native import NATIVE
from .kinds import check_kind, check_tensors
from .norm_rope_checks import (
    ALIGNMENT,
    Norm,
    Options,
    Rope,
    check,
    check_layout,
    is_in_place,
    refuse,
)
from .progress import Progress

OP = "project_qkv_into"
SCHEMA = (
    f"{OP}(Tensor x, Tensor qkv_weight, Tensor? qkv_bias, Tensor(a!)[] q_out, Tensor(b!)[] k_out, "
    "Tensor(c!)[] v_out, Tensor? q_weight=None, Tensor? k_weight=None, Tensor? cos=None, "
    'Tensor? sin=None, str norm="per_head", str rope="interleaved", float eps=1e-06) -> ()'
)
HOPPER = (9, 0)
KERNEL_HEAD_DIM = 128
KERNEL_DTYPES = (torch.bfloat16, torch.float16)
KERNEL_DESTINATIONS = 10  # as in csrc/projection/qkv_projection.h
MAX_SIZE = 2**31 - 1024
DENSE = torch.contiguous_format


def _check(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    outs: Sequence[Sequence[Tensor]],
    o: Options,
) -> None:
    """Shapes, dtypes, devices and options; what a fake tensor knows."""
    if o.norm == "across_heads":
        refuse(OP, "norm='across_heads' needs whole rows; give 'per_head' or 'none'")
    if x.dim() != 3 or weight.dim() != 2 or x.shape[2] != weight.shape[1]:
        refuse(
            OP,
            f"x is {tuple(x.shape)} and qkv_weight {tuple(weight.shape)}; give (B, S, width) and "
            f"(columns, width)",
        )
    if len({len(parts) for parts in outs}) != 1:
        counts = [len(parts) for parts in outs]
        refuse(OP, f"q_out, k_out and v_out have {counts} parts; give one for each destination")
    _check_outputs(x, weight, outs)
    columns = weight.shape[0]
    for name, tensor in (("qkv_weight", weight), ("qkv_bias", bias)):
        if tensor is not None and (tensor.dtype != x.dtype or tensor.device != x.device):
            refuse(
                OP,
                f"{name} is {tensor.dtype} on {tensor.device}, x {x.dtype} on {x.device}; "
                f"both must agree",
            )
    if bias is not None and (tuple(bias.shape) != (columns,) or not bias.is_contiguous()):
        refuse(OP, f"qkv_bias is {tuple(bias.shape)}; give {columns} contiguous elements")
    q_out, k_out, _ = outs
    if q_out:
        check(OP, (q_out, k_out), (q_out, k_out), o)


def _check_outputs(x: Tensor, weight: Tensor, outs: Sequence[Sequence[Tensor]]) -> None:
    columns = 0
    for name, parts in zip(("q_out", "k_out", "v_out"), outs, strict=True):
        for part in parts:
            if part.dim() != 4 or part.shape[:2] != x.shape[:2]:
                refuse(
                    OP,
                    f"a part of {name} is {tuple(part.shape)}; give (B, S, heads, D) with B and S "
                    f"of x, {tuple(x.shape[:2])}",
                )
            if part.dtype != x.dtype or part.device != x.device:
                refuse(
                    OP,
                    f"a part of {name} is {part.dtype} on {part.device}, x {x.dtype} on "
                    f"{x.device}; both must agree",
                )
            columns += part.shape[2] * part.shape[3]
    dims = [part.shape[3] for parts in outs for part in parts]
    if any(dim != dims[0] for dim in dims):
        refuse(OP, f"the outputs have heads of {dims} elements; D must be one")
    if columns != weight.shape[0]:
        refuse(
            OP,
            f"qkv_weight has {weight.shape[0]} rows, the outputs {columns} columns; give as many",
        )


@lru_cache(maxsize=64)
def _is_hopper(device: int) -> bool:
    return torch.cuda.get_device_capability(device) == HOPPER


def fits_kernel(head_dim: int, width: int, norm: str, num_destinations: int) -> bool:
    """Whether the compiled kernel is for these sizes, in 16 bit and on the right GPU."""
    return (
        head_dim == KERNEL_HEAD_DIM
        and width > 0
        and width % 8 == 0
        and norm != "across_heads"
        and num_destinations <= KERNEL_DESTINATIONS
    )


def has_kernel(x: Tensor, head_dim: int, norm: str, num_destinations: int) -> bool:
    """Whether the compiled kernel projects rows of this dtype, width and device."""
    return (
        x.device.type == "cuda"
        and NATIVE.projection
        and _is_hopper(x.device.index)
        and x.dtype in KERNEL_DTYPES
        and fits_kernel(head_dim, x.shape[-1], norm, num_destinations)
        and x.shape[:-1].numel() < MAX_SIZE
    )


def _rows_in_place(rows: Tensor) -> bool:
    """Whether the kernel reads ``(..., rows, width)`` as it lies: dense rows evenly apart."""
    *_, count, width = rows.shape
    pitch = rows.stride(-2)
    evenly = rows.dim() == 2 or rows.shape[0] == 1 or rows.stride(0) == count * pitch
    aligned = rows.data_ptr() % ALIGNMENT == 0 and pitch * rows.element_size() % ALIGNMENT == 0
    return rows.stride(-1) == 1 and pitch >= width and evenly and aligned


def _options(
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    norm: str = "per_head",
    rope: str = "interleaved",
    eps: float = 1e-6,
) -> Options:
    """As the schema has them: a dispatcher leaves out the last ones that are as by default."""
    return Options(q_weight, k_weight, None, None, cos, sin, norm, rope, eps)


Arguments = tuple[
    Tensor, Tensor, Tensor | None, tuple[list[Tensor], list[Tensor], list[Tensor]], Options
]


def _read(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    q_out: list[Tensor],
    k_out: list[Tensor],
    v_out: list[Tensor],
    *options: Any,
) -> Arguments:
    """The operator's arguments, as :func:`_check` takes them."""
    return x, weight, bias, (q_out, k_out, v_out), _options(*options)


def _by_operators(*arguments: Any) -> None:
    x, weight, bias, outs, o = _read(*arguments)
    q_out, k_out, v_out = outs
    _check(x, weight, bias, outs, o)
    if not q_out:
        return
    for name, parts in zip(("q_out", "k_out", "v_out"), outs, strict=True):
        check_layout(OP, name, parts)
    in_order = [part for destination in zip(*outs, strict=True) for part in destination]
    with torch.autocast(x.device.type, enabled=False):
        rows = F.linear(x, weight, bias)
    heads = rows.unflatten(-1, (-1, q_out[0].shape[3]))
    pieces = heads.split([part.shape[2] for part in in_order], dim=2)
    q, k, v = (list(pieces[kind::3]) for kind in range(3))
    torch.ops.ulysses.qk_norm_rope_into(q, k, q_out, k_out, *vars(o).values())
    for out, piece in zip(v_out, v, strict=True):
        out.copy_(piece)


def _takes(x: Tensor, outs: Sequence[Sequence[Tensor]], bias: Tensor | None, o: Options) -> bool:
    """Whether the compiled kernel reads and writes all of this as it lies."""
    parts = [part for parts in outs for part in parts]
    parameters = [one for one in (bias, o.q_weight, o.k_weight, o.cos, o.sin) if one is not None]
    return (
        len(parts) > 0
        and has_kernel(x, parts[0].shape[-1], o.norm, len(outs[0]))
        and all(is_in_place(part) for part in parts)
        and all(one.data_ptr() % ALIGNMENT == 0 for one in parameters)
    )


def _by_kernel(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    outs: Sequence[Sequence[Tensor]],
    o: Options,
    order: Sequence[int] | None = None,
    progress: Progress | None = None,
) -> None:
    """Launch the compiled kernel."""
    _check(x, weight, bias, outs, o)
    in_order = list(range(len(outs[0])) if order is None else order)
    launched, counters = 0, None
    if progress is not None:
        heads = {d: sum(parts[d].shape[2] for parts in outs) for d in in_order[:-1]}
        launched, counters = progress.expect(x.shape[0] * x.shape[1], heads), progress.counters
    # A copy even of what is contiguous: its rows may not lie at multiples of 16 bytes.
    x, weight = (
        rows if _rows_in_place(rows) else torch.empty_like(rows, memory_format=DENSE).copy_(rows)
        for rows in (x, weight)
    )
    parameters = (o.q_weight, o.k_weight, o.cos, o.sin)
    options = (o.norm, o.rope, o.eps, in_order, counters, launched)
    torch.ops.ulysses._project_qkv_sm90(x, weight, bias, *outs, *parameters, *options)


def _on_cuda(*arguments: Any) -> None:
    x, weight, bias, outs, o = _read(*arguments)
    if _takes(x, outs, bias, o):
        _by_kernel(x, weight, bias, outs, o)
    else:
        _by_operators(*arguments)


def _fake(*arguments: Any) -> None:
    _check(*_read(*arguments))


def _register() -> torch.library.Library:
    library = torch.library.Library("ulysses", "FRAGMENT")
    library.define(SCHEMA, tags=(torch.Tag.pt2_compliant_tag,))
    library.impl(OP, _by_operators, "CPU")
    library.impl(OP, _on_cuda, "CUDA")
    torch.library.register_fake(f"ulysses::{OP}", _fake, lib=library)
    return library


LIBRARY = _register()  # registrations last as long as this object


def project_qkv_into(
    x: Tensor,
    qkv_weight: Tensor,
    qkv_bias: Tensor | None,
    q_out: Sequence[Tensor],
    k_out: Sequence[Tensor],
    v_out: Sequence[Tensor],
    *,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    norm: Norm = "per_head",
    rope: Rope = "interleaved",
    eps: float = 1e-6,
    order: Sequence[int] | None = None,
    progress: Progress | None = None,
) -> None:
    """Project, normalise and rotate, into memory that the caller has.

    The equations are at the top of this module. On a GPU of compute capability 9.0, for bf16 and
    fp16, D = 128, a width that is a multiple of 8, and outputs at multiples of 16 bytes, it is one
    kernel, float32 inside and rounded once. Everywhere else it is a GEMM and
    :func:`qk_norm_rope_into`, rounded after each.

    Args:
        x: ``(B, S, width)``. The kernel reads it in place where rows are dense and evenly apart.
        qkv_weight: ``(columns, width)``: for each destination the rows of its heads of Q, then of
            K, then of V.
        qkv_bias: ``(columns,)``, or none.
        q_out: One part ``(B, S, heads, D)`` for each destination; heads and D dense. None may
            overlap an input, or another output.
        k_out: The same for K, perhaps with other numbers of heads.
        v_out: The same for V.
        q_weight: Of the norm of Q, ``(D,)``, in the dtype of ``x`` or fp32, contiguous; all ones
            when left out.
        k_weight: The same for K, of the dtype of ``q_weight``.
        cos: ``(S, D/2)`` or ``(S, D)`` fp32, contiguous, as :func:`qk_norm_rope` takes them.
        sin: As ``cos``.
        norm: ``"per_head"`` or ``"none"``; a norm across heads needs whole rows.
        rope: As :func:`qk_norm_rope`.
        eps: Added to the mean of the squares.
        order: Of the destinations, as the kernel computes them; as they are given when left out.
        progress: Counts what is written for each destination while the kernel runs, on a GPU.

    Raises:
        ValueError: a shape, dtype, device, option or order is wrong, or an input requires grad.

    Not collective: nothing leaves this rank.

    Source: RMSNorm, arXiv:1910.07467; RoPE, arXiv:2104.09864.
    """
    check_tensors(OP, x=x, qkv_weight=qkv_weight)
    optional = (qkv_bias, q_weight, k_weight, cos, sin)
    given = [x, qkv_weight, *(one for one in optional if one is not None)]
    if torch.is_grad_enabled() and any(one.requires_grad for one in given):
        refuse(OP, "an input requires grad; call it under torch.no_grad()")
    outs = (list(q_out), list(k_out), list(v_out))
    options = (q_weight, k_weight, cos, sin, norm, rope, eps)
    if order is not None:
        numbers = [index if type(index) is int else -1 for index in order]
        if sorted(numbers) != list(range(len(outs[0]))):
            refuse(
                OP, f"order={list(order)} must name each of the {len(outs[0])} destinations once"
            )
    if progress is not None:
        check_kind(OP, "progress", progress, Progress, "a Progress")
    o = _options(*options)
    is_beside = order is not None or progress is not None
    if is_beside and not torch.compiler.is_compiling() and _takes(x, outs, qkv_bias, o):
        _by_kernel(x, qkv_weight, qkv_bias, outs, o, order, progress)
        return
    torch.ops.ulysses.project_qkv_into(x, qkv_weight, qkv_bias, *outs, *options)
    if progress is not None:
        progress.expect_nothing()
