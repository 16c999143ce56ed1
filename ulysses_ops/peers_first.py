"""The stages of an attention layer whose exchanges hide: peers first, own last.

::

    project   V, K, Q of the peers' heads -> their windows, then of the own heads -> the own windows
    attend    query rows of the peers -> their windows, then the own rows
    add up    y = own rows * W_out[own heads], then y += peers' heads * W_out[their heads]

All work is enqueued on the caller's stream, the exchanges go through :class:`Exchange` alone. Q, K
and V are one channel and the output is another, and every round opens: a rank that has sent its
peers' rows may still be reading K and V for its own. Own parts are written after the first send of
their round, which orders the caller behind earlier readers of the window.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .exchange import Exchange
from .part_norm_rope import NormRope, NormRopeKernel, row_factor
from .schedule import ProjectionSplit, Schedule, peer_groups
from .values_first import AttentionKernel
from .windows import Window

BeginExchange = Callable[[], Exchange]


def _only(rank: int) -> range:
    return range(rank, rank + 1)


@dataclass(frozen=True, eq=False)
class Projected:
    """One of V, K and Q: what it is computed with, and where it goes.

    Attributes:
        weight: ``(heads * D, width)``; the rows for one rank lie side by side.
        bias: ``(heads * D,)``, or none.
        window: Where it goes, of direction scatter.
        norm_rope: What happens to it before it is sent.
        norm_weight: ``(D,)``, or ``(heads, D)`` with a norm across heads, or none.
    """

    weight: Tensor
    bias: Tensor | None
    window: Window
    norm_rope: NormRope
    norm_weight: Tensor | None

    @property
    def is_across(self) -> bool:
        """Whether its norm needs all heads of a row."""
        return self.norm_rope.norm == "across_heads"

    def heads(self, ranks: range) -> slice:
        """The heads of these ranks, which are neighbours."""
        layout = self.window.layout
        return slice(layout.head_offset(ranks.start), layout.head_offset(ranks.stop))

    def _rows(self, ranks: range) -> tuple[Tensor, Tensor | None]:
        heads, dim = self.heads(ranks), self.window.layout.head_dim
        rows = slice(heads.start * dim, heads.stop * dim)
        return self.weight[rows], None if self.bias is None else self.bias[rows]

    def multiply(self, x: Tensor, ranks: range) -> Tensor:
        """``(B, S_local, heads of these ranks, D)``."""
        weight, bias = self._rows(ranks)
        heads: Tensor = F.linear(x, weight, bias).unflatten(-1, (-1, self.window.layout.head_dim))
        return heads

    def store(self, x: Tensor, rank: int) -> None:
        """Write :meth:`multiply` for this rank's own heads into its own view."""
        own = self.window.own_view
        if not own.is_contiguous():  # more than one batch
            own.copy_(self.multiply(x, _only(rank)))
            return
        rows = x.flatten(0, 1)
        weight, bias = self._rows(_only(rank))
        out = own.view(rows.shape[0], -1)
        if bias is None:
            torch.mm(rows, weight.t(), out=out)
        else:
            torch.addmm(bias, rows, weight.t(), out=out)


@dataclass(frozen=True, eq=False)
class Rotation:
    """The caller's tables of angles, and the kernel that uses them."""

    cos: Tensor | None
    sin: Tensor | None
    kernel: NormRopeKernel

    def apply(
        self,
        part: Tensor,
        to: Projected,
        ranks: range,
        factor: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Normalise and rotate the heads of these ranks."""
        if to.norm_rope.is_identity:
            return part if out is None else out.copy_(part)
        weight = to.norm_weight
        if weight is not None and weight.dim() == 2:
            weight = weight[to.heads(ranks)]
        return self.kernel(part, to.norm_rope, weight, factor, self.cos, self.sin, out)


def send_parts(exchange: Exchange, whole: Tensor, window: Window, ranks: range) -> None:
    """Send each of these ranks its part of a tensor that holds the parts of all of them."""
    layout = window.layout
    is_scatter = layout.direction == "scatter"
    splits, dim = (layout.head_splits, 2) if is_scatter else (layout.seq_splits, 1)
    parts = whole.split([splits[rank] for rank in ranks], dim)
    for rank, part in zip(ranks, parts, strict=True):
        exchange.send(part, window, peer=rank)


def project(
    x: Tensor,
    projected: tuple[Projected, Projected, Projected],
    rotation: Rotation,
    rank: int,
    split: ProjectionSplit,
    exchange: Exchange,
) -> None:
    """Compute V, K and Q (given in this order) and send them; the caller completes.

    A norm across heads needs the sum of squares of a whole row. K and Q are then multiplied whole
    and only normalised, rotated and sent by destination; V, which needs no norm, is multiplied by
    destination, and last of all into the own window.
    """
    everyone, own = range(projected[0].window.layout.world_size), _only(rank)

    def multiplied(one: Projected) -> tuple[Tensor, Tensor | None]:
        whole = one.multiply(x, everyone)
        return whole, row_factor(whole, one.norm_rope.eps) if one.is_across else None

    if split == "whole":
        for one in projected:
            whole, factor = multiplied(one)
            exchange.send(rotation.apply(whole, one, everyone, factor), one.window)
        return
    groups = peer_groups(len(everyone), rank, split)
    wholes = []
    for one in (one for one in projected if one.is_across):
        whole, factor = multiplied(one)
        wholes.append((one, whole, factor))
        for ranks in groups:
            part = rotation.apply(whole[:, :, one.heads(ranks)], one, ranks, factor)
            send_parts(exchange, part, one.window, ranks)
    by_part = [one for one in projected if not one.is_across]
    for ranks in groups:
        for one in by_part:
            part = rotation.apply(one.multiply(x, ranks), one, ranks)
            send_parts(exchange, part, one.window, ranks)
    for one, whole, factor in wholes:
        rotation.apply(whole[:, :, one.heads(own)], one, own, factor, one.window.own_view)
    for one in by_part:
        if one.norm_rope.is_identity:
            one.store(x, rank)
        else:
            rotation.apply(one.multiply(x, own), one, own, None, one.window.own_view)


@dataclass(frozen=True, eq=False)
class Output:
    """The output projection.

    Attributes:
        weight: ``(out_width, H * D)``.
        bias: ``(out_width,)``, or none.
    """

    weight: Tensor
    bias: Tensor | None

    def of_heads(self, window: Window, ranks: range) -> tuple[Tensor, Tensor]:
        """What arrived in the window from these ranks, and the columns that it is for."""
        layout = window.layout
        first, last = layout.head_offset(ranks.start), layout.head_offset(ranks.stop)
        columns = slice(first * layout.head_dim, last * layout.head_dim)
        return window.tensor.flatten(2)[..., columns], self.weight[:, columns]

    def by_chunk(self, chunks: int, world_size: int) -> list[Tensor]:
        """The columns for each chunk of heads: those of every rank's heads of it.

        Copied in each step, also in a captured one: a copy that is kept cannot tell for sure that
        the weight has changed since.
        """
        columns = self.weight.detach().unflatten(1, (world_size, chunks, -1))
        return [part.flatten(1) for part in columns.unbind(2)]


def attend(
    qkv: tuple[Tensor, Tensor, Tensor],
    kernel: AttentionKernel,
    output: Output,
    windows: Sequence[Window],
    rank: int,
    schedule: Schedule,
    begin: BeginExchange,
) -> Tensor:
    """Attend, exchange the result and project it: ``(B, S_local, out_width)``.

    Args:
        qkv: Whole Q, K and V of the own heads, ``(B, S_global, H_local, D)``.
        kernel: Attention; each query row and each head by itself.
        output: The output projection.
        windows: Of direction gather; one, or one a chunk.
        rank: This rank.
        schedule: How to split.
        begin: Makes an exchange.
    """
    if schedule.attention == "heads":
        return _attend_by_heads(qkv, kernel, output, windows, begin)
    (window,) = windows
    with begin() as exchange:
        if schedule.attention == schedule.output == "whole":
            exchange.send(kernel(*qkv), window)
        else:
            own_rows = _attend_rows(qkv, kernel, window, rank, schedule, exchange)
            if schedule.output == "slabs":
                # Straight from the kernel's output: the own part of the window is not needed.
                _, weight = output.of_heads(window, _only(rank))
                y = F.linear(own_rows.flatten(2), weight, output.bias)
            else:
                window.own_view.copy_(own_rows)
    if schedule.output == "whole":
        return F.linear(window.tensor.flatten(2), output.weight, output.bias)
    for ranks in peer_groups(window.layout.world_size, rank, "peers"):
        _add_product(y, *output.of_heads(window, ranks))
    return y


def _attend_rows(
    qkv: tuple[Tensor, Tensor, Tensor],
    kernel: AttentionKernel,
    window: Window,
    rank: int,
    schedule: Schedule,
    exchange: Exchange,
) -> Tensor:
    """Attend, send the peers their rows, and return the own rows."""
    q, k, v = qkv
    layout = window.layout
    whole = kernel(q, k, v) if schedule.attention == "whole" else None

    def rows_of(ranks: range) -> Tensor:
        rows = slice(layout.seq_offset(ranks.start), layout.seq_offset(ranks.stop))
        return kernel(q[:, rows], k, v) if whole is None else whole[:, rows]

    is_single = schedule.attention == "destinations"
    for ranks in peer_groups(layout.world_size, rank, "destinations" if is_single else "peers"):
        send_parts(exchange, rows_of(ranks), window, ranks)
    return rows_of(_only(rank))


def _attend_by_heads(
    qkv: tuple[Tensor, Tensor, Tensor],
    kernel: AttentionKernel,
    output: Output,
    windows: Sequence[Window],
    begin: BeginExchange,
) -> Tensor:
    """Chunk after chunk: one is attended while the one before it travels."""
    q, k, v = (x.chunk(len(windows), dim=2) for x in qkv)
    weights = output.by_chunk(len(windows), windows[0].layout.world_size)
    y: Tensor | None = None
    with ExitStack() as rounds:  # forgets, after an error, what is in flight
        exchange = rounds.enter_context(begin())
        for chunk, window in enumerate(windows):
            attended = kernel(q[chunk], k[chunk], v[chunk])
            exchange.complete()  # the chunk before: its copy is over by now
            exchange.send(attended, window)
            if chunk > 0:
                y = _add_chunk(y, windows[chunk - 1], weights[chunk - 1], output.bias)
    return _add_chunk(y, windows[-1], weights[-1], output.bias)


def _add_chunk(y: Tensor | None, window: Window, weight: Tensor, bias: Tensor | None) -> Tensor:
    received = window.tensor.flatten(2)
    if y is None:
        return F.linear(received, weight, bias)
    _add_product(y, received, weight)
    return y


def _add_product(y: Tensor, slab: Tensor, weight: Tensor) -> None:
    """``y += slab * weight^T``, rounded once."""
    y.flatten(0, 1).addmm_(slab.flatten(0, 1), weight.t())
