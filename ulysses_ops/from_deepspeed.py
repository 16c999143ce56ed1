"""``DistributedAttention`` with the signature of ``deepspeed.sequence`` (DeepSpeed 0.19)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from .attention import ulysses_attention
from .communicator import UlyssesCommunicator
from .names import shared_communicator
from .plan import even_splits

LocalAttention = Callable[..., Tensor]


class DistributedAttention(nn.Module):
    """Local attention between two exchanges.

    ``out = gather(local_attention(scatter(q), scatter(k), scatter(v)))``; equal to DeepSpeed's on
    every rank, gradients included.

    Two arguments of DeepSpeed's constructor choose how its all-to-all is laid out and overlapped,
    and do nothing here: ``gather_idx``, since ``batch_dim_idx`` says which dimension is the
    sequence, and ``sp_stream``, since the exchanges have streams of their own.
    """

    def __init__(
        self,
        local_attention: LocalAttention,
        sequence_process_group: ProcessGroup | DeviceMesh | UlyssesCommunicator | None,
        scatter_idx: int = 2,
        gather_idx: int = 0,
        sp_stream: Any = None,
        num_kv_heads: int | None = None,
    ) -> None:
        """Take the communicator that is open over these ranks, or construct one.

        Args:
            local_attention: ``(q, k, v, *args, **kwargs) -> out``, in the layout of the inputs.
            sequence_process_group: The ranks, or their communicator.
            scatter_idx: Dimension of the heads: 2.
            gather_idx: Dimension of the sequence: 0 or 1.
            sp_stream: Any value.
            num_kv_heads: Number of KV heads of all ranks together; read from the keys if left out.

        Raises:
            ValueError: an index is another one.

        Collective where no communicator is open over these ranks.
        """
        super().__init__()
        if scatter_idx != 2 or gather_idx not in (0, 1):
            message = (
                f"DistributedAttention: scatter_idx={scatter_idx} must be 2 and "
                f"gather_idx={gather_idx} 0 or 1; give (B, S, H, D) or (S, B, H, D)"
            )
            raise ValueError(message)
        self.local_attn = local_attention
        self.num_kv_heads = num_kv_heads
        self.comm = shared_communicator(sequence_process_group)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        batch_dim_idx: int,
        rotary_pos_emb: tuple[Tensor, Tensor] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """Attend over the whole sequence.

        Args:
            query: ``(B, S_local, H, D)`` with ``batch_dim_idx`` 0, ``(S_local, B, H, D)`` with 1.
            key: The same with ``H_kv`` heads.
            value: As ``key``.
            batch_dim_idx: Which dimension is the batch.
            rotary_pos_emb: Cosines and sines, each ``(S, 1, 1, R)`` for the first R of D where the
                batch comes first, ``(1, S, 1, R)`` where it does not: the first two dimensions are
                swapped before they are applied.
            args: Passed on to ``local_attention``.
            kwargs: Likewise.

        Returns:
            Shape of ``query``, ready on the current stream.

        Raises:
            ValueError: shapes, dtypes or devices are wrong; see :func:`ulysses_attention`.

        Collective; see :func:`ulysses_ops.ulysses_attention`.
        """
        if batch_dim_idx not in (0, 1):
            message = f"DistributedAttention: batch_dim_idx={batch_dim_idx} must be 0 or 1"
            raise ValueError(message)

        def laid_out(x: Tensor) -> Tensor:
            return x if batch_dim_idx == 0 else x.transpose(0, 1)

        def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (laid_out(x).contiguous() for x in (q, k, v))
            if rotary_pos_emb is not None:
                q, k = (_rotated(x, *rotary_pos_emb) for x in (q, k))
            return laid_out(self.local_attn(q, k, v, *args, **kwargs))

        q, k, v = (laid_out(x) for x in (query, key, value))
        splits = self._head_splits(q.shape[2], k.shape[2])
        out = ulysses_attention(q, k, v, self.comm, attention=attention, head_splits=splits)
        return laid_out(out)

    def _head_splits(self, heads: int, kv_heads: int) -> tuple[int, ...] | None:
        """Where KV heads do not divide, whole groups of query heads go where their KV head goes."""
        if self.num_kv_heads not in (None, kv_heads):
            message = (
                f"DistributedAttention: key has {kv_heads} heads, not "
                f"num_kv_heads={self.num_kv_heads}; leave it out"
            )
            raise ValueError(message)
        ranks = self.comm.world_size
        if kv_heads % ranks == 0 or kv_heads < ranks:
            return None
        return tuple(count * (heads // kv_heads) for count in even_splits(kv_heads, ranks))


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs ``(i, i + R / 2)`` of the first R entries of each head."""
    cos, sin = cos.transpose(0, 1), sin.transpose(0, 1)
    turned, kept = x.split([cos.shape[-1], x.shape[-1] - cos.shape[-1]], dim=-1)
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat([-second, first], dim=-1) * sin
    return torch.cat([turned, kept], dim=-1)
