"""How long a layer takes, split in some way: two clocks, computed from measured constants.

Splitting has a price: GEMMs and attention work in waves of tiles, one tile an SM, and two parts
have two last waves. ``docs/design/schedule.md`` has the equations.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from .constants import Constants, rate_at
from .schedule import (
    AttentionSplit,
    NormRopePlace,
    OutputSplit,
    Problem,
    ProjectionSplit,
    QkvWeights,
    peer_groups,
)

AfterSplit = tuple[AttentionSplit, OutputSplit, int]  # the last: chunks of heads


@dataclass(frozen=True)
class Forecast:
    """Predicted time of a candidate, of the slowest rank, in microseconds.

    Attributes:
        total_us: Until its result is there.
        waited_us: Of that, how long the computing stream waits for the copies.
    """

    total_us: float
    waited_us: float

    @property
    def computed_us(self) -> float:
        """What is computed, the price of splitting included."""
        return self.total_us - self.waited_us


def gemm_gflop(rows: int, columns: int, depth: int, num_sms: int, tile: tuple[int, int]) -> float:
    """Size of a GEMM in GFLOP, the idle SMs of its last wave counted as if they worked."""
    tiles = math.ceil(rows / tile[0]) * math.ceil(columns / tile[1])
    return math.ceil(tiles / num_sms) * num_sms * 2 * tile[0] * tile[1] * depth / 1e9


def attention_gflop(
    heads: int, rows: int, keys: int, head_dim: int, num_sms: int, tile_rows: int
) -> float:
    """The same for attention of ``rows`` queries with ``keys`` keys; heads of all batches."""
    tiles = heads * math.ceil(rows / tile_rows)
    return math.ceil(tiles / num_sms) * num_sms * 4 * tile_rows * keys * head_dim / 1e9


class _Clocks:
    """A computing stream and a copy stream; the ranks are taken to be alike."""

    def __init__(self, problem: Problem, constants: Constants) -> None:
        self._problem, self._constants = problem, constants
        self.computing = self._copying = self.waited = 0.0
        self._is_open = False

    def gemm(self, columns: int, depth: int) -> None:
        c, p = self._constants, self._problem
        rows = p.batch * (p.seq // p.world_size)
        gflop = gemm_gflop(rows, columns, depth, c.num_sms, c.gemm_tile)
        self.computing += gflop / rate_at(c.gemm_rates, gflop) * 1e3

    def attention(self, rows: int, heads: int) -> None:
        c, p = self._constants, self._problem
        sizes = (p.batch * heads, rows, p.seq, p.head_dim)
        gflop = attention_gflop(*sizes, c.num_sms, c.attention_tile_rows)
        self.computing += gflop / rate_at(c.attention_rates, gflop) * 1e3

    def elementwise(self, elems: float, passes: float = 2.0) -> None:
        num_bytes = passes * elems * self._problem.itemsize
        self.computing += num_bytes / (self._constants.elementwise_gbs * 1e3)

    def own_copy(self, elems: int) -> None:
        # On a stream of its own, but at the expense of whatever else uses memory meanwhile.
        if self._problem.world_size > 1:
            self.computing += elems * self._problem.itemsize / (self._constants.own_copy_gbs * 1e3)

    def send(self, elems: int) -> None:
        c = self._constants
        self._copying = max(self._copying, self.computing)
        if not self._is_open:
            self._copying += c.handshake_us
            self._is_open = True
        num_bytes = elems * self._problem.itemsize
        self._copying += c.copy_launch_us + num_bytes / (c.peer_copy_gbs * 1e3)

    def complete(self) -> None:
        if self._is_open:
            self._copying += self._constants.handshake_us
            wait = max(self._copying - self.computing, 0.0)
            self.computing += wait
            self.waited += wait
            self._is_open = False


class _Projection:
    """From the input to Q, K and V in every window."""

    def __init__(self, clocks: _Clocks, problem: Problem) -> None:
        self._clocks, self._problem = clocks, problem
        p = problem
        rows = p.batch * (p.seq // p.world_size)
        self._heads = {"v": p.kv_heads, "k": p.kv_heads, "q": p.heads}
        self._elems = {
            letter: rows * heads * p.head_dim // p.world_size
            for letter, heads in self._heads.items()
        }

    def run(
        self, rank: int, split: ProjectionSplit, weights: QkvWeights, norm_rope: NormRopePlace
    ) -> None:
        p, clocks = self._problem, self._clocks
        if split == "whole":
            for letter in "vkq":
                self._multiply(letter, p.world_size)
                self._transform(letter, p.world_size)
                self._send(letter, p.world_size - 1)
                clocks.own_copy(self._elems[letter])
        else:
            groups = [len(group) for group in peer_groups(p.world_size, rank, split)]
            if norm_rope == "epilogue":
                self._run_in_epilogue()
            elif weights == "packed" and p.norm_rope.norm != "across_heads":
                self._run_packed(groups)
            else:
                self._run_by_part(groups)
        clocks.complete()

    def _run_by_part(self, groups: list[int]) -> None:
        by_part, p = "vkq", self._problem
        if p.norm_rope.norm == "across_heads":  # a row's factor needs all of its heads
            by_part = "v"
            for letter in "kq":
                self._multiply(letter, p.world_size)
                self._clocks.elementwise(p.world_size * self._elems[letter], passes=1.0)
                for peers in groups:
                    self._transform(letter, peers)
                    self._send(letter, peers)
        for peers in groups:
            for letter in by_part:
                self._multiply(letter, peers)
                self._transform(letter, peers)
                self._send(letter, peers)
        for letter in "vkq":
            if letter in by_part:
                self._multiply(letter, 1)
            self._transform(letter, 1)

    def _run_packed(self, groups: list[int]) -> None:
        """Q, K and V of peers are one GEMM; of this rank, Q and K are."""
        for letters, ranks in (*(("vkq", peers) for peers in groups), ("v", 1), ("kq", 1)):
            self._multiply(letters, ranks)
            for letter in letters:
                self._transform(letter, ranks)
                if letters == "vkq":
                    self._send(letter, ranks)

    def _run_in_epilogue(self) -> None:
        """One GEMM; a rank's part of it is sent when its share of the time is over."""
        clocks, world_size = self._clocks, self._problem.world_size
        start = clocks.computing
        self._multiply("vkq", world_size)
        end = clocks.computing
        for part in range(1, world_size):
            clocks.computing = start + (end - start) * part / world_size
            for letter in "vkq":
                self._send(letter, 1)
        clocks.computing = end

    def _multiply(self, letters: str, ranks: int) -> None:
        """One GEMM of all of these."""
        p = self._problem
        heads = sum(self._heads[letter] for letter in letters) // p.world_size
        self._clocks.gemm(heads * ranks * p.head_dim, p.width)

    def _transform(self, letter: str, ranks: int) -> None:
        if letter != "v" and not self._problem.norm_rope.is_identity:
            self._clocks.elementwise(ranks * self._elems[letter])

    def _send(self, letter: str, peers: int) -> None:
        for _ in range(peers):
            self._clocks.send(self._elems[letter])


def _attend(clocks: _Clocks, p: Problem, rank: int, split: AfterSplit) -> None:
    """From the windows of Q, K and V to the layer's output."""
    attention, output, chunks = split
    rows, heads = p.seq // p.world_size, p.heads // p.world_size
    part = p.batch * rows * heads * p.head_dim
    if attention == "heads":
        _attend_by_heads(clocks, p, chunks, part)
        return
    if attention == "whole":
        clocks.attention(p.seq, heads)
        for _ in range(p.world_size - 1):
            clocks.send(part)
    else:
        for group in peer_groups(p.world_size, rank, attention):
            clocks.attention(len(group) * rows, heads)
            for _ in group:
                clocks.send(part)
        clocks.attention(rows, heads)
    if output == "whole":
        clocks.own_copy(part)
        clocks.complete()
        clocks.gemm(p.out_width, p.heads * p.head_dim)
        return
    clocks.gemm(p.out_width, heads * p.head_dim)
    clocks.complete()
    for group in peer_groups(p.world_size, rank, "peers"):
        _add_slab(clocks, p, len(group) * heads)


def _attend_by_heads(clocks: _Clocks, p: Problem, chunks: int, part: int) -> None:
    heads = p.heads // chunks  # of all ranks
    for chunk in range(chunks):
        clocks.attention(p.seq, heads // p.world_size)
        clocks.complete()  # the chunk before
        for _ in range(p.world_size - 1):
            clocks.send(part // chunks)
        clocks.own_copy(part // chunks)
        if chunk == 1:
            clocks.gemm(p.out_width, heads * p.head_dim)
        elif chunk:
            _add_slab(clocks, p, heads)
    clocks.complete()
    _add_slab(clocks, p, heads)


def _add_slab(clocks: _Clocks, p: Problem, heads: int) -> None:
    clocks.gemm(p.out_width, heads * p.head_dim)
    # The sum so far is read once more.
    clocks.elementwise(p.batch * (p.seq // p.world_size) * p.out_width, passes=1.0)


def _slowest(
    problem: Problem, constants: Constants, run: Callable[[_Clocks, int], None]
) -> Forecast:
    forecasts = []
    for rank in range(min(problem.world_size, 2)):  # rank 1 has peers on both sides where any has
        clocks = _Clocks(problem, constants)
        run(clocks, rank)
        forecasts.append(Forecast(clocks.computing, clocks.waited))
    return max(forecasts, key=lambda forecast: forecast.total_us)


def forecast_gemms(problem: Problem, constants: Constants) -> float:
    """The GEMMs of whole V, K and Q of one rank alone, in microseconds."""
    clocks = _Clocks(problem, constants)
    for heads in (problem.kv_heads, problem.kv_heads, problem.heads):
        clocks.gemm(heads * problem.head_dim, problem.width)
    return clocks.computing


def forecast_before(
    problem: Problem,
    constants: Constants,
    split: ProjectionSplit,
    weights: QkvWeights = "apart",
    norm_rope: NormRopePlace = "apart",
) -> Forecast:
    """From the layer's input to Q, K and V on every rank."""
    return _slowest(
        problem,
        constants,
        lambda clocks, rank: _Projection(clocks, problem).run(rank, split, weights, norm_rope),
    )


def forecast_after(problem: Problem, constants: Constants, split: AfterSplit) -> Forecast:
    """From Q, K and V to the layer's output."""
    return _slowest(problem, constants, lambda clocks, rank: _attend(clocks, problem, rank, split))
