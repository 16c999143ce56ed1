"""The first stage of an attention layer in fewer GEMMs, or on two streams: see :class:`Products`.

It computes what ``fused_projection.project_fused`` computes.

NOTE [two lanes]: the side stream starts with the caller's. Parts for peers go to fresh memory and
may be computed at once. Own parts go to windows, which may be written only behind their readers.
The first send of the round orders the caller's stream behind those, so it comes from that stream,
and the side stream follows it before it writes own parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from .exchange import Exchange
from .fused_projection import FusedKernel, Parts
from .packed_weights import Packed, PackedWeights
from .peers_first import Projected, send_parts
from .schedule import Products
from .side_stream import SideStream

Inputs = dict[Projected, list[Tensor]]  # what GEMMs gave for Q, K or both


@dataclass(frozen=True, eq=False)
class GroupedStage:
    """One run of the stage, up to the completion.

    Attributes:
        x: ``(B, S_local, width)``.
        v: What V is computed with, and where it goes.
        k: The same for K.
        q: The same for Q.
        kernel: Norm and RoPE.
        rank: This rank.
        exchange: What is sent is sent with it; the caller completes.
    """

    x: Tensor
    v: Projected
    k: Projected
    q: Projected
    kernel: FusedKernel
    rank: int
    exchange: Exchange

    def run(
        self,
        groups: Sequence[range],
        products: Products,
        weights: PackedWeights,
        side: SideStream,
    ) -> None:
        """Compute V, K and Q, the groups of peers first, and send; within ``side.forked()``."""
        if self.kernel.kind.norm == "across_heads":
            pair = None if products.grouping == "apart" else weights.of(self.q, self.k)
            self._run_across(groups, pair, side)
        elif products.grouping == "packed":
            self._run_packed(groups, weights.of(self.q, self.k, self.v))
        else:
            pair = None if products.grouping == "apart" else weights.of(self.q, self.k)
            self._run_paired(groups, pair, side, values_first=products.values == "first")
        side.join()

    # ---- orders ----------------------------------------------------------------------------------

    def _run_paired(
        self, groups: Sequence[range], pair: Packed | None, side: SideStream, *, values_first: bool
    ) -> None:
        for ranks in groups:
            if values_first:
                self._send_values(ranks)
            with side.current():
                self._normalise(ranks, self._multiply(ranks, pair))
            if not values_first:
                self._send_values(ranks)
        side.follow()
        with side.current():
            self.v.store(self.x, self.rank)
        own = range(self.rank, self.rank + 1)
        self._normalise(own, self._multiply(own, pair))

    def _run_packed(self, groups: Sequence[range], packed: Packed) -> None:
        for ranks in groups:
            q, k, v = packed.multiply(self.x, ranks)
            for peer, part in zip(ranks, v, strict=True):
                self.exchange.send(part, self.v.window, peer=peer)
            self._normalise(ranks, {self.q: q, self.k: k})
        self.v.store(self.x, self.rank)
        own = range(self.rank, self.rank + 1)
        self._normalise(own, self._multiply(own, packed.first(2)))

    def _run_across(self, groups: Sequence[range], pair: Packed | None, side: SideStream) -> None:
        """A norm across heads: rows are multiplied whole, and leave by destination."""
        everyone = range(self.v.window.layout.world_size)
        with side.current():
            if pair is None:
                first: Inputs = {self.q: [self.q.multiply(self.x, everyone)]}
            else:
                first = self._multiply(everyone, pair)
        for ranks in groups:
            self._send_values(ranks)
        side.follow()
        with side.current():
            self._normalise(everyone, first)
        if pair is None:
            self._normalise(everyone, {self.k: [self.k.multiply(self.x, everyone)]})
        self.v.store(self.x, self.rank)

    # ---- steps -----------------------------------------------------------------------------------

    def _send_values(self, ranks: range) -> None:
        send_parts(self.exchange, self.v.multiply(self.x, ranks), self.v.window, ranks)

    def _multiply(self, ranks: range, pair: Packed | None) -> Inputs:
        both = (self.q, self.k)
        if pair is None:
            return {one: [one.multiply(self.x, ranks)] for one in both}
        return dict(zip(both, pair.multiply(self.x, ranks), strict=True))

    def _normalise(self, ranks: range, inputs: Inputs) -> None:
        """Normalise and rotate the heads of these ranks in one launch; send what is for peers."""
        outputs = {one: [self._place(one, rank) for rank in ranks] for one in inputs}
        q, k = (
            Parts.of(one, inputs[one], outputs[one]) if one in inputs else Parts()
            for one in (self.q, self.k)
        )
        self.kernel.run(q, k)
        world_size = self.v.window.layout.world_size
        for peer in sorted(ranks, key=lambda rank: (rank - self.rank) % world_size):
            if peer == self.rank:
                continue
            for one in (self.k, self.q):
                if one in inputs:
                    part = outputs[one][peer - ranks.start]
                    self.exchange.send(part, one.window, peer=peer)

    def _place(self, one: Projected, rank: int) -> Tensor:
        """Where Q or K of a rank goes: the own view of the window, or what is sent flat."""
        window = one.window
        if rank == self.rank:
            return window.own_view
        shape = window.layout.source_shape(self.rank, rank)
        return self.x.new_empty(shape)
