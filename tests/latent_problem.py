"""A small MLA layer with an indexer, whole and by rank: what mixed sharding is compared with."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ulysses_ops import UlyssesCommunicator, all_gather, even_splits
from ulysses_ops.indexer import index_scores, select_rows
from ulysses_ops.latent import LatentHeads, attend_latent, attend_selected
from ulysses_ops.mixed_attention import mixed_attention

NOPE, ROPE, VALUE, RANK, INDEX_HEADS, INDEX_DIM, CHOSEN = 16, 8, 24, 32, 3, 8, 5
SCALE = 0.2


@dataclass
class Layer:
    """Weights of a layer, the same on every rank.

    Attributes:
        q: To queries, ``(width, H * (NOPE + ROPE))``.
        latent: To cache rows.
        up: By head, from a latent to a key and a value.
        index_q: To the indexer's queries.
        index_k: To its key.
        index_w: To its weights.
    """

    q: Tensor
    latent: Tensor
    up: Tensor
    index_q: Tensor
    index_k: Tensor
    index_w: Tensor

    @property
    def num_heads(self) -> int:
        """H."""
        return self.up.shape[0]

    def queries(self, x: Tensor) -> Tensor:
        """``(B, S, H, NOPE + ROPE)``."""
        return (x @ self.q).view(*x.shape[:2], self.num_heads, NOPE + ROPE)

    def rows(self, x: Tensor) -> Tensor:
        """``(B, S, 1, RANK + ROPE)``."""
        return (x @ self.latent).unsqueeze(2)

    def index(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, weights and keys of the indexer."""
        q = (x @ self.index_q).view(*x.shape[:2], INDEX_HEADS, INDEX_DIM)
        return q, x @ self.index_w, (x @ self.index_k).unsqueeze(2)

    def heads(self, first: int, count: int) -> LatentHeads:
        """A range of heads."""
        return LatentHeads(self.up[first : first + count], NOPE, SCALE)


def layer(num_heads: int, width: int, device: torch.device | str = "cpu") -> Layer:
    """Weights drawn from a fixed seed."""
    generator = torch.Generator().manual_seed(num_heads)

    def draw(*shape: int) -> Tensor:
        drawn = torch.randn(*shape, generator=generator).to(device)
        return drawn / math.sqrt(shape[-2])

    return Layer(
        draw(width, num_heads * (NOPE + ROPE)),
        draw(width, RANK + ROPE),
        draw(num_heads, NOPE + VALUE, RANK),
        draw(width, INDEX_HEADS * INDEX_DIM),
        draw(width, INDEX_DIM),
        draw(width, INDEX_HEADS),
    )


def inputs(rows: int, width: int, salt: int = 0, device: torch.device | str = "cpu") -> Tensor:
    """``(2, rows, width)``, the same on every rank."""
    generator = torch.Generator().manual_seed(salt)
    return torch.randn(2, rows, width, generator=generator).to(device)


def causal(queries: int, keys: int, first: int, device: torch.device | str = "cpu") -> Tensor:
    """``(queries, keys)``: query ``i`` is row ``first + i``."""
    return torch.ones(keys, keys, dtype=torch.bool, device=device).tril()[first : first + queries]


def whole(weights: Layer, x: Tensor, *, sparse: bool) -> Tensor:
    """The layer on one rank, ``(B, S, H, VALUE)``; the choice as a mask over all rows."""
    rows = x.shape[1]
    allowed = causal(rows, rows, 0, x.device).expand(x.shape[0], -1, -1)
    if sparse:
        q, weight, keys = weights.index(x)
        scores = torch.einsum("bqhd,bsd->bqhs", q, keys.squeeze(2)).relu() * SCALE
        totals = (weight.unsqueeze(-1) * scores).sum(2).masked_fill(~allowed, -torch.inf)
        columns = totals.sort(dim=-1, descending=True, stable=True).indices[..., :CHOSEN]  # ties
        allowed = allowed & torch.zeros_like(allowed).scatter_(2, columns, True)
    every = weights.heads(0, weights.num_heads)
    return attend_latent(weights.queries(x), weights.rows(x), every, mask=allowed.unsqueeze(1))


def sharded(
    weights: Layer,
    x: Tensor,
    comm: UlyssesCommunicator,
    splits: tuple[int, ...],
    *,
    sparse: bool,
    shift: int = 0,
) -> Tensor:
    """The layer on this rank's rows ``x``; ``shift`` takes the wrong heads, for a control."""
    first, total = sum(splits[: comm.rank]), sum(splits)
    shares = even_splits(weights.num_heads, comm.world_size)
    mine = weights.heads(sum(shares[: comm.rank]) - shift, shares[comm.rank])

    def choose() -> Tensor:
        q, weight, keys = weights.index(x)
        every = all_gather(keys, comm, seq_splits=splits)
        scores = index_scores(q, weight, every, SCALE)
        allowed = causal(x.shape[1], total, first, x.device)
        scores = scores.masked_fill(~allowed, -torch.inf)
        return select_rows(scores, min(CHOSEN, total), comm, seq_splits=splits)

    def attend(q: Tensor, rows: Tensor, *chosen: Tensor) -> Tensor:
        if chosen:
            return attend_selected(q, rows, mine, chosen[0])
        allowed = causal(total, total, 0, q.device)
        return attend_latent(q, rows, mine, mask=allowed)

    return mixed_attention(
        lambda: weights.queries(x),
        [lambda: weights.rows(x)],
        comm,
        attend=attend,
        value_dim=VALUE,
        beside=[choose] if sparse else [],
        seq_splits=splits,
        head_splits=shares,
    )
