"""The first stage from packed weights, against the plain stage, between gloo ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args
from unittest import mock

import pytest
import torch
from fused_layer import KINDS, ROWS, WIDTH, compare_all, fused_and_plain, inputs
from rank_pool import RankPool

from ulysses_ops import NormRope, Schedule, UlyssesAttention, UlyssesCommunicator
from ulysses_ops.exchange import Exchange
from ulysses_ops.fused_projection import FusedKernel
from ulysses_ops.norm_rope_checks import Norm
from ulysses_ops.packed_projection import Packed, PackedWeights
from ulysses_ops.peers_first import Projected
from ulysses_ops.qkv_projection import project_qkv_into
from ulysses_ops.schedule import QkvWeights
from ulysses_ops.windows import Window

Ranks = Callable[[int], RankPool]
PACKED = Schedule("peers", "whole", "whole", qkv_weights="packed")


def fits(kernel: FusedKernel, *arguments: object) -> bool:
    """As on a GPU."""
    return not kernel.kind.is_identity


def compared(rank: int, world_size: int, batch: int) -> None:
    with (
        mock.patch.object(FusedKernel, "fits", fits),
        UlyssesCommunicator(timeout_s=20) as comm,
    ):
        compare_all(comm, KINDS, batch, "packed")


@pytest.mark.parametrize(("world_size", "batch"), [(2, 1), (2, 2), (4, 1)])
def test_packed_and_plain_stage_agree(ranks: Ranks, world_size: int, batch: int) -> None:
    ranks(world_size).run(compared, batch, timeout_s=120)


def has_kernel(x: torch.Tensor, head_dim: int, norm: Norm, num_destinations: int) -> bool:
    """As on a GPU."""
    return norm != "across_heads"


def compared_in_epilogue(rank: int, world_size: int, batch: int) -> int:
    """How often one operator did all of it."""
    with (
        mock.patch.object(FusedKernel, "fits", fits),
        mock.patch("ulysses_ops.first_stage.has_kernel", has_kernel),
        mock.patch(
            "ulysses_ops.packed_projection.project_qkv_into", side_effect=project_qkv_into
        ) as calls,
        UlyssesCommunicator(timeout_s=20) as comm,
    ):
        compare_all(comm, KINDS, batch, "packed", "epilogue")
        return int(calls.call_count)


@pytest.mark.parametrize(("world_size", "batch"), [(2, 1), (2, 2), (4, 1)])
def test_norm_and_rope_in_the_epilogue_agree(ranks: Ranks, world_size: int, batch: int) -> None:
    calls = ranks(world_size).run(compared_in_epilogue, batch, timeout_s=120)
    # Two kinds have no norm across heads, two splits are in parts, and there are two inputs.
    assert calls == [8] * world_size


def swapped(rank: int, world_size: int) -> None:
    """Q and K come out of the packed product in each other's place, or a rank's in another's."""
    right = Packed.multiply

    def of_another_rank(self: Packed, x: torch.Tensor, ranks: range) -> list[list[torch.Tensor]]:
        other = (ranks.start + 1) % world_size
        return right(self, x, range(other, other + len(ranks)))

    def v_for_k(self: Packed, x: torch.Tensor, ranks: range) -> list[list[torch.Tensor]]:
        q, *others = right(self, x, ranks)
        return [q, *reversed(others)]

    for wrong in (of_another_rank, v_for_k):
        with (
            mock.patch.object(FusedKernel, "fits", fits),
            mock.patch.object(Packed, "multiply", wrong),
            UlyssesCommunicator(timeout_s=20) as comm,
            pytest.raises(AssertionError, match="not close"),
        ):
            compare_all(comm, KINDS[3:], 1, "packed")


def test_control_products_of_other_weights_are_seen(ranks: Ranks) -> None:
    ranks(2).run(swapped, timeout_s=60)


# ---- which GEMMs there are, and in which order they leave ----------------------------------------


def sent_and_multiplied(
    rank: int, world_size: int, kind: NormRope
) -> dict[QkvWeights, tuple[str, int]]:
    """Names of what is sent, in order, and how many GEMMs there are."""
    found: dict[QkvWeights, tuple[str, int]] = {}
    names: list[str] = []
    send, linear, addmm = Exchange.send, torch.nn.functional.linear, torch.addmm
    num_gemms = 0

    def noted(self: Exchange, x: torch.Tensor, window: Window, **options: Any) -> None:
        names.append(window.spec.name[-1])
        send(self, x, window, **options)

    def counted(*arguments: Any, **options: Any) -> torch.Tensor:
        nonlocal num_gemms
        num_gemms += 1
        return (addmm if "out" in options else linear)(*arguments, **options)

    with (
        mock.patch.object(FusedKernel, "fits", fits),
        mock.patch.object(Exchange, "send", noted),
        mock.patch.object(torch.nn.functional, "linear", counted),
        mock.patch.object(torch, "addmm", counted),
        UlyssesCommunicator(timeout_s=20) as comm,
    ):
        for weights in get_args(QkvWeights):
            schedule = Schedule("destinations", "whole", "whole", qkv_weights=weights)
            layer, _ = fused_and_plain(comm, kind, schedule)
            names.clear()
            num_gemms = 0
            layer.project(*inputs(comm, kind, 1, 1))
            found[weights] = ("".join(names), num_gemms)
    return found


def test_what_is_multiplied_and_sent(ranks: Ranks) -> None:
    for found in ranks(2).run(sent_and_multiplied, KINDS[0], timeout_s=60):
        assert found == {"apart": ("vkq", 6), "packed": ("vkq", 3)}
    for found in ranks(2).run(sent_and_multiplied, KINDS[1], timeout_s=60):
        assert found == {"apart": ("vkq", 4), "packed": ("vkq", 3)}


def by_default(rank: int, world_size: int) -> tuple[bool, bool]:
    """Whether a copy is held with the planner's choice, and with its choice but for that."""
    held = []
    with (
        mock.patch.object(FusedKernel, "fits", fits),
        UlyssesCommunicator(timeout_s=20) as comm,
    ):
        kind = KINDS[0]
        x, cos, sin = inputs(comm, kind, 1, 1)
        apart = replace(PACKED, qkv_weights="apart")
        for schedule in (PACKED, apart):
            layer, _ = fused_and_plain(comm, kind, "auto")
            plan = replace(layer.plan((1, ROWS, WIDTH)), schedule=schedule)
            with mock.patch("ulysses_ops.layer.plan_schedule", return_value=plan):
                layer.project(x, cos, sin)
            held.append(layer._packed._kept is not None)
    return held[0], held[1]


def test_the_layer_does_by_default_what_the_planner_says(ranks: Ranks) -> None:
    assert ranks(2).run(by_default, timeout_s=30) == [(True, False)] * 2


# ---- copies of weights ---------------------------------------------------------------------------


def stale(rank: int, world_size: int) -> None:
    """A weight that is changed in place, or replaced, is copied anew, and into the same memory."""

    def check(layer: UlyssesAttention, plain: UlyssesAttention, seed: int) -> None:
        x, cos, sin = inputs(comm, KINDS[0], 1, seed)
        expected = [part.clone() for part in plain.project(x, cos, sin)]
        for found, right in zip(layer.project(x, cos, sin), expected, strict=True):
            torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-5)

    with (
        mock.patch.object(FusedKernel, "fits", fits),
        UlyssesCommunicator(timeout_s=20) as comm,
    ):
        layer, plain = fused_and_plain(comm, KINDS[0], PACKED)
        check(layer, plain, 1)
        kept = layer._packed._kept
        assert kept is not None
        with mock.patch("ulysses_ops.packed_projection._pack", side_effect=AssertionError("again")):
            check(layer, plain, 2)
        with torch.no_grad():
            layer.q.weight.mul_(-2)  # the plain layer shares it
        check(layer, plain, 3)
        replaced = torch.nn.Parameter(layer.k.weight.detach() + 1)
        layer.k.weight = plain.k.weight = replaced
        check(layer, plain, 4)
        with torch.no_grad():
            layer.k.bias.add_(3)
        check(layer, plain, 5)
        again = layer._packed._kept
        assert again is not None and again is not kept
        assert again.packed.weight.data_ptr() == kept.packed.weight.data_ptr()


def test_changed_weights_are_copied_anew(ranks: Ranks) -> None:
    ranks(2).run(stale, timeout_s=30)


def relaid(rank: int, world_size: int, change: str) -> None:
    """The same memory, read otherwise: a transposed weight, or a bias of another projection."""
    with (
        mock.patch.object(FusedKernel, "fits", fits),
        UlyssesCommunicator(timeout_s=20) as comm,
    ):
        layer, plain = fused_and_plain(comm, KINDS[0], PACKED)
        rows = layer.v.out_features
        square = torch.randn(rows, rows, generator=torch.Generator().manual_seed(3))
        for one in (layer, plain):
            one.v.register_parameter("bias", None)
            one.v.weight = torch.nn.Parameter(square[:, :WIDTH], requires_grad=False)
        x, cos, sin = inputs(comm, KINDS[0], 1, 1)
        layer.project(x, cos, sin)
        for one in (layer, plain):
            if change == "transposed":
                one.v.weight = torch.nn.Parameter(square.t()[:, :WIDTH], requires_grad=False)
            else:
                one.v.bias = one.k.bias
                one.k.register_parameter("bias", None)
        expected = [part.clone() for part in plain.project(x, cos, sin)]
        for found, right in zip(layer.project(x, cos, sin), expected, strict=True):
            torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("change", ["transposed", "moved"])
def test_the_same_memory_read_otherwise_is_copied_anew(ranks: Ranks, change: str) -> None:
    ranks(2).run(relaid, change, timeout_s=30)


def without_strides(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() and one.shape == other.shape


def without_places(projections: Any) -> list[torch.Tensor]:
    weights = [one.weight for one in projections]
    return weights + [one.bias for one in projections if one.bias is not None]


def relaid_unseen(rank: int, world_size: int, change: str) -> None:
    broken = ("_is_same", without_strides)
    if change == "moved":
        broken = ("_tensors_of", without_places)  # type: ignore[assignment]
    with (
        mock.patch(f"ulysses_ops.packed_projection.{broken[0]}", broken[1]),
        pytest.raises(AssertionError, match="not close"),
    ):
        relaid(rank, world_size, change)


@pytest.mark.parametrize("change", ["transposed", "moved"])
def test_control_memory_that_is_taken_for_the_same_is_seen(ranks: Ranks, change: str) -> None:
    ranks(2).run(relaid_unseen, change, timeout_s=30)


def never_again(rank: int, world_size: int) -> None:
    right = PackedWeights.of

    def first_only(self: PackedWeights, *projections: Projected) -> Packed:
        return right(self, *projections) if self._kept is None else self._kept.packed

    with (
        mock.patch.object(PackedWeights, "of", first_only),
        pytest.raises(AssertionError, match="not close"),
    ):
        stale(rank, world_size)


def test_control_a_copy_that_stays_is_seen(ranks: Ranks) -> None:
    ranks(2).run(never_again, timeout_s=30)


def mixed_biases(rank: int, world_size: int) -> None:
    """One of the projections has no bias."""
    with (
        mock.patch.object(FusedKernel, "fits", fits),
        UlyssesCommunicator(timeout_s=20) as comm,
    ):
        layer, plain = fused_and_plain(comm, KINDS[0], PACKED)
        for one in (layer, plain):
            one.k.register_parameter("bias", None)
        x, cos, sin = inputs(comm, KINDS[0], 1, 1)
        expected = [part.clone() for part in plain.project(x, cos, sin)]
        for found, right in zip(layer.project(x, cos, sin), expected, strict=True):
            torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-5)
        assert layer._packed._kept is not None


def test_one_bias_is_missing(ranks: Ranks) -> None:
    ranks(2).run(mixed_biases, timeout_s=30)


def uncounted(rank: int, world_size: int) -> None:
    """Weights that were made in inference mode count no versions: none of them is kept."""
    with (
        mock.patch.object(FusedKernel, "fits", fits),
        UlyssesCommunicator(timeout_s=20) as comm,
        torch.inference_mode(),
    ):
        layer, plain = fused_and_plain(comm, KINDS[0], PACKED)
        x, cos, sin = inputs(comm, KINDS[0], 1, 1)
        for _ in range(2):
            expected = [part.clone() for part in plain.project(x, cos, sin)]
            for found, right in zip(layer.project(x, cos, sin), expected, strict=True):
                torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-5)
            layer.q.weight.mul_(-2)  # the plain layer shares it
        assert layer._packed._kept is None


def test_weights_that_count_no_changes_are_read_where_they_are(ranks: Ranks) -> None:
    ranks(2).run(uncounted, timeout_s=30)


def kept_anyway(rank: int, world_size: int) -> None:
    with (
        mock.patch("ulysses_ops.first_stage.can_keep", return_value=True),
        pytest.raises(RuntimeError, match="Inference tensors do not track version counter"),
    ):
        uncounted(rank, world_size)


def test_control_uncounted_weights_that_are_kept_are_seen(ranks: Ranks) -> None:
    ranks(2).run(kept_anyway, timeout_s=30)
