"""What the operators are compared with: NCCL with the packing it needs; and plain captures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ulysses_ops.plan import even_splits
from ulysses_ops.tools.attempts import attempt_all
from ulysses_ops.tools.launch import RankContext
from ulysses_ops.tools.shapes import Shape

WARM_UP = 3


class NcclScatter:
    """``(B, S_local, H, D) -> (B, S_global, H_local, D)``, into buffers allocated once."""

    def __init__(self, shape: Shape, context: RankContext, dtype: torch.dtype) -> None:
        """Allocate; packing is part of every call."""
        batch, rows, heads, dim = shape.local_source(context.world_size)
        self._heads = (context.world_size, heads // context.world_size)
        blocks = (context.world_size, batch, rows, heads // context.world_size, dim)
        self._packed = torch.empty(blocks, dtype=dtype, device=context.device)
        self._received = torch.empty_like(self._packed)
        self._window = shape.local_window(context.world_size)

    def start(self, x: Tensor, *, later: bool = False) -> Any:
        """Pack and exchange; with ``later``, on NCCL's stream, and the work to wait for."""
        self._packed.copy_(x.unflatten(2, self._heads).permute(2, 0, 1, 3, 4))
        return dist.all_to_all_single(self._received, self._packed, async_op=later)

    def clear(self) -> None:
        """Fill what was received with NaN bytes, so that it cannot pass for what is to come."""
        self._received.view(-1).view(torch.uint8).fill_(0xFF)

    def result(self) -> Tensor:
        """What was received; one batch needs no unpacking."""
        return self._received.transpose(0, 1).reshape(self._window)

    def __call__(self, x: Tensor) -> Tensor:
        """Exchange ``x``."""
        self.start(x)
        return self.result()


class NcclGather:
    """``(B, S_global, H_local, D) -> (B, S_local, H, D)``, into buffers allocated once."""

    def __init__(self, shape: Shape, context: RankContext, dtype: torch.dtype) -> None:
        """Allocate; unpacking is part of every call."""
        batch, rows, heads, dim = shape.local_source(context.world_size)
        self._rows = (context.world_size, rows)
        blocks = (context.world_size, batch, rows, heads // context.world_size, dim)
        self._received = torch.empty(blocks, dtype=dtype, device=context.device)
        self._out = torch.empty((batch, rows, heads, dim), dtype=dtype, device=context.device)

    def start(self, x: Tensor, *, later: bool = False) -> Any:
        """Exchange; one batch needs no packing. With ``later``, on NCCL's stream, to wait for."""
        blocks = x.unflatten(1, self._rows).transpose(0, 1).contiguous()
        return dist.all_to_all_single(self._received, blocks, async_op=later)

    def clear(self) -> None:
        """Fill what was received with NaN bytes, so that it cannot pass for what is to come."""
        self._received.view(-1).view(torch.uint8).fill_(0xFF)

    def result(self) -> Tensor:
        """What was received, unpacked."""
        world_size, heads = self._received.shape[0], self._received.shape[3]
        self._out.unflatten(2, (world_size, heads)).copy_(self._received.permute(1, 2, 0, 3, 4))
        return self._out

    def __call__(self, x: Tensor) -> Tensor:
        """Exchange ``x``."""
        self.start(x)
        return self.result()


class NcclAllGather:
    """``(B, S_local, H, D) -> (B, S_global, H, D)``, into buffers allocated once.

    Shards that are not alike are padded to the longest, which is all that NCCL's operator takes.
    """

    def __init__(self, shape: Shape, context: RankContext, dtype: torch.dtype) -> None:
        """Allocate; padding and unpacking are part of every call."""
        batch, _, heads, dim = shape.dims
        self._splits = even_splits(shape.seq, context.world_size)
        longest = max(self._splits)
        blocks = (context.world_size, batch, longest, heads, dim)
        self._received = torch.empty(blocks, dtype=dtype, device=context.device)
        self._out = torch.empty(shape.dims, dtype=dtype, device=context.device)
        self._padded: Tensor | None = None
        if self._splits[context.rank] < longest:
            self._padded = torch.zeros_like(self._received[0])

    def start(self, x: Tensor, *, later: bool = False) -> Any:
        """Pad, where another rank has more rows, and gather; with ``later``, to wait for."""
        if self._padded is not None:
            self._padded.narrow(1, 0, x.shape[1]).copy_(x)
            x = self._padded
        return all_gather_flat(self._received.flatten(0, 1), x, later=later)

    def clear(self) -> None:
        """Fill what was received with NaN bytes, so that it cannot pass for what is to come."""
        self._received.view(-1).view(torch.uint8).fill_(0xFF)

    def result(self) -> Tensor:
        """What was received; one batch of even shards needs no unpacking."""
        if len(set(self._splits)) == 1:
            return self._received.transpose(0, 1).reshape(self._out.shape)
        parts = zip(self._received, self._splits, strict=True)
        return torch.cat([part.narrow(1, 0, rows) for part, rows in parts], 1, out=self._out)

    def __call__(self, x: Tensor) -> Tensor:
        """Gather ``x``."""
        self.start(x)
        return self.result()


def all_gather_flat(
    out: Tensor, x: Tensor, *, group: dist.ProcessGroup | None = None, later: bool = False
) -> Any:
    """The backend's all-gather: ``out`` is the ``x`` of all ranks, one after the other."""
    # The first is the newer name of the second.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(out, x, group=group, async_op=later)


class PackedScatter:
    """Q, K and V in one all-to-all, ``(B, S_local, H, D) -> (B, S_global, H_local, D)`` each.

    Each tensor is copied once, into its place beside the others. What arrives needs no copy: the
    three lie in it as views whose rows are three times as far apart.
    """

    def __init__(self, shape: Shape, context: RankContext, dtype: torch.dtype) -> None:
        """Allocate; packing is part of every call."""
        batch, rows, heads, dim = shape.local_source(context.world_size)
        self._heads = (context.world_size, heads // context.world_size)
        blocks = (context.world_size, batch, rows, 3, heads // context.world_size, dim)
        self._packed = torch.empty(blocks, dtype=dtype, device=context.device)
        self._received = torch.empty_like(self._packed)
        self._window = (batch, shape.seq, 3, heads // context.world_size, dim)

    def pack(self, x: Tensor, place: int) -> None:
        """Copy one of the three; ``place`` is 0, 1 or 2."""
        self._packed[:, :, :, place].copy_(x.unflatten(2, self._heads).permute(2, 0, 1, 3, 4))

    def exchange(self) -> tuple[Tensor, Tensor, Tensor]:
        """Exchange what was packed, and return the three in order of their places."""
        dist.all_to_all_single(self._received, self._packed)
        first, second, third = self._received.transpose(0, 1).reshape(self._window).unbind(2)
        return first, second, third


class PlainGraph:
    """A CUDA graph of something that is not ours, captured on every rank at once.

    It keeps ``run``, and with it the tensors that the graph reads.
    """

    def __init__(
        self, context: RankContext, run: Callable[[], Any], what: str, *, warm_up: int = WARM_UP
    ) -> None:
        """Call it ``warm_up`` times, line up and capture. Collective.

        Raises:
            UlyssesError: it cannot be captured on some rank; the same text on every rank.
        """
        self._graph = torch.cuda.CUDAGraph()
        self._captured: Callable[[], Any] | None = run
        attempt_all(context, lambda: self._warm_up(context, run, warm_up), f"warm-up of {what}")
        context.line_up(f"warm-up of {what}")
        self.output = attempt_all(context, lambda: self._capture(run), f"capture of {what}")
        context.line_up(f"capture of {what}")

    def _warm_up(self, context: RankContext, run: Callable[[], Any], count: int) -> None:
        side = torch.cuda.Stream(context.device)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(count):
                run()
        torch.cuda.current_stream().wait_stream(side)

    def _capture(self, run: Callable[[], Any]) -> Any:
        # NCCL's watchdog, another thread, goes on asking for events meanwhile.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            return run()

    def run(self) -> Any:
        """Replay on the current stream."""
        self._graph.replay()
        return self.output

    def close(self) -> None:
        """Give the graph back; nothing of it may be in flight."""
        self._graph.reset()
        self.output = self._captured = None
