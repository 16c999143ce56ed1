"""A float32 layer whose first stage can run by the fused kernel, and by PyTorch."""

from __future__ import annotations

from itertools import product
from typing import Any, Literal

import torch
from torch import Tensor

from ulysses_ops import NormRope, Schedule, UlyssesAttention, UlyssesCommunicator
from ulysses_ops.part_norm_rope import apply_norm_rope
from ulysses_ops.schedule import NormRopePlace, QkvWeights

KINDS = (
    NormRope("per_head", "interleaved"),
    NormRope("across_heads", "half_split"),
    NormRope("across_heads", "none"),
    NormRope("none", "interleaved"),
)
SPLITS = ("whole", "peers", "destinations")
HEADS, KV_HEADS, HEAD_DIM, ROWS, WIDTH = 8, 4, 16, 6, 24


def fused_and_plain(
    comm: UlyssesCommunicator, kind: NormRope, schedule: Schedule | Literal["auto"], **options: Any
) -> tuple[UlyssesAttention, UlyssesAttention]:
    """The same layer twice: with the kernel that it takes by itself, and with PyTorch's."""
    generator = torch.Generator().manual_seed(5)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(comm.device)

    rows = {"q": HEADS * HEAD_DIM, "k": KV_HEADS * HEAD_DIM, "v": KV_HEADS * HEAD_DIM}
    tensors = {name: numbers(count, WIDTH) for name, count in rows.items()}
    tensors |= {f"{name}_bias": numbers(count) for name, count in rows.items()}
    tensors["out"] = numbers(WIDTH, rows["q"])
    norms = {}
    if kind.norm != "none":
        for name in ("q", "k"):
            norms[f"{name}_norm"] = numbers(HEAD_DIM if kind.norm == "per_head" else rows[name])
    layers = [
        UlyssesAttention.from_weights(
            comm,
            **tensors,
            **norms,
            num_heads=HEADS,
            num_kv_heads=KV_HEADS,
            norm_rope=kind,
            schedule=schedule,
            norm_rope_kernel=kernel,
            **options,
        )
        for kernel in (None, apply_norm_rope)
    ]
    return layers[0], layers[1]


def inputs(
    comm: UlyssesCommunicator, kind: NormRope, batch: int, seed: int
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Rows of this rank, and its angles."""
    generator = torch.Generator().manual_seed(100 * comm.rank + seed)
    x = torch.randn(batch, ROWS, WIDTH, generator=generator).to(comm.device)
    if kind.rope == "none":
        return x, None, None
    angles = torch.rand(ROWS, HEAD_DIM // 2, generator=generator).to(comm.device)
    return x, angles.cos(), angles.sin()


def spoil(layer: UlyssesAttention, x: Tensor) -> None:
    """Fill the windows with NaN, so that nothing old passes; no peer writes before it may."""
    assert isinstance(layer.schedule, Schedule)
    windows, _ = layer._reserve(x, layer.schedule)
    for window in windows:
        window.tensor.fill_(float("nan"))


def compare_all(
    comm: UlyssesCommunicator,
    kinds: tuple[NormRope, ...],
    batch: int,
    qkv_weights: QkvWeights = "apart",
    norm_rope: NormRopePlace = "apart",
) -> None:
    """Q, K and V of both, by every split, twice with other rows."""
    for kind, split in product(kinds, SPLITS):
        schedule = Schedule(
            split,  # type: ignore[arg-type]
            "whole",
            "whole",
            qkv_weights=qkv_weights,
            norm_rope=norm_rope,
        )
        fused, plain = fused_and_plain(comm, kind, schedule)
        for seed in (1, 2):
            x, cos, sin = inputs(comm, kind, batch, seed)
            expected = [part.clone() for part in plain.project(x, cos, sin)]
            spoil(fused, x)
            for found, right in zip(fused.project(x, cos, sin), expected, strict=True):
                torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-5)
