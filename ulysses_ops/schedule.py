"""How an attention layer is split so that its exchanges hide, as values.

A rank computes what its peers need first and what it keeps last, so that transfers run under its
own part. ``planner`` chooses; ``peers_first`` does it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from .part_norm_rope import NormRope

ProjectionSplit = Literal["whole", "peers", "destinations"]
AttentionSplit = Literal["whole", "peers", "destinations", "heads"]
OutputSplit = Literal["whole", "slabs"]
QkvWeights = Literal["apart", "packed"]
NormRopePlace = Literal["apart", "epilogue"]


@dataclass(frozen=True)
class Schedule:
    """How the three places are split.

    Attributes:
        projection: ``"whole"``: V, K, Q one after the other, each sent when it is done;
            ``"peers"``: the heads of all peers first, the own heads last; ``"destinations"``: the
            same with a GEMM for each peer.
        attention: ``"whole"``; the query rows of ``"peers"`` first, or of each of the
            ``"destinations"``, and the own rows last; or ``"heads"``, a chunk of heads after the
            other.
        output: ``"whole"``, or by ``"slabs"`` of heads, the own ones first.
        head_chunks: Chunks with ``attention="heads"``, which also needs ``output="slabs"``; else 1.
        qkv_weights: ``"apart"``: the weights of Q, K and V are read where they are, a GEMM each;
            ``"packed"``: those of a peer are one GEMM, with a norm across heads those of Q and K
            of all ranks. It reads a copy of the weights, which the layer keeps. Unused with
            ``projection="whole"``, where norm and RoPE are not the fused kernel, and where weights
            were made in inference mode, which count no changes.
        norm_rope: ``"apart"``: norm and RoPE are a kernel behind the GEMM; ``"epilogue"``: packed
            weights are multiplied, normalised and rotated by one kernel,
            :func:`ulysses_ops.project_qkv_into`, which needs ``qkv_weights="packed"``. Where that
            kernel does not fit, and with a norm across heads, the same as ``"apart"``.
    """

    projection: ProjectionSplit = "whole"
    attention: AttentionSplit = "whole"
    output: OutputSplit = "whole"
    head_chunks: int = 1
    qkv_weights: QkvWeights = "apart"
    norm_rope: NormRopePlace = "apart"

    def __post_init__(self) -> None:
        """Refuse what means nothing.

        Raises:
            ValueError: a value is unknown, or the chunks do not go with it.
        """
        allowed = {
            "projection": get_args(ProjectionSplit),
            "attention": get_args(AttentionSplit),
            "output": get_args(OutputSplit),
            "qkv_weights": get_args(QkvWeights),
            "norm_rope": get_args(NormRopePlace),
        }
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                message = f"Schedule: {name}={getattr(self, name)!r} must be one of {values}"
                raise ValueError(message)
        by_heads = self.attention == "heads"
        if by_heads != (self.head_chunks > 1) or (by_heads and self.output != "slabs"):
            message = (
                f"Schedule: attention={self.attention!r}, output={self.output!r}, head_chunks="
                f"{self.head_chunks}: 'heads' goes with output='slabs' and 2 chunks or more, "
                f"everything else with head_chunks=1"
            )
            raise ValueError(message)
        if self.norm_rope == "epilogue" and self.qkv_weights != "packed":
            message = (
                f"Schedule: norm_rope='epilogue' goes with qkv_weights='packed', not with "
                f"{self.qkv_weights!r}"
            )
            raise ValueError(message)


PLAIN = Schedule()
PEERS_FIRST = Schedule("peers", "peers", "slabs")


@dataclass(frozen=True)
class Problem:
    """Sizes of one attention layer, alike on every rank.

    Attributes:
        batch: B.
        seq: ``S_global``.
        heads: H.
        kv_heads: ``H_kv``.
        head_dim: D.
        width: Features of the layer's input.
        out_width: Features of its output.
        world_size: Number of ranks; divides seq, heads and kv_heads.
        itemsize: Bytes of an element.
        norm_rope: What happens to Q and K.
        may_pack: Whether a schedule may hold weights twice.
    """

    batch: int
    seq: int
    heads: int
    kv_heads: int
    head_dim: int
    width: int
    out_width: int
    world_size: int
    itemsize: int
    norm_rope: NormRope
    may_pack: bool = False

    def __post_init__(self) -> None:
        """Refuse sizes that cannot be split.

        Raises:
            ValueError: a size is below 1 or not divisible.
        """
        sizes = (self.batch, self.head_dim, self.width, self.out_width, self.itemsize)
        split = (self.seq, self.heads, self.kv_heads)
        if min(*sizes, *split, self.world_size) < 1 or any(n % self.world_size for n in split):
            message = (
                f"Problem: seq={self.seq}, heads={self.heads}, kv_heads={self.kv_heads} must be "
                f"divisible by world_size={self.world_size}, and all sizes at least 1"
            )
            raise ValueError(message)

    def can_chunk(self, chunks: int) -> bool:
        """Whether a rank's heads can be attended in so many chunks."""
        return all(n // self.world_size % chunks == 0 for n in (self.heads, self.kv_heads))


def peer_groups(world_size: int, rank: int, split: Literal["peers", "destinations"]) -> list[range]:
    """The peers of ``rank`` that are computed together, in rotated order as the copies are.

    With ``"peers"`` these are the ranks above and those below it, since their heads and rows lie
    side by side; with ``"destinations"`` each peer is alone.
    """
    if split == "destinations":
        peers = ((rank + step) % world_size for step in range(1, world_size))
        return [range(peer, peer + 1) for peer in peers]
    return [group for group in (range(rank + 1, world_size), range(rank)) if group]
