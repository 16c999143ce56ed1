"""The block through :class:`UlyssesAttention`: the peers' parts first, the own part last.

Norm and rotation are computed by the same kernel as in the other variants, so that what differs is
the order and the splits alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ulysses_ops.communicator import UlyssesCommunicator
from ulysses_ops.exchange import Exchange
from ulysses_ops.layer import UlyssesAttention
from ulysses_ops.part_norm_rope import NormRope
from ulysses_ops.schedule import PEERS_FIRST, Schedule
from ulysses_ops.tools.block import EPS, Block, has_kernels
from ulysses_ops.tools.block_setting import Run, Setting
from ulysses_ops.window_spec import WindowSpec
from ulysses_ops.windows import Window, reserve

Planned = Schedule | Literal["auto"]

PLANNED = "as planned"
PACKED = "peers first packed"
EPILOGUE = "peers first in one kernel"  # a rank's heads of Q, K and V, norm and RoPE included
# By the name of the variant.
SCHEDULES: dict[str, Planned] = {
    PLANNED: "auto",
    "peers first": PEERS_FIRST,
    PACKED: replace(PEERS_FIRST, qkv_weights="packed"),
    EPILOGUE: replace(PEERS_FIRST, qkv_weights="packed", norm_rope="epilogue"),
    "peers first with whole attention": Schedule("peers", "whole", "slabs"),
    "peers first in projection alone": Schedule("peers", "whole", "whole"),
}
SPLIT_ALONE = "peers first without copies"
HANDSHAKES_ALONE = "peers first with handshakes alone"
LINKS_AWAKE = "peers first with links awake"
EPILOGUE_ALONE = "one kernel without copies"
EPILOGUE_HANDSHAKES = "one kernel with handshakes alone"


class SplitAlone(UlyssesAttention):
    """The layer with its splits and without its exchanges: what splitting alone costs.

    Results mean nothing, since what peers would have sent is missing.
    """

    def _shared_progress(self) -> None:
        """Keep none: nothing is sent beside a projection."""

    def begin_exchange(self) -> Exchange:
        """Start an exchange that sends nothing."""
        return SendsNothing(self.comm)


class SendsNothing(Exchange):
    """An exchange in name: nothing leaves, and nothing is waited for."""

    def open(self, window: Window) -> None:
        """Do nothing."""

    def send(self, x: Tensor, window: Window, *, peer: int | None = None) -> None:
        """Do nothing."""


class HandshakesAlone(UlyssesAttention):
    """The layer with its splits and handshakes, and a few bytes: what it costs to keep in step.

    A rank that is slower for a moment holds up the others at every exchange, and not at the end
    alone. Results mean nothing.

    Attributes:
        num_elems: What a peer is sent in an exchange.
    """

    num_elems: ClassVar[int] = 8

    @cached_property
    def _little(self) -> tuple[Window, Tensor]:
        """Somewhere to send, and what. Collective at first, before a capture."""
        comm = self.comm
        dims = (1, comm.world_size, comm.world_size, self.num_elems)
        name = f"bench.little.{self.num_elems}"
        (window,) = reserve(comm, [WindowSpec(name, "scatter", dims, torch.bfloat16)])
        part = torch.zeros(1, 1, 1, self.num_elems, dtype=torch.bfloat16, device=comm.device)
        return window, part

    def begin_exchange(self) -> Exchange:
        """Start an exchange that sends little."""
        return SendsLittle(self.comm, *self._little)


class LinksAwake(HandshakesAlone):
    """The same with as much as wakes every link to the peers, and takes no time: 64 KiB.

    What it costs over :class:`HandshakesAlone` is their power.
    """

    num_elems = 32 << 10


class SendsLittle(Exchange):
    """An exchange that opens and closes like another, and sends every peer the same few bytes."""

    def __init__(self, comm: UlyssesCommunicator, window: Window, part: Tensor) -> None:
        """Begin with nothing sent."""
        super().__init__(comm)
        self._little = window
        self._part = part
        self._sent: set[int] = set()

    def open(self, window: Window) -> None:
        """Open the round of what is sent instead."""
        super().open(self._little)

    def send(self, x: Tensor, window: Window, *, peer: int | None = None) -> None:
        """Send little instead, to each peer the first time."""
        for other in range(self._comm.world_size) if peer is None else (peer,):
            if other != self._comm.rank and other not in self._sent:
                self._sent.add(other)
                super().send(self._part, self._little, peer=other)

    def complete(self) -> None:
        """End the round; the next send opens another."""
        super().complete()
        self._sent.clear()


def layer_variant(
    schedule: Planned, kind: type[UlyssesAttention] = UlyssesAttention
) -> Callable[[Setting], Run]:
    """The block in one schedule."""

    def build(setting: Setting) -> Run:
        layer, cos, sin = layer_of(setting, schedule, kind)
        return lambda x: setting.block.expand(layer(x, cos, sin))

    return build


def layer_of(
    setting: Setting, schedule: Planned, kind: type[UlyssesAttention] = UlyssesAttention
) -> tuple[UlyssesAttention, Tensor, Tensor]:
    """The block's attention layer, and its tables of angles as the layer takes them.

    Where norm and RoPE are a kernel of Inductor's, that has tables of its own.
    """
    block = setting.block
    weights = block.weights
    layer = kind.from_weights(
        setting.comm,
        weights.q,
        weights.k,
        weights.v,
        weights.out,
        num_heads=block.shape.heads,
        norm_rope=NormRope("per_head", "interleaved", EPS),
        q_norm=weights.q_norm,
        k_norm=weights.k_norm,
        attention=block.attention,
        norm_rope_kernel=None if has_kernels(block.cosines.device) else _norm_rope_of(block),
        schedule=schedule,
        pack_weights=True,
    )
    cos = block.cosines[:, 0, ::2].contiguous()
    sin = block.sines[:, 0, 1::2].contiguous()
    return layer, cos, sin


def _norm_rope_of(block: Block) -> Callable[..., Tensor]:
    def kernel(
        x: Tensor,
        kind: NormRope,
        weight: Tensor | None,
        factor: Tensor | None,
        cos: Tensor | None,
        sin: Tensor | None,
        out: Tensor | None = None,
    ) -> Tensor:
        assert weight is not None
        return block.norm_rope(x, weight, block.cosines, block.sines, out)

    return kernel
