"""Ways to move the rows of a parallel model that ours is compared with: NCCL, and not at all."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ulysses_ops.communicator import UlyssesCommunicator
from ulysses_ops.diffusers_attention import Forward
from ulysses_ops.joint import JointSequence
from ulysses_ops.joint_attention import with_mask
from ulysses_ops.tools.baselines import NcclGather, NcclScatter
from ulysses_ops.tools.launch import RankContext
from ulysses_ops.tools.shapes import Shape
from ulysses_ops.values_first import AttentionKernel, Producer


class Baseline(Forward):
    """Attention that calls the same kernels as ours, on tensors of the same shapes."""

    def scatter(self, x: Tensor, place: int) -> Tensor:
        """``(B, S_local, H, D) -> (B, S_global, H_local, D)``; ``place`` is 0, 1 or 2."""
        raise NotImplementedError

    def gather(self, x: Tensor, *, copy_out: bool) -> Tensor:
        """``(B, S_global, H_local, D) -> (B, S_local, H, D)``, the caller's own or a buffer."""
        raise NotImplementedError

    def attend(
        self,
        v: Producer,
        k: Producer,
        q: Producer,
        *,
        joint: JointSequence | None,
        attention: AttentionKernel,
        mask: Tensor | None,
        copy_out: bool,
    ) -> Tensor:
        """V, K and Q one after the other.

        Raises:
            ValueError: text rows are replicated.
        """
        if joint is not None and joint.text_splits is None:
            message = (
                f"baseline: {joint.text_rows} text rows must be divisible by "
                f"world_size={self.comm.world_size}; choose another number of text rows"
            )
            raise ValueError(message)
        if joint is not None:
            attention = with_mask("baseline", self.comm, joint, attention, mask)
        values = self.scatter(v(), 0)
        keys = self.scatter(k(), 1)
        queries = self.scatter(q(), 2)
        return self.gather(attention(queries, keys, values), copy_out=copy_out)


class NothingSent(Baseline):
    """Computation alone: what is sent is taken for what is received. Results mean nothing."""

    def scatter(self, x: Tensor, place: int) -> Tensor:
        """The same bytes."""
        batch, rows, heads, dim = x.shape
        world_size = self.comm.world_size
        return x.reshape(batch, rows * world_size, heads // world_size, dim)

    def gather(self, x: Tensor, *, copy_out: bool) -> Tensor:
        """The same bytes."""
        batch, rows, heads, dim = x.shape
        world_size = self.comm.world_size
        return x.reshape(batch, rows // world_size, heads * world_size, dim)

    def replicate(self, x: Tensor) -> Tensor:
        """The own rows, as often as there are ranks."""
        return x.repeat(1, self.comm.world_size, 1)


class OverNccl(Baseline):
    """NCCL as usual: permute, all-to-all, all on one stream, into buffers allocated once a shape.

    On CPU ranks gloo takes its place.
    """

    def __init__(self, comm: UlyssesCommunicator, context: RankContext) -> None:
        """Begin without buffers."""
        super().__init__(comm)
        self._context = context
        self._scatters: dict[tuple[torch.Size, int], NcclScatter] = {}
        self._gathers: dict[torch.Size, NcclGather] = {}

    def scatter(self, x: Tensor, place: int) -> Tensor:
        """Exchange, into the buffers of this place."""
        key = (x.shape, place)
        if key not in self._scatters:
            shape = self._shape(x.shape[0], x.shape[1] * self.comm.world_size, *x.shape[2:])
            self._scatters[key] = NcclScatter(shape, self._context, x.dtype)
        return self._scatters[key](x)

    def gather(self, x: Tensor, *, copy_out: bool) -> Tensor:
        """Exchange back; what the caller keeps goes into a buffer of its own."""
        if not copy_out and x.shape in self._gathers:
            return self._gathers[x.shape](x)
        batch, seq, heads, dim = x.shape
        shape = self._shape(batch, seq, heads * self.comm.world_size, dim)
        gather = NcclGather(shape, self._context, x.dtype)
        if not copy_out:
            self._gathers[x.shape] = gather
        return gather(x)

    def replicate(self, x: Tensor) -> Tensor:
        """All-gather."""
        whole = x.new_empty((self.comm.world_size * x.shape[0], *x.shape[1:]))
        dist.all_gather(list(whole.chunk(self.comm.world_size)), x.contiguous())
        by_rank: Tensor = whole.unflatten(0, (self.comm.world_size, -1)).transpose(0, 1)
        return by_rank.flatten(1, 2)

    @staticmethod
    def _shape(batch: int, seq: int, heads: int, dim: int) -> Shape:
        return Shape("step", "step", seq, heads, dim, batch)
