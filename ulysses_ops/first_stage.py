"""The first stage of an attention layer, from its input to filled windows, in one of its forms."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .communicator import UlyssesCommunicator
from .fused_projection import FusedKernel, project_fused
from .grouped_projection import GroupedStage
from .packed_weights import PackedWeights
from .part_norm_rope import NormRopeKernel, apply_norm_rope
from .peers_first import BeginExchange, Projected, Rotation, project
from .schedule import APART, Products, Schedule, peer_groups
from .side_stream import SideStream


@dataclass(frozen=True, eq=False)
class FirstStage:
    """Who runs it, and what it is computed with.

    Attributes:
        comm: The ranks.
        kernel: Norm and RoPE in the caller's implementation; when left out, the fused kernel where
            it fits, else PyTorch's.
        weights: Copies that :class:`Products` may read.
        begin: Makes an exchange.
    """

    comm: UlyssesCommunicator
    kernel: NormRopeKernel | None
    weights: PackedWeights
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
        elif split == "whole" or schedule.products == APART:
            with self.begin() as exchange:
                project_fused(x, projected, fused, rank, split, exchange)
        else:
            groups = peer_groups(self.comm.world_size, rank, split)
            self._run_grouped(x, projected, fused, groups, schedule.products)

    def _run_grouped(
        self,
        x: Tensor,
        projected: tuple[Projected, Projected, Projected],
        fused: FusedKernel,
        groups: list[range],
        products: Products,
    ) -> None:
        side = SideStream.of(self.comm) if products.lanes == 2 else SideStream()
        # Joined once more behind the completion, which orders streams that have sent behind it.
        with side.forked(), self.begin() as exchange:
            if products.opens_early:
                exchange.open(projected[0].window)
            stage = GroupedStage(x, *projected, fused, self.comm.rank, exchange)
            stage.run(groups, products, self.weights, side)
