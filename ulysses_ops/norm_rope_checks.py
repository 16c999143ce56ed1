"""What may be asked of ``qk_norm_rope``: its options, and the checks of its operands."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Literal, NoReturn

import torch
from torch import Tensor

from .kinds import shown

Norm = Literal["none", "per_head", "across_heads"]
Rope = Literal["none", "interleaved", "half_split"]

NORMS: tuple[Norm, ...] = ("none", "per_head", "across_heads")
ROPES: tuple[Rope, ...] = ("none", "interleaved", "half_split")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ALIGNMENT = 16  # bytes: the vectors that the kernel moves
MAX_HEAD_DIM = 256


@dataclass(frozen=True)
class Options:
    """What is the same for every part of Q and K; the order is that of the schemas."""

    q_weight: Tensor | None = None
    k_weight: Tensor | None = None
    q_bias: Tensor | None = None
    k_bias: Tensor | None = None
    cos: Tensor | None = None
    sin: Tensor | None = None
    norm: str = "per_head"
    rope: str = "interleaved"
    eps: float = 1e-6


def refuse(op: str, what: str) -> NoReturn:
    """Raise ``ValueError`` in the name of an operator."""
    message = f"{op}: {what}"
    raise ValueError(message)


def check_eps(op: str, eps: object) -> None:
    """Refuse what cannot be added to a mean of squares: NaN and infinity make zeros of all rows.

    Raises:
        ValueError: it is no number, not finite, or negative.
    """
    is_number = isinstance(eps, Real | torch.SymFloat) and not isinstance(eps, bool)
    if not (is_number and math.isfinite(eps) and eps >= 0):  # type: ignore[arg-type, operator]
        refuse(op, f"eps={shown(eps)} must be a number, finite and not negative")


def check(
    op: str, inputs: Sequence[Sequence[Tensor]], outputs: Sequence[Sequence[Tensor]], o: Options
) -> None:
    """Shapes, dtypes, devices and options; what a fake tensor knows."""
    if o.norm not in NORMS:
        refuse(op, f"norm={o.norm!r} must be one of {NORMS}")
    if o.rope not in ROPES:
        refuse(op, f"rope={o.rope!r} must be one of {ROPES}")
    check_eps(op, o.eps)
    given = [part for parts in inputs for part in parts]
    if not given:
        refuse(op, "neither q nor k has a part; give (B, S, heads, D)")
    like = given[0]
    for name, parts in zip(("q", "k", "q_out", "k_out"), (*inputs, *outputs), strict=True):
        for part in parts:
            _check_part(op, f"a part of {name}", part, like)
    dim = like.shape[3]
    if dim < 8 or dim > MAX_HEAD_DIM or dim % 8:
        refuse(op, f"D={dim} must be a multiple of 8 up to {MAX_HEAD_DIM}")
    if like.dtype not in DTYPES:
        refuse(op, f"q and k are {like.dtype}; give one of {DTYPES}")
    for name, parts, outs in zip("qk", inputs, outputs, strict=True):
        _check_heads(op, name, parts, outs, like, o)
    for kind in ("weight", "bias"):
        pair = [getattr(o, f"{name}_{kind}") for name in "qk"]
        if len({parameter.dtype for parameter in pair if parameter is not None}) > 1:
            refuse(op, f"q_{kind} and k_{kind} differ in dtype; give both in one")
    _check_tables(op, like, o)


def _check_heads(
    op: str, name: str, parts: Sequence[Tensor], outs: Sequence[Tensor], like: Tensor, o: Options
) -> None:
    """What goes with one of Q and K: outputs for all heads, weight and bias."""
    heads, heads_out = (sum(part.shape[2] for part in cut) for cut in (parts, outs))
    if heads != heads_out:
        refuse(op, f"{name} has {heads} heads and {name}_out {heads_out}; give as many")
    dim = like.shape[3]
    elems = dim if o.norm == "per_head" else heads * dim
    weight, bias = getattr(o, f"{name}_weight"), getattr(o, f"{name}_bias")
    if weight is not None and o.norm == "none":
        refuse(op, f"{name}_weight goes with a norm; leave it out, or name the norm")
    _check_parameter(op, f"{name}_weight", weight, elems, like)
    _check_parameter(op, f"{name}_bias", bias, heads * dim, like)


def _check_part(op: str, name: str, part: Tensor, like: Tensor) -> None:
    if part.dim() != 4:
        refuse(op, f"{name} is {tuple(part.shape)}; give (B, S, heads, D)")
    if any(part.shape[i] != like.shape[i] for i in (0, 1, 3)):
        refuse(
            op, f"{name} is {tuple(part.shape)}, another {tuple(like.shape)}; B, S, D must agree"
        )
    if part.dtype != like.dtype or part.device != like.device:
        refuse(
            op,
            f"{name} is {part.dtype} on {part.device}, another {like.dtype} on {like.device}; "
            f"all must agree",
        )


def _check_parameter(
    op: str, name: str, parameter: Tensor | None, num_elems: int, like: Tensor
) -> None:
    if parameter is None:
        return
    if parameter.numel() != num_elems or not parameter.is_contiguous():
        refuse(op, f"{name} is {tuple(parameter.shape)}; give {num_elems} contiguous elements")
    if parameter.dtype not in (like.dtype, torch.float32) or parameter.device != like.device:
        refuse(
            op,
            f"{name} is {parameter.dtype} on {parameter.device}; "
            f"give {like.dtype} or torch.float32 on {like.device}",
        )


def _check_tables(op: str, like: Tensor, o: Options) -> None:
    if o.rope == "none":
        if o.cos is not None or o.sin is not None:
            refuse(op, "cos and sin go with a rope; leave them out, or name the rope")
        return
    if o.cos is None or o.sin is None:
        refuse(op, f"rope={o.rope!r} needs cos and sin; give both, or rope='none'")
    rows, dim = like.shape[1], like.shape[3]
    for name, table in (("cos", o.cos), ("sin", o.sin)):
        shape = tuple(table.shape)
        if shape not in ((rows, dim // 2), (rows, dim)) or table.shape != o.cos.shape:
            refuse(op, f"{name} is {shape}; give both as ({rows}, {dim // 2}) or ({rows}, {dim})")
        if table.dtype != torch.float32 or table.device != like.device:
            refuse(
                op,
                f"{name} is {table.dtype} on {table.device}; give torch.float32 on {like.device}",
            )
        if not table.is_contiguous():
            refuse(op, f"{name} is not contiguous; give a contiguous copy")


def is_in_place(part: Tensor) -> bool:
    """Whether a kernel can use it as it lies: heads and D dense, rows apart, vectors aligned."""
    if part.numel() == 0:
        return True
    batches, rows, heads, dim = part.shape
    by_batch, by_row, by_head, by_elem = part.stride()
    if batches == 1:  # the stride of a dimension of size 1 means nothing
        by_batch = rows * max(by_row, heads * dim)
    if rows == 1:
        by_row = heads * dim
    dense = by_elem == 1 and (heads == 1 or by_head == dim)
    apart = by_row >= heads * dim and by_batch >= by_row * (rows - 1) + heads * dim
    steps = [stride for stride, size in ((by_batch, batches), (by_row, rows)) if size > 1]
    places = (part.data_ptr(), *(step * part.element_size() for step in steps))
    return dense and apart and all(place % ALIGNMENT == 0 for place in places)


def check_layout(op: str, name: str, parts: Sequence[Tensor]) -> None:
    """Refuse parts that a kernel cannot use as they lie; not for fake tensors."""
    for part in parts:
        if not is_in_place(part):
            refuse(
                op,
                f"a part of {name} has strides {part.stride()}, with heads and D not dense, rows "
                f"overlapping, or rows not at multiples of {ALIGNMENT} bytes; give a fresh copy",
            )
