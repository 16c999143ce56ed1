"""The first stage of an attention layer, from its input to filled windows, in one of its forms."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .communicator import UlyssesCommunicator
from .fused_projection import FusedKernel, project_fused
from .packed_projection import PackedWeights, can_keep, project_in_epilogue, project_packed
from .part_norm_rope import NormRopeKernel, apply_norm_rope
from .peers_first import BeginExchange, Projected, Rotation, project
from .progress import Progress
from .qkv_projection import has_kernel
from .schedule import Schedule


@dataclass(frozen=True, eq=False)
class FirstStage:
    """Who runs it, and what it is computed with.

    Attributes:
        comm: The ranks.
        kernel: Norm and RoPE in the caller's implementation; when left out, the fused kernel where
            it fits, else PyTorch's.
        weights: The copy that ``qkv_weights="packed"`` reads.
        progress: Of what ``norm_rope="epilogue"`` computes; none where nothing leaves before
            completion, as with NCCL.
        begin: Makes an exchange.
    """

    comm: UlyssesCommunicator
    kernel: NormRopeKernel | None
    weights: PackedWeights
    progress: Progress | None
    begin: BeginExchange

    def run(
        self,
        x: Tensor,
        projected: tuple[Projected, Projected, Projected],
        cos: Tensor | None,
        sin: Tensor | None,
        schedule: Schedule,
    ) -> None:
        """Fill the windows of V, K and Q, given in this order. Collective."""
        v, k, q = projected
        fused = FusedKernel(q.norm_rope, cos, sin)
        norms = (k.norm_weight, q.norm_weight)
        split, rank = schedule.projection, self.comm.rank
        if self.kernel is not None or not fused.fits(x, v.window.layout.head_dim, norms):
            rotation = Rotation(cos, sin, self.kernel or apply_norm_rope)
            with self.begin() as exchange:
                project(x, projected, rotation, rank, split, exchange)
        elif split == "whole" or schedule.qkv_weights == "apart" or not can_keep(projected):
            with self.begin() as exchange:
                project_fused(x, projected, fused, rank, split, exchange)
        elif schedule.norm_rope == "epilogue" and has_kernel(
            x, v.window.layout.head_dim, fused.kind.norm, self.comm.world_size
        ):
            with self.begin() as exchange:
                project_in_epilogue(
                    x, projected, fused, rank, self.weights, self.progress, exchange
                )
        else:
            with self.begin() as exchange:
                project_packed(x, projected, fused, rank, split, self.weights, exchange)
