"""The largest scores of rows that are sharded by columns: local top-k, one exchange, merge.

NOTE [order]: scores are compared as 64-bit keys, the value in the upper half and the complement of
the column in the lower one. So no two keys are equal, and the result is one and the same for any
number of ranks: of equal scores the lower column comes first. NaN counts as larger than every
number, as for ``torch.topk``; negative zero counts as zero.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .communicator import UlyssesCommunicator
from .kinds import check_readable, check_tensors, is_whole, shown
from .names import check_communicator
from .ops import all_gather
from .plan import checked_splits
from .window_spec import WindowSpec
from .windows import agree, refuse

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_LOW = (1 << 32) - 1
_MAGNITUDE = 0x7FFFFFFF


def _keys(scores: Tensor, first: int) -> Tensor:
    """Keys whose order is that of the note; column ``c`` counts as ``first + c``."""
    wide = scores.float() + 0.0  # turns negative zero into zero
    wide = torch.where(wide.isnan(), torch.nan, wide)  # one NaN, with its sign bit clear
    bits = wide.view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ _MAGNITUDE, bits).long()
    columns = torch.arange(first, first + scores.shape[-1], device=scores.device)
    return (ordered << 32) | (_LOW - columns)


def _decoded(keys: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    ordered = (keys >> 32).int()
    bits = torch.where(ordered < 0, ordered ^ _MAGNITUDE, ordered)
    return bits.view(torch.float32).to(dtype), _LOW - (keys & _LOW)


def _check_kinds(op: str, scores: Tensor, k: int) -> None:
    check_tensors(op, scores=scores)
    check_readable(op, scores)
    if not is_whole(k):
        message = f"{op}: k={shown(k)} must be a whole number"
        raise ValueError(message)


def _check(op: str, scores: Tensor, k: int, columns: int) -> None:
    if scores.dtype not in DTYPES:
        message = f"{op}: scores are {scores.dtype}, and must be one of {DTYPES}; convert them"
        raise ValueError(message)
    if not 0 < k <= columns or columns > _LOW:
        message = (
            f"{op}: k={k} must be from 1 to the {columns} columns that there are, and these fewer "
            f"than 2^32; take min(k, columns)"
        )
        raise ValueError(message)


def top_rows(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The ``k`` largest scores of each row, with a rule for ties. Local.

    Args:
        scores: ``(..., S)``, fp16, bf16 or fp32.
        k: How many, from 1 to S.

    Returns:
        Values and columns (int64), ``(..., k)``, largest first; of equal scores the lower column.
        NaN comes before every number.

    Raises:
        ValueError: dtype or ``k`` is wrong, or scores are not dense.
    """
    _check_kinds("top_rows", scores, k)
    if scores.dim() == 0:
        message = "top_rows: scores must have shape (..., S), got []"
        raise ValueError(message)
    _check("top_rows", scores, k, scores.shape[-1])
    return _decoded(_keys(scores, 0).topk(k).values, scores.dtype)


def distributed_topk(
    scores: Tensor, k: int, comm: UlyssesCommunicator, *, seq_splits: Sequence[int] | None = None
) -> tuple[Tensor, Tensor]:
    """The ``k`` largest scores of each row, whose columns are sharded between the ranks.

    Each rank chooses among its own columns, one :func:`ulysses_ops.all_gather` brings
    ``min(k, S_p)`` candidates of 8 bytes from every rank ``p``, and each rank merges them. The
    result equals :func:`top_rows` of the whole rows, bit for bit, on every rank.

    Args:
        scores: ``(B, Q, S_local)``: of every row, the columns of this rank. Rank ``p`` has columns
            ``off_s(p)`` up to ``off_s(p) + S_p``. Columns that must not be chosen hold ``-inf``;
            where fewer than ``k`` are left, some of them are chosen all the same.
        k: How many, from 1 to ``S_global``; a rank may hold fewer columns than that.
        comm: An open communicator.
        seq_splits: Columns of each rank, some may be 0; ``(S_local,) * world_size`` when left out.

    Returns:
        Values and global columns (int64), ``(B, Q, k)``, largest first; of equal scores the lower
        column. NaN comes before every number. No gradients.

    Raises:
        ValueError: shape, dtype, ``k`` or splits are wrong, raised before any rank waits; or, on
            every rank, ranks differ in splits, ``B``, ``Q``, ``k`` or dtype. Where the columns of
            one rank alone are not those that ``seq_splits`` declare, all ranks raise it at the
            first such call, and that rank alone later.
        UlyssesError: as :func:`ulysses_ops.all_gather`.

    Collective: every rank calls it with the same ``B``, ``Q``, ``k`` and dtype. Ranks meet where
    one of these or the splits are new, and not while a compiler traces.
    """
    op = "distributed_topk"
    check_communicator(op, comm)
    _check_kinds(op, scores, k)
    if scores.dim() != 3:
        message = f"{op}: scores must have shape (B, Q, S_local), got {list(scores.shape)}"
        raise ValueError(message)
    world_size, held = comm.world_size, scores.shape[2]
    given = (held,) * world_size if seq_splits is None else seq_splits
    splits = checked_splits(op, "seq", given, None, world_size)
    _check(op, scores, k, sum(splits))
    _meet(op, scores, k, comm, splits)
    with torch.no_grad():
        keys = _keys(scores.detach(), sum(splits[: comm.rank]))
        own = keys.topk(min(k, held)).values if held else keys
        # Candidates are the rows of the exchange: (B, candidates, Q, 1).
        sent = own.transpose(1, 2).unsqueeze(3).contiguous()
        numbers = tuple(min(k, size) for size in splits)
        found = all_gather(sent, comm, seq_splits=numbers).squeeze(3).transpose(1, 2)
        return _decoded(found.topk(k).values, scores.dtype)


def _meet(
    op: str, scores: Tensor, k: int, comm: UlyssesCommunicator, splits: tuple[int, ...]
) -> None:
    """Compare what the ranks are about to do, where it is new; refuse columns that are not there.

    As many candidates may come from ranks that hold different numbers of columns, or that were
    asked for different ``k``: their exchange alone would not show it.
    """
    batch, queries, held = scores.shape
    refusal = ""
    if splits[comm.rank] != held:
        refusal = (
            f"{op}: rank {comm.rank} holds {held} columns, seq_splits={list(splits)} say "
            f"{splits[comm.rank]}; give the columns that all ranks hold"
        )
    if torch.compiler.is_compiling():
        if refusal:
            raise ValueError(refusal)
        return
    spec = WindowSpec.all_gather(
        f"{op}, k={int(k)}",
        (batch, sum(splits), queries, 1),
        scores.dtype,
        comm.world_size,
        seq_splits=splits,
    )
    with comm.turn.of(op):
        if refusal:
            refuse(comm, [spec], refusal)
        agree(comm, spec)
