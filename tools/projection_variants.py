"""The stage before attention: from ``x`` to Q, K and V that every rank's attention can take.

::

    v = x Wv;  k = rope(norm(x Wk));  q = rope(norm(x Wq));  each scattered

Variants have the names of those of the block; what each does before attention there, it does here.
"""

from __future__ import annotations

from functools import partial

import torch.nn.functional as F
from torch import Tensor

from ulysses_ops.attention import reserve_attention
from ulysses_ops.exchange import Exchange
from ulysses_ops.layer import UlyssesAttention
from ulysses_ops.tools.baselines import NcclScatter, PackedScatter
from ulysses_ops.tools.block import DTYPE
from ulysses_ops.tools.block_setting import Outputs, Run, Setting
from ulysses_ops.tools.block_variants import COMPUTE, NAIVE, OURS, BlockVariant
from ulysses_ops.tools.layer_variants import (
    EPILOGUE,
    EPILOGUE_ALONE,
    EPILOGUE_HANDSHAKES,
    HANDSHAKES_ALONE,
    PACKED,
    SCHEDULES,
    SPLIT_ALONE,
    HandshakesAlone,
    SplitAlone,
    layer_of,
)

QKV = "qkv"
GEMMS = "gemms"  # what the others are a multiple of
REPLAYED = "compute replayed as ours"  # what the replay of a captured step itself costs


def gemms(setting: Setting) -> Run:
    """The three projections alone, whole."""
    weights = setting.block.weights
    return lambda x: tuple(F.linear(x, weight) for weight in (weights.v, weights.k, weights.q))


def compute_only(setting: Setting) -> Run:
    """Projections, norm and RoPE, nothing exchanged."""
    block = setting.block
    return lambda x: (block.values(x), block.keys(x), block.queries(x))


def ours(setting: Setting) -> Run:
    """V leaves while K is computed, and K while Q is."""
    block, comm = setting.block, setting.comm
    local = block.shape.local_source(block.world_size)
    windows = reserve_attention(comm, local, local, DTYPE)

    def run(x: Tensor) -> Outputs:
        with Exchange(comm) as exchange:
            exchange.send(block.values(x), windows.v)
            exchange.send(block.keys(x), windows.k)
            exchange.send(block.queries(x), windows.q)
        return windows.v.tensor, windows.k.tensor, windows.q.tensor

    return run


def by_layer(setting: Setting, name: str, kind: type[UlyssesAttention] = UlyssesAttention) -> Run:
    """What the layer does before attention in the schedule of this name."""
    layer, cos, sin = layer_of(setting, SCHEDULES[name], kind)

    def run(x: Tensor) -> Outputs:
        q, k, v = layer.project(x, cos, sin)
        return v, k, q

    return run


def naive(setting: Setting) -> Run:
    """NCCL as usual: permute, all-to-all, all on one stream."""
    block = setting.block
    scatters = [NcclScatter(block.shape, setting.context, DTYPE) for _ in range(3)]

    def run(x: Tensor) -> Outputs:
        parts = (block.values, block.keys, block.queries)
        return tuple(scatter(part(x)) for scatter, part in zip(scatters, parts, strict=True))

    return run


def packed(setting: Setting) -> Run:
    """NCCL with one all-to-all for all three, and one copy of each on the way."""
    block = setting.block
    scatter = PackedScatter(block.shape, setting.context, DTYPE)

    def run(x: Tensor) -> Outputs:
        for place, part in enumerate((block.values, block.keys, block.queries)):
            scatter.pack(part(x), place)
        return scatter.exchange()

    return run


PROJECTIONS = (
    BlockVariant(GEMMS, gemms, "none", is_blind=True),
    BlockVariant(COMPUTE, compute_only, "none", is_blind=True),
    BlockVariant(REPLAYED, compute_only, "none", is_ours=True, is_blind=True),
    BlockVariant(OURS, ours, "", is_ours=True),
    *(
        BlockVariant(name, partial(by_layer, name=name), "", is_ours=True, compares_bits=False)
        for name in ("peers first", PACKED, EPILOGUE)
    ),
    *(
        BlockVariant(
            name, partial(by_layer, name=of, kind=kind), "none", is_ours=True, is_blind=True
        )
        for name, of, kind in (
            (SPLIT_ALONE, "peers first", SplitAlone),
            (HANDSHAKES_ALONE, "peers first", HandshakesAlone),
            (EPILOGUE_ALONE, EPILOGUE, SplitAlone),
            (EPILOGUE_HANDSHAKES, EPILOGUE, HandshakesAlone),
        )
    ),
    BlockVariant(NAIVE, naive, "nccl"),
    BlockVariant("packed", packed, "nccl"),
)
