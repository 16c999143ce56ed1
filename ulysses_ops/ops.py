"""The public operators ``ulysses::*``: schemas, fakes, autograd, implementations, Python wrappers.

NOTE [deferred operators]: ``*_into`` begins an exchange and ``complete`` ends it. Between the two
the window must not be read and the source not be changed. All three mutate a window and the shared
``token``, so a compiler neither removes nor reorders them. ``Tag.flexible_layout`` keeps it from
handing ``complete`` a copy of a source while the original, still being sent, is freed or reused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from ._native import NATIVE
from .collective import CollectiveRounds
from .communicator import UlyssesCommunicator
from .exchange import check_source, window_of
from .functional import (
    all_gather_backward,
    all_heads,
    exchange_once,
    fake,
    gather_backward,
    save_all_gather,
    save_for_backward,
    scatter_backward,
)
from .names import check_call, find_communicator

# Lengths change from call to call, and a compiler must not compile anew for each; heads stay.
_SPLITS = "SymInt[]? seq_splits=None, int[]? head_splits=None"
_GROUP = "int world_size, str group_name"
_ORDER = "Tensor(b!) token"

SCHEMAS = {
    # (B, S_local, H, D) -> (B, S_global, H_local, D), fresh and owned by the caller
    "scatter": f"(Tensor x, {_GROUP}, {_SPLITS}, int[]? head_starts=None) -> Tensor",
    # (B, S_global, H_local, D) -> (B, S_local, H, D), fresh and owned by the caller
    "gather": f"(Tensor x, {_GROUP}, {_SPLITS}, SymInt[]? seq_starts=None) -> Tensor",
    # (B, S_local, H, D) -> (B, S_global, H, D) on every rank, fresh and owned by the caller
    "all_gather": f"(Tensor x, {_GROUP}, SymInt[]? seq_splits=None) -> Tensor",
    # zero-copy and deferred; with `peer`, x is the part cut for that rank
    "scatter_into": f"(Tensor x, Tensor(a!) window, {_ORDER}, {_GROUP}, int? peer=None) -> ()",
    "gather_into": f"(Tensor x, Tensor(a!) window, {_ORDER}, {_GROUP}, int? peer=None) -> ()",
    "all_gather_into": f"(Tensor x, Tensor(a!) window, {_ORDER}, {_GROUP}, int? peer=None) -> ()",
    # after it, on the current stream, windows may be read and sources reused
    "complete": f"(Tensor(a!)[] windows, Tensor[] sources, {_ORDER}, {_GROUP}) -> ()",
}
_DEFERRED_TAGS = (torch.Tag.flexible_layout,)
_TAGS: dict[str, tuple[torch.Tag, ...]] = {
    "scatter": (torch.Tag.pt2_compliant_tag,),
    "gather": (torch.Tag.pt2_compliant_tag,),
    "all_gather": (torch.Tag.pt2_compliant_tag,),
    "scatter_into": _DEFERRED_TAGS,
    "gather_into": _DEFERRED_TAGS,
    "all_gather_into": _DEFERRED_TAGS,
    "complete": _DEFERRED_TAGS,
}


# ---- implementations -----------------------------------------------------------------------------


def _send(
    op: str,
    x: Tensor,
    window_tensor: Tensor,
    world_size: int,
    group_name: str,
    peer: int | None,
) -> None:
    comm = find_communicator(group_name, world_size, op)
    window = window_of(comm, window_tensor, op)
    check_source(comm, window, x, peer, op)
    if comm.copy_engine is not None:  # an all-gather, which the compiled library knows as scatter
        group = (comm.token, world_size, group_name)
        torch.ops.ulysses.scatter_into.default(x, window_tensor, *group, peer)
        return
    CollectiveRounds.of(comm).send(op, x, window, peer)


def _scatter_into(
    x: Tensor,
    window: Tensor,
    token: Tensor,
    world_size: int,
    group_name: str,
    peer: int | None = None,
) -> None:
    _send("scatter_into", x, window, world_size, group_name, peer)


def _gather_into(
    x: Tensor,
    window: Tensor,
    token: Tensor,
    world_size: int,
    group_name: str,
    peer: int | None = None,
) -> None:
    _send("gather_into", x, window, world_size, group_name, peer)


def _all_gather_into(
    x: Tensor,
    window: Tensor,
    token: Tensor,
    world_size: int,
    group_name: str,
    peer: int | None = None,
) -> None:
    _send("all_gather_into", x, window, world_size, group_name, peer)


def _complete(
    windows: list[Tensor],
    sources: list[Tensor],
    token: Tensor,
    world_size: int,
    group_name: str,
) -> None:
    comm = find_communicator(group_name, world_size, "complete")
    found = [window_of(comm, window, "complete") for window in windows]
    CollectiveRounds.of(comm).complete(comm, found, sources)


def _refusal(work: Callable[[], None]) -> str:
    """What the compiled library, which calls this, is to raise; empty when all went well."""
    try:
        work()
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""


def _collective_send(
    x: Tensor, window: Tensor, world_size: int, group_name: str, peer: int | None, is_gather: bool
) -> str:
    op = "gather_into" if is_gather else "scatter_into"
    return _refusal(lambda: _send(op, x, window, world_size, group_name, peer))


def _collective_complete(
    windows: list[Tensor], sources: list[Tensor], world_size: int, group_name: str
) -> str:
    return _refusal(lambda: _complete(windows, sources, windows[0], world_size, group_name))


def _scatter(
    x: Tensor,
    world_size: int,
    group_name: str,
    seq_splits: Sequence[int] | None = None,
    head_splits: Sequence[int] | None = None,
    head_starts: Sequence[int] | None = None,
) -> Tensor:
    return exchange_once("scatter", x, world_size, group_name, seq_splits, head_splits, head_starts)


def _gather(
    x: Tensor,
    world_size: int,
    group_name: str,
    seq_splits: Sequence[int] | None = None,
    head_splits: Sequence[int] | None = None,
    seq_starts: Sequence[int] | None = None,
) -> Tensor:
    return exchange_once("gather", x, world_size, group_name, seq_splits, head_splits, seq_starts)


def _all_gather(
    x: Tensor, world_size: int, group_name: str, seq_splits: Sequence[int] | None = None
) -> Tensor:
    heads = all_heads(x.shape, world_size)
    return exchange_once("all_gather", x, world_size, group_name, seq_splits, *heads)


# ---- fakes ---------------------------------------------------------------------------------------


def _fake_scatter(
    x: Tensor,
    world_size: int,
    group_name: str,
    seq_splits: Sequence[int] | None = None,
    head_splits: Sequence[int] | None = None,
    head_starts: Sequence[int] | None = None,
) -> Tensor:
    splits = (seq_splits, head_splits, head_starts)
    return fake("scatter", x, world_size, group_name, *splits)


def _fake_gather(
    x: Tensor,
    world_size: int,
    group_name: str,
    seq_splits: Sequence[int] | None = None,
    head_splits: Sequence[int] | None = None,
    seq_starts: Sequence[int] | None = None,
) -> Tensor:
    splits = (seq_splits, head_splits, seq_starts)
    return fake("gather", x, world_size, group_name, *splits)


def _fake_all_gather(
    x: Tensor, world_size: int, group_name: str, seq_splits: Sequence[int] | None = None
) -> Tensor:
    heads = all_heads(x.shape, world_size)
    return fake("all_gather", x, world_size, group_name, seq_splits, *heads)


def _fake_into(*args: Any, **kwargs: Any) -> None:
    return None


# The compiled library implements these on CUDA, and calls back for groups that are not its own.
COMPILED = ("scatter_into", "gather_into", "complete")
_FOR_COMPILED: dict[str, tuple[str, Callable[..., str]]] = {
    "_collective_send": (
        f"(Tensor x, Tensor(a!) window, {_GROUP}, int? peer, bool is_gather) -> str",
        _collective_send,
    ),
    "_collective_complete": (
        f"(Tensor(a!)[] windows, Tensor[] sources, {_GROUP}) -> str",
        _collective_complete,
    ),
}

# ---- registration --------------------------------------------------------------------------------


def _register() -> torch.library.Library:
    library = torch.library.Library("ulysses", "FRAGMENT")
    for name, schema in SCHEMAS.items():
        library.define(name + schema, tags=_TAGS[name])
    implementations: dict[str, Any] = {
        "scatter": _scatter,
        "gather": _gather,
        "all_gather": _all_gather,
        "scatter_into": _scatter_into,
        "gather_into": _gather_into,
        "all_gather_into": _all_gather_into,
        "complete": _complete,
    }
    for name, implementation in implementations.items():
        library.impl(name, implementation, "CPU")
        if name not in COMPILED or not NATIVE.cuda:
            library.impl(name, implementation, "CUDA")
    for name, (schema, implementation) in _FOR_COMPILED.items():
        library.define(name + schema)
        library.impl(name, implementation, "CUDA")
    fakes = {"scatter": _fake_scatter, "gather": _fake_gather, "all_gather": _fake_all_gather}
    for name, stand_in in fakes.items():
        torch.library.register_fake(f"ulysses::{name}", stand_in, lib=library)
    for name in ("scatter_into", "gather_into", "all_gather_into", "complete"):
        torch.library.register_fake(f"ulysses::{name}", _fake_into, lib=library)
    for name, backward, save in (
        ("scatter", scatter_backward, save_for_backward),
        ("gather", gather_backward, save_for_backward),
        ("all_gather", all_gather_backward, save_all_gather),
    ):
        torch.library.register_autograd(
            f"ulysses::{name}", backward, setup_context=save, lib=library
        )
    return library


LIBRARY = _register()  # registrations last as long as this object


# ---- Python wrappers -----------------------------------------------------------------------------


def scatter(
    x: Tensor,
    comm: UlyssesCommunicator,
    *,
    seq_splits: Sequence[int] | None = None,
    head_splits: Sequence[int] | None = None,
    head_starts: Sequence[int] | None = None,
) -> Tensor:
    """Trade this rank's sequence shard of all heads for the whole sequence of its own heads.

    ``y[b, off_s(p) + s, h, d] = x_p[b, s, off_h(rank) + h, d]`` for every rank ``p``, bit-exact and
    differentiable (the backward is :func:`gather`).

    Args:
        x: ``(B, S_local, H, D)`` on ``comm.device``, any dtype. Read in place where head_dim is
            dense and nothing overlaps (a view of a fused projection is, a transposed view too),
            else after one copy.
        comm: An open communicator.
        seq_splits: Rows held by each rank, some may be 0; ``(S_local,) * world_size`` when left
            out. See :func:`ulysses_ops.even_splits`.
        head_splits: Heads for each rank; even when left out, and then H must be divisible.
        head_starts: First head ``off_h(r)`` for each rank, with ``head_splits``. Ranges may
            overlap: a head goes to every rank that has it in its range, and its gradient is the
            sum of theirs.

    Returns:
        ``(B, S_global, H_local, D)``, contiguous, owned by the caller, ready on the current stream.

    Raises:
        ValueError: shape, device or splits are wrong; raised before any rank waits. If it is only
            this rank's ``x`` that is not as ``seq_splits`` say, all ranks raise it at the first
            call with these splits, and this rank alone later.
        UlyssesError: closed, or a capture needs a window that is not reserved.

    Collective: every rank calls it with matching shapes, in the same order. The first call with a
    shape is a meeting of the ranks (see :func:`ulysses_ops.reserve`); later ones never wait on the
    host.

    Source: DeepSpeed-Ulysses, arXiv:2309.14509.
    """
    check_call("scatter", x, comm, seq_splits, head_splits, head_starts)
    return cast(
        Tensor,
        torch.ops.ulysses.scatter(
            x, comm.world_size, comm.name, seq_splits, head_splits, head_starts
        ),
    )


def gather(
    x: Tensor,
    comm: UlyssesCommunicator,
    *,
    seq_splits: Sequence[int] | None = None,
    head_splits: Sequence[int] | None = None,
    seq_starts: Sequence[int] | None = None,
) -> Tensor:
    """Trade the whole sequence of this rank's heads for its own sequence shard of all heads.

    ``y[b, s, off_h(p) + h, d] = x_p[b, off_s(rank) + s, h, d]`` for every rank ``p``: the inverse
    of :func:`scatter`, with the same contract.

    Args:
        x: ``(B, S_global, H_local, D)`` on ``comm.device``, any dtype.
        comm: An open communicator.
        seq_splits: Rows for each rank; even when left out, and then S_global must be divisible.
        head_splits: Heads held by each rank; even when left out.
        seq_starts: First row ``off_s(r)`` for each rank, with ``seq_splits``. Ranges may overlap:
            with ``(0,) * world_size`` and ``(S_global,) * world_size`` every rank gets all rows.

    Returns:
        ``(B, S_local, H, D)``, contiguous, owned by the caller, ready on the current stream.

    Raises:
        ValueError: shape, device or splits are wrong; raised before any rank waits.
        UlyssesError: closed, or a capture needs a window that is not reserved.

    Collective: as :func:`scatter`.

    Source: DeepSpeed-Ulysses, arXiv:2309.14509.
    """
    check_call("gather", x, comm, seq_splits, head_splits, seq_starts)
    return cast(
        Tensor,
        torch.ops.ulysses.gather(
            x, comm.world_size, comm.name, seq_splits, head_splits, seq_starts
        ),
    )


def all_gather(
    x: Tensor, comm: UlyssesCommunicator, *, seq_splits: Sequence[int] | None = None
) -> Tensor:
    """Put the sequence shards of all ranks together, all heads of them, on every rank.

    ``y[b, off_s(p) + s, h, d] = x_p[b, s, h, d]`` for every rank ``p``, bit-exact and
    differentiable (the gradient of a row is the sum of every rank's, added in the order of ranks).
    For what attention by heads cannot divide: latents of K and V, a single KV head, indexer keys.

    Args:
        x: ``(B, S_local, H, D)`` on ``comm.device``, any dtype; read as :func:`scatter` does.
        comm: An open communicator.
        seq_splits: Rows held by each rank, some may be 0; ``(S_local,) * world_size`` when left
            out. See :func:`ulysses_ops.even_splits`.

    Returns:
        ``(B, S_global, H, D)``, contiguous, owned by the caller, ready on the current stream.

    Raises:
        ValueError: shape, device or splits are wrong; raised before any rank waits, as by
            :func:`scatter`.
        UlyssesError: closed, or a capture needs a window that is not reserved.

    Collective: as :func:`scatter`.
    """
    check_call("all_gather", x, comm, seq_splits)
    return cast(Tensor, torch.ops.ulysses.all_gather(x, comm.world_size, comm.name, seq_splits))
