"""The ways in which a block is exchanged: each a callable ``x -> y`` over the same weights.

To add one, write a function that takes a :class:`Setting` and returns the callable, and give it a
line in ``VARIANTS``. What it allocates is closed by ``Setting.closing``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ulysses_ops.attention import reserve_attention
from ulysses_ops.communicator import UlyssesCommunicator
from ulysses_ops.exchange import Exchange
from ulysses_ops.schedule import PEERS_FIRST
from ulysses_ops.tools import rivals, zero_cta
from ulysses_ops.tools.baselines import NcclGather, NcclScatter, PackedScatter
from ulysses_ops.tools.block import DTYPE
from ulysses_ops.tools.block_setting import Run, Setting
from ulysses_ops.tools.choosing import choose_names
from ulysses_ops.tools.layer_variants import (
    HANDSHAKES_ALONE,
    LINKS_AWAKE,
    SCHEDULES,
    SPLIT_ALONE,
    HandshakesAlone,
    LinksAwake,
    SplitAlone,
    layer_variant,
)

COMPUTE = "compute"
OURS = "ours"
NAIVE = "naive"


@dataclass(frozen=True)
class BlockVariant:
    """One way.

    Attributes:
        name: In rows and tables.
        build: Allocates and returns the callable. Collective.
        moved_by: What moves the bytes on GPUs; ours asks its communicator.
        is_ours: Captured by ``capture_step``, since copy engines take part.
        compares_bits: Runs the kernels of the naive variant. Parts of a projection are products of
            other sizes, perhaps by other kernels, and slabs are rounded one by one.
        is_blind: Exchanges nothing, so that its output means nothing.
        is_risky: Left out unless a trial has shown that it runs.
        unavailable: Why it cannot run on such a device, or an empty text.
    """

    name: str
    build: Callable[[Setting], Run]
    moved_by: str
    is_ours: bool = False
    compares_bits: bool = True
    is_blind: bool = False
    is_risky: bool = False
    unavailable: Callable[[torch.device], str] = lambda device: ""

    def transport(self, comm: UlyssesCommunicator) -> str:
        """What moves the bytes here."""
        if self.is_blind:
            return "none"
        if self.is_ours:
            return comm.transport
        return self.moved_by if comm.device.type == "cuda" or self.name == COMPUTE else "gloo"


def compute_only(setting: Setting) -> Run:
    """The same kernels, nothing exchanged."""
    return setting.block.compute_only


def ours(setting: Setting) -> Run:
    """V leaves while K is computed, and K while Q is; windows in the final layout."""
    block, comm = setting.block, setting.comm
    local = block.shape.local_source(block.world_size)
    windows = reserve_attention(comm, local, local, DTYPE)

    def run(x: Tensor) -> Tensor:
        with Exchange(comm) as exchange:
            exchange.send(block.values(x), windows.v)
            exchange.send(block.keys(x), windows.k)
            exchange.send(block.queries(x), windows.q)
        attended = block.attend(windows.q.tensor, windows.k.tensor, windows.v.tensor)
        with Exchange(comm) as exchange:
            exchange.send(attended, windows.out)
        return block.finish(windows.out.tensor)

    return run


def naive(setting: Setting) -> Run:
    """NCCL as usual: permute, all-to-all, all on one stream."""
    block = setting.block
    v_scatter, k_scatter, q_scatter = (
        NcclScatter(block.shape, setting.context, DTYPE) for _ in range(3)
    )
    gather = NcclGather(block.shape, setting.context, DTYPE)

    def run(x: Tensor) -> Tensor:
        v = v_scatter(block.values(x))
        k = k_scatter(block.keys(x))
        q = q_scatter(block.queries(x))
        return block.finish(gather(block.attend(q, k, v)))

    return run


def packed(setting: Setting) -> Run:
    """NCCL with one all-to-all for Q, K and V, and one copy of each on the way."""
    block = setting.block
    scatter = PackedScatter(block.shape, setting.context, DTYPE)
    gather = NcclGather(block.shape, setting.context, DTYPE)

    def run(x: Tensor) -> Tensor:
        for place, part in enumerate((block.values, block.keys, block.queries)):
            scatter.pack(part(x), place)
        v, k, q = scatter.exchange()
        return block.finish(gather(block.attend(q, k, v)))

    return run


def overlapped(setting: Setting) -> Run:
    """NCCL, V first here too: each tensor travels on NCCL's stream while the next is computed."""
    block = setting.block
    scatters = [NcclScatter(block.shape, setting.context, DTYPE) for _ in range(3)]
    gather = NcclGather(block.shape, setting.context, DTYPE)

    def run(x: Tensor) -> Tensor:
        parts = (block.values, block.keys, block.queries)
        sent = [
            scatter.start(part(x), later=True)
            for scatter, part in zip(scatters, parts, strict=True)
        ]
        for work in sent:
            work.wait()
        v, k, q = (scatter.result() for scatter in scatters)
        return block.finish(gather(block.attend(q, k, v)))

    return run


def on_copy_engines(setting: Setting) -> Run:
    """NCCL's own copy-engine all-to-all, from and into registered memory, V first."""
    block = setting.block
    if setting.zero_cta is None:
        message = "zero-CTA: NCCL has no registered memory here; prepare it first"
        raise ValueError(message)
    exchange = zero_cta.BlockExchange(setting.zero_cta, block.shape, setting.context)

    def run(x: Tensor) -> Tensor:
        for place, part in enumerate((block.values, block.keys, block.queries)):
            exchange.send(part(x), place)
        v, k, q = exchange.received()
        return block.finish(exchange.gather(block.attend(q, k, v)))

    return run


def _rival(open_rival: Callable[[rivals.Site], rivals.Rival]) -> Callable[[Setting], Run]:
    """A library with a scatter and a gather of its own, put into the block."""

    def build(setting: Setting) -> Run:
        block = setting.block
        rival = open_rival(rivals.Site(block.shape, setting.context, DTYPE))
        setting.closing.callback(rival.close)

        def run(x: Tensor) -> Tensor:
            v = rival.scatter(block.values(x), 0)
            k = rival.scatter(block.keys(x), 1)
            q = rival.scatter(block.queries(x), 2)
            return block.finish(rival.gather(block.attend(q, k, v)))

        return run

    return build


VARIANTS = (
    BlockVariant(COMPUTE, compute_only, "none", is_blind=True),
    BlockVariant(OURS, ours, "", is_ours=True),
    BlockVariant(NAIVE, naive, "nccl"),
    *(
        BlockVariant(name, layer_variant(schedule), "", is_ours=True, compares_bits=False)
        for name, schedule in SCHEDULES.items()
    ),
    *(
        BlockVariant(name, layer_variant(PEERS_FIRST, kind), "none", is_ours=True, is_blind=True)
        for name, kind in (
            (SPLIT_ALONE, SplitAlone),
            (HANDSHAKES_ALONE, HandshakesAlone),
            (LINKS_AWAKE, LinksAwake),
        )
    ),
    BlockVariant("packed", packed, "nccl"),
    BlockVariant("overlapped", overlapped, "nccl"),
    BlockVariant(
        zero_cta.NAME,
        on_copy_engines,
        "nccl zero-CTA",
        is_risky=True,
        unavailable=zero_cta.unavailable,
    ),
    BlockVariant(
        "flashinfer",
        _rival(rivals.open_flashinfer),
        "flashinfer",
        is_risky=True,
        unavailable=lambda device: rivals.missing("flashinfer", device),
    ),
    BlockVariant(
        "fast_ulysses",
        _rival(rivals.open_fast_ulysses),
        "fast_ulysses",
        is_risky=True,
        unavailable=lambda device: rivals.missing("fast_ulysses", device),
    ),
)
# Of torch, and without a line above: what it needs excludes the others from the process.
NOT_BUILT = {"all_to_all_nd": rivals.why_no_all_to_all_nd}


def select_variants(
    names: str, among: Sequence[BlockVariant] = VARIANTS
) -> tuple[BlockVariant, ...]:
    """Variants named in a comma-separated list, or all; those that others are compared with stay.

    Raises:
        ValueError: a name is unknown.
    """
    wanted = choose_names("variants", names, [variant.name for variant in among])
    kept = {COMPUTE, NAIVE, *wanted}
    return tuple(variant for variant in among if variant.name in kept)
