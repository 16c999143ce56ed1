"""The first stage by the fused operator, which PyTorch computes here, against the plain stage."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from fused_layer import HEAD_DIM, KINDS, compare_all, fused_and_plain, inputs
from rank_pool import RankPool

from ulysses_ops import PEERS_FIRST, NormRope, UlyssesCommunicator
from ulysses_ops.fused_projection import FusedKernel, Parts

Ranks = Callable[[int], RankPool]


def fits(kernel: FusedKernel, *arguments: object) -> bool:
    """As on a GPU."""
    return not kernel.kind.is_identity


def compared(rank: int, world_size: int, batch: int) -> int:
    """How often the fused operator ran, when all was right."""
    calls = []
    run = FusedKernel.run

    def counted(kernel: FusedKernel, q: Parts, k: Parts) -> None:
        calls.append((len(q.inputs), len(k.inputs)))
        run(kernel, q, k)

    with (
        mock.patch.object(FusedKernel, "fits", fits),
        mock.patch.object(FusedKernel, "run", counted),
        UlyssesCommunicator(timeout_s=20) as comm,
    ):
        compare_all(comm, KINDS, batch)
    return len(calls)


@pytest.mark.parametrize(("world_size", "batch"), [(2, 1), (2, 2), (4, 1)])
def test_fused_and_plain_stage_agree(ranks: Ranks, world_size: int, batch: int) -> None:
    groups = {2: (1, 1), 4: (2, 3)}[world_size]  # the most of any rank: neighbours, destinations
    counts = ranks(world_size).run(compared, batch, timeout_s=60)
    # Whole: K and Q alone. By parts: a launch for each group and the own part; across heads two.
    by_kind = [2 * 3 if kind.norm == "across_heads" else None for kind in KINDS]
    most = sum(count or 2 + sum(groups) + 2 for count in by_kind)
    assert max(counts) == 2 * most
    assert min(counts) > 0


def weightless(rank: int, world_size: int) -> None:
    def without(
        cls: type[Parts], to: object, parts: list[torch.Tensor], outs: list[torch.Tensor]
    ) -> Parts:
        return cls(parts, outs)

    with (
        mock.patch.object(FusedKernel, "fits", fits),
        mock.patch.object(Parts, "of", classmethod(without)),
        UlyssesCommunicator(timeout_s=20) as comm,
        pytest.raises(AssertionError, match="not close"),
    ):
        compare_all(comm, KINDS[:1], 1)


def test_control_a_lost_norm_weight_is_seen(ranks: Ranks) -> None:
    ranks(2).run(weightless)


def test_what_the_kernel_does_not_fit_is_left_to_pytorch() -> None:
    with UlyssesCommunicator(device="cpu") as comm:
        kind = NormRope("per_head", "interleaved")
        fused, _ = fused_and_plain(comm, kind, PEERS_FIRST)
        x, cos, sin = inputs(comm, kind, 1, 1)
        kernel = FusedKernel(kind, cos, sin)
        assert not kernel.fits(x, HEAD_DIM, (fused.q_norm,))  # no GPU

    class OnGpu(torch.Tensor):
        device = torch.device("cuda", 0)

    def takes(kernel: FusedKernel, head_dim: int = HEAD_DIM, dtype: torch.dtype = x.dtype) -> bool:
        weights = (None, torch.ones(head_dim, dtype=dtype))
        return kernel.fits(x.to(dtype).as_subclass(OnGpu), head_dim, weights)

    native = mock.Mock(kernels=True)
    with mock.patch("ulysses_ops.fused_projection.NATIVE", native):
        assert takes(kernel)
        assert not takes(FusedKernel(NormRope(), None, None))
        assert not takes(FusedKernel(kind, cos.double(), sin.double()))  # type: ignore[union-attr]
        assert not takes(FusedKernel(kind, cos[None], sin[None]))  # type: ignore[index]
        assert not takes(FusedKernel(kind, cos[:, ::2], sin[:, ::2]))  # type: ignore[index]
        assert not takes(kernel, head_dim=12)
        assert not takes(kernel, head_dim=264)
        assert not takes(kernel, dtype=torch.float64)
        native.kernels = False
        assert not takes(kernel)
