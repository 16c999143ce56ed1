"""NCCL's all-to-all on copy engines: the zero-CTA policy, and memory that NCCL has registered.

Three things it needs, each of which fails otherwise: send and receive buffers in a window that all
ranks registered (else NCCL uses its kernels), a stream other than the legacy default one (its
batched copies refuse that), and a first call outside any capture.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ulysses_ops.errors import UlyssesError
from ulysses_ops.tools.launch import RankContext
from ulysses_ops.tools.shapes import Shape

NAME = "zero-CTA"
ALIGNMENT = 4096  # of buffers within the registered memory
TRIAL_BYTES = 840 << 10  # what up to 8 ranks can share evenly


def unavailable(device: torch.device) -> str:
    """Why NCCL cannot do this on such a device; empty where only trying can tell."""
    if device.type != "cuda":
        return "needs GPUs and NCCL"
    nccl = getattr(dist, "ProcessGroupNCCL", None)
    if nccl is None:
        return "this torch has no NCCL"
    if not hasattr(nccl, "NCCL_CTA_POLICY_ZERO") or not hasattr(nccl, "register_mem_pool"):
        return f"torch {torch.__version__} has no zero-CTA policy or no registered pools"
    if torch.cuda.nccl.version() < (2, 28):
        return f"NCCL {torch.cuda.nccl.version()} has no copy-engine collectives; needs 2.28"
    return ""


def bytes_needed(shape: Shape, world_size: int, itemsize: int) -> int:
    """Registered bytes for V, K, Q and the output, sent and received."""
    size = shape.bytes_per_peer(world_size, itemsize) * world_size
    return 8 * _aligned(size)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


class ZeroCta:
    """A group with the zero-CTA policy, and one registered allocation, kept for all shapes.

    Attributes:
        stream: Where everything of the group is enqueued.
        memory: The registered bytes of this rank.
    """

    def __init__(self, context: RankContext, num_bytes: int) -> None:
        """Make group and memory, and exchange once. Collective.

        Raises:
            UlyssesError: what was exchanged did not arrive.
            RuntimeError: NCCL or torch refuses.
        """
        nccl: Any = dist.ProcessGroupNCCL
        options = nccl.Options()
        options.config.cta_policy = nccl.NCCL_CTA_POLICY_ZERO
        self._group: Any = dist.new_group(backend="nccl", pg_options=options)
        self._backend: Any = self._group._get_backend(context.device)
        self.stream = torch.cuda.Stream(context.device)
        with torch.cuda.stream(self.stream):
            # Makes NCCL's communicator, which registration asks for.
            dist.all_reduce(torch.ones(1, device=context.device), group=self._group)
        self.stream.synchronize()
        self._pool = torch.cuda.MemPool(self._backend.mem_allocator)
        with torch.cuda.use_mem_pool(self._pool):
            self.memory = torch.empty(
                max(num_bytes, 4 * TRIAL_BYTES), dtype=torch.uint8, device=context.device
            )
        self._backend.register_mem_pool(self._pool, symm=True)
        self._try(context)

    def _try(self, context: RankContext) -> None:
        sent, received = (
            self.memory[place : place + TRIAL_BYTES].view(context.world_size, -1)
            for place in (0, 2 * TRIAL_BYTES)
        )
        sent.fill_(context.rank + 1)
        received.zero_()
        self.all_to_all(received, sent)
        self.join()
        context.finish("first all-to-all of NCCL on copy engines")
        if any(bool((received[rank] != rank + 1).any()) for rank in range(context.world_size)):
            message = "zero-CTA: what NCCL exchanged on copy engines did not arrive"
            raise UlyssesError(message)

    def all_to_all(self, received: Tensor, sent: Tensor) -> None:
        """Exchange once what the current stream has enqueued so far is done; see :meth:`join`."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            dist.all_to_all_single(received, sent, group=self._group)

    def join(self) -> None:
        """The current stream waits for all exchanges."""
        torch.cuda.current_stream().wait_stream(self.stream)

    def close(self) -> None:
        """Give the memory back; nothing may be in flight. Collective."""
        self._backend.deregister_mem_pool(self._pool)
        del self.memory, self._pool


class BlockExchange:
    """The four exchanges of a block, in registered buffers of its shape."""

    def __init__(self, zero_cta: ZeroCta, shape: Shape, context: RankContext) -> None:
        """Cut the buffers; of every rank alike, as NCCL requires."""
        batch, rows, heads, dim = shape.local_source(context.world_size)
        local_heads = heads // context.world_size
        self._zero_cta = zero_cta
        self._heads = (context.world_size, local_heads)
        self._rows = (context.world_size, rows)
        self._window = shape.local_window(context.world_size)
        blocks = (context.world_size, batch, rows, local_heads, dim)
        size = torch.Size(blocks).numel() * 2
        buffers = [
            zero_cta.memory[place : place + size].view(torch.bfloat16).view(blocks)
            for place in range(0, 8 * _aligned(size), _aligned(size))
        ]
        self._sent, self._received = buffers[:4], buffers[4:]
        self._out = torch.empty(
            (batch, rows, heads, dim), dtype=torch.bfloat16, device=context.device
        )

    def send(self, x: Tensor, place: int) -> None:
        """Pack ``(B, S_local, H, D)`` and send it beside what is computed next."""
        sent = self._sent[place]
        sent.copy_(x.unflatten(2, self._heads).permute(2, 0, 1, 3, 4))
        self._zero_cta.all_to_all(self._received[place], sent)

    def received(self) -> tuple[Tensor, Tensor, Tensor]:
        """The three that were sent, ``(B, S_global, H_local, D)`` each, in order."""
        self._zero_cta.join()
        first, second, third = (
            buffer.transpose(0, 1).reshape(self._window) for buffer in self._received[:3]
        )
        return first, second, third

    def gather(self, attended: Tensor) -> Tensor:
        """``(B, S_global, H_local, D) -> (B, S_local, H, D)``."""
        self._sent[3].copy_(attended.unflatten(1, self._rows).transpose(0, 1))
        self._zero_cta.all_to_all(self._received[3], self._sent[3])
        self._zero_cta.join()
        self._out.unflatten(2, self._heads).copy_(self._received[3].permute(1, 2, 0, 3, 4))
        return self._out
