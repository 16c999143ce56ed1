"""What a window is for: the same on every rank, with a key that says so."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from .kinds import check_at_least_1, check_kind, check_sizes, shown
from .plan import Direction, Layout, layout_of_global

SHAPE = "four whole numbers, (B, S_global, H, D)"


@dataclass(frozen=True)
class WindowSpec:
    """What a window is for; equal on every rank.

    Attributes:
        name: Tells windows of the same shape apart.
        direction: ``"scatter"`` or ``"gather"``.
        shape: Global shape ``(B, S_global, H, D)``.
        dtype: Element type; bytes move, so any.
        channel: Windows of one channel are opened and completed together, and none of them may be
            read between the first send into one and ``complete``. By default a channel of its own.
        seq_splits: Rows held by each rank; even when left out.
        head_splits: Heads held by each rank; even when left out.
        seq_starts: First row of each rank, where ranges do not follow each other; with
            ``seq_splits``. S_global then counts all rows: those in a gap of a scatter are nobody's
            to send, and the receiver's to write.
        head_starts: First head of each rank; likewise.
    """

    name: str
    direction: Direction
    shape: tuple[int, int, int, int]
    dtype: torch.dtype
    channel: str | None = None
    seq_splits: tuple[int, ...] | None = None
    head_splits: tuple[int, ...] | None = None
    seq_starts: tuple[int, ...] | None = None
    head_starts: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        """Take lists too, and refuse what no rank could allocate."""
        check_kind("WindowSpec", "name", self.name, str, "a text")
        check_kind("WindowSpec", "channel", self.channel or "", str, "a text, or None")
        check_sizes("WindowSpec", "shape", self.shape, SHAPE)
        for name in ("shape", "seq_splits", "head_splits", "seq_starts", "head_starts"):
            value = getattr(self, name)
            check_sizes("WindowSpec", name, value)
            if value is not None:
                object.__setattr__(self, name, tuple(value))
        if not isinstance(self.dtype, torch.dtype):
            message = f"WindowSpec: dtype={shown(self.dtype)} must be a torch.dtype"
            raise ValueError(message)

    @classmethod
    def of_layout(
        cls, name: str, layout: Layout, dtype: torch.dtype, channel: str | None = None
    ) -> WindowSpec:
        """Spec of a window for this layout, its splits written out."""
        return cls(
            name,
            layout.direction,
            layout.global_shape,
            dtype,
            channel,
            layout.seq_splits,
            layout.head_splits,
            layout.seq_starts,
            layout.head_starts,
        )

    @classmethod
    def all_gather(
        cls,
        name: str,
        shape: tuple[int, int, int, int],
        dtype: torch.dtype,
        world_size: int,
        *,
        channel: str | None = None,
        seq_splits: tuple[int, ...] | None = None,
    ) -> WindowSpec:
        """Spec of a window that gets all rows and all heads, ``(B, S_global, H, D)``, on each rank.

        It is a scatter in which the heads of every rank are all of them.

        Raises:
            ValueError: ``shape`` or ``world_size`` is wrong.
        """
        check_at_least_1("WindowSpec.all_gather", world_size=world_size)
        check_sizes("WindowSpec.all_gather", "shape", shape, SHAPE)
        if shape is None or len(shape) != 4:
            message = f"WindowSpec.all_gather: shape={shape and list(shape)} must be {SHAPE}"
            raise ValueError(message)
        heads = (shape[2],) * world_size
        starts = (0,) * world_size
        return cls(name, "scatter", shape, dtype, channel, seq_splits, heads, None, starts)

    def layout(self, world_size: int) -> Layout:
        """Layout of the exchange.

        Raises:
            ValueError: the shape cannot be split over ``world_size`` ranks.
        """
        return _layout(self, world_size)

    def key(self, world_size: int) -> str:
        """Text that is equal for equal windows, on every rank."""
        return _key(self, world_size)


# Both are asked for at every eager call.
@lru_cache(maxsize=1024)
def _layout(spec: WindowSpec, world_size: int) -> Layout:
    return layout_of_global(
        "reserve",
        spec.direction,
        spec.shape,
        world_size,
        spec.seq_splits,
        spec.head_splits,
        spec.seq_starts,
        spec.head_starts,
    )


@lru_cache(maxsize=1024)
def _key(spec: WindowSpec, world_size: int) -> str:
    layout = spec.layout(world_size)
    return (
        f"{spec.direction} window '{spec.name}' {list(layout.global_shape)} {spec.dtype} "
        f"channel '{spec.channel or spec.name}' "
        f"seq {_ranges(layout.seq_splits, layout.seq_starts)} "
        f"heads {_ranges(layout.head_splits, layout.head_starts)}"
    )


def _ranges(splits: tuple[int, ...], starts: tuple[int, ...] | None) -> str:
    return f"{list(splits)}" if starts is None else f"{list(splits)} from {list(starts)}"
