"""How long a transformer step takes for requests of given lengths, by measured constants. Pure.

    rows       2 * rows * parameters of a layer             at the rate of a GEMM of this size
    attention  4 * S^2 * heads * D, half of it if causal    at the rate of attention of this size
    scatter and gather   (2 H + 2 H_kv) * D * rows * (sp - 1) / sp   over the link, and their rounds
    tensor parallel      two all-reduces of rows * width: 2 * (tp - 1) / tp of it over the link

Rates of one size are used for all; what overlaps is counted as if it did not. It ranks choices; it
does not predict a benchmark.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

from .constants import Constants, rate_at
from .kinds import check_at_least_1, check_kind

TENSORS_EXCHANGED = 4  # Q, K, V, and the way back
ROUNDS = 2  # of the handshake in a layer: before attention and after
ALL_REDUCES = 2  # of tensor parallelism in a layer


@dataclass(frozen=True)
class ModelShape:
    """A transformer of alike layers.

    Attributes:
        layers: Number of layers.
        width: Features of a row between layers.
        heads: H.
        kv_heads: ``H_kv``.
        head_dim: D.
        mlp_width: Features inside the MLP.
        mlp_matrices: 3 with a gate, else 2.
        itemsize: Bytes of an element.
        causal: Whether a row attends to those before it alone.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int
    mlp_matrices: int = 3
    itemsize: int = 2
    causal: bool = True

    def __post_init__(self) -> None:
        """Refuse sizes that mean nothing.

        Raises:
            ValueError: a size is no whole number or below 1, or heads are no multiple of KV heads.
        """
        sizes = {field.name: getattr(self, field.name) for field in fields(self)}
        check_kind("ModelShape", "causal", sizes.pop("causal"), bool, "True or False")
        check_at_least_1("ModelShape", **sizes)
        if self.heads % self.kv_heads:
            message = (
                f"ModelShape: heads={self.heads} must be a multiple of kv_heads={self.kv_heads}"
            )
            raise ValueError(message)

    @property
    def layer_parameters(self) -> int:
        """Elements of a layer's matrices."""
        attention = self.width * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return attention + self.mlp_matrices * self.width * self.mlp_width


@dataclass(frozen=True)
class Workload:
    """A model on GPUs with these constants.

    Attributes:
        model: Its shape.
        constants: What the GPUs do.
    """

    model: ModelShape
    constants: Constants

    def __post_init__(self) -> None:
        """Refuse what is something else.

        Raises:
            ValueError: it is no shape, or these are no constants.
        """
        check_kind("Workload", "model", self.model, ModelShape, "a ModelShape")
        check_kind("Workload", "constants", self.constants, Constants, "Constants")

    def request_us(self, length: int) -> float:
        """A request alone on one GPU: what requests are balanced by."""
        return self.step_us([length], 1, 1)

    def step_us(self, lengths: Sequence[int], sp: int, tp: int) -> float:
        """Requests together on ``sp * tp`` GPUs, of the slowest of them; microseconds.

        Args:
            lengths: Rows of each request; none takes no time.
            sp: Ranks that the sequence is sharded between.
            tp: Ranks that every matrix is sharded between.
        """
        rows = math.ceil(sum(lengths) / sp)
        if rows == 0:
            return 0.0
        heads = math.ceil(self.model.heads / (sp * tp))
        layer = self._rows_us(rows, tp) + sum(self._attention_us(s, heads) for s in lengths)
        layer += self._exchange_us(rows, sp, tp) + self._all_reduce_us(rows, tp)
        return layer * self.model.layers

    def _rows_us(self, rows: int, tp: int) -> float:
        gflop = 2 * rows * self.model.layer_parameters / tp / 1e9
        return gflop / rate_at(self.constants.gemm_rates, gflop) * 1e3

    def _attention_us(self, length: int, heads: int) -> float:
        gflop = 4 * length * length * heads * self.model.head_dim / 1e9
        if self.model.causal:
            gflop /= 2
        return gflop / rate_at(self.constants.attention_rates, gflop) * 1e3

    def _exchange_us(self, rows: int, sp: int, tp: int) -> float:
        if sp == 1:
            return 0.0
        m, c = self.model, self.constants
        heads = (2 * m.heads + 2 * max(m.kv_heads, sp * tp)) / tp
        num_bytes = rows * heads * m.head_dim * m.itemsize * (sp - 1) / sp
        launches = TENSORS_EXCHANGED * (sp - 1) * c.copy_launch_us
        return num_bytes / (c.peer_copy_gbs * 1e3) + launches + 2 * ROUNDS * c.handshake_us

    def _all_reduce_us(self, rows: int, tp: int) -> float:
        if tp == 1:
            return 0.0
        m, c = self.model, self.constants
        num_bytes = 2 * (tp - 1) / tp * rows * m.width * m.itemsize
        once = num_bytes / (c.peer_copy_gbs * 1e3) + 2 * (c.handshake_us + c.copy_launch_us)
        return ALL_REDUCES * once
