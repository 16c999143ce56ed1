"""The first stage in fewer GEMMs and on two lanes, against the plain stage, between gloo ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from fused_layer import GROUPED, KINDS, compare_all, fused_and_plain, inputs
from rank_pool import RankPool

from ulysses_ops import Products, Schedule, UlyssesAttention, UlyssesCommunicator
from ulysses_ops.exchange import Exchange
from ulysses_ops.fused_projection import FusedKernel
from ulysses_ops.packed_weights import Packed, PackedWeights
from ulysses_ops.peers_first import Projected
from ulysses_ops.windows import Window

Ranks = Callable[[int], RankPool]
PAIRED = Schedule("peers", "whole", "whole", products=Products("paired"))


def fits(kernel: FusedKernel, *arguments: object) -> bool:
    """As on a GPU."""
    return not kernel.kind.is_identity


def compared(rank: int, world_size: int, batch: int) -> None:
    with (
        mock.patch.object(FusedKernel, "fits", fits),
        UlyssesCommunicator(timeout_s=20) as comm,
    ):
        compare_all(comm, KINDS, batch, GROUPED)


@pytest.mark.parametrize(("world_size", "batch"), [(2, 1), (2, 2), (4, 1)])
def test_grouped_and_plain_stage_agree(ranks: Ranks, world_size: int, batch: int) -> None:
    ranks(world_size).run(compared, batch, timeout_s=120)


def swapped(rank: int, world_size: int) -> None:
    """Q and K come out of the packed product in each other's place, or a rank's in another's."""
    right = Packed.multiply

    def of_another_rank(self: Packed, x: torch.Tensor, ranks: range) -> list[list[torch.Tensor]]:
        other = (ranks.start + 1) % world_size
        return right(self, x, range(other, other + len(ranks)))

    def v_for_k(self: Packed, x: torch.Tensor, ranks: range) -> list[list[torch.Tensor]]:
        q, *others = right(self, x, ranks)
        return [q, *reversed(others)]

    packed = (Products("packed"),)
    for wrong in (of_another_rank, v_for_k):
        with (
            mock.patch.object(FusedKernel, "fits", fits),
            mock.patch.object(Packed, "multiply", wrong),
            UlyssesCommunicator(timeout_s=20) as comm,
            pytest.raises(AssertionError, match="not close"),
        ):
            compare_all(comm, KINDS[3:], 1, packed)


def test_control_products_of_other_weights_are_seen(ranks: Ranks) -> None:
    ranks(2).run(swapped, timeout_s=60)


# ---- which products there are, and in which order they leave -------------------------------------


def sent_and_multiplied(rank: int, world_size: int) -> dict[Products, tuple[str, int]]:
    """Names of what is sent, in order, and how many GEMMs there are, by form."""
    found = {}
    names: list[str] = []
    send, linear, mm = Exchange.send, torch.nn.functional.linear, torch.addmm
    num_gemms = 0

    def noted(self: Exchange, x: torch.Tensor, window: Window, **options: Any) -> None:
        names.append(window.spec.name[-1])
        send(self, x, window, **options)

    def counted(*arguments: Any, **options: Any) -> torch.Tensor:
        nonlocal num_gemms
        num_gemms += 1
        return (mm if "out" in options else linear)(*arguments, **options)

    with (
        mock.patch.object(FusedKernel, "fits", fits),
        mock.patch.object(Exchange, "send", noted),
        mock.patch.object(torch.nn.functional, "linear", counted),
        mock.patch.object(torch, "addmm", counted),
        UlyssesCommunicator(timeout_s=20) as comm,
    ):
        for products in (Products(), *GROUPED):
            schedule = Schedule("destinations", "whole", "whole", products=products)
            layer, _ = fused_and_plain(comm, KINDS[0], schedule)
            names.clear()
            num_gemms = 0
            layer.project(*inputs(comm, KINDS[0], 1, 1))
            found[products] = ("".join(names), num_gemms)
    return found


def test_each_form_has_its_products_and_its_order(ranks: Ranks) -> None:
    for found in ranks(2).run(sent_and_multiplied, timeout_s=60):
        assert found == {
            Products(): ("vkq", 6),
            Products("paired"): ("vkq", 4),
            Products("paired", "last"): ("kqv", 4),
            Products("packed"): ("vkq", 3),
            Products(lanes=2): ("vkq", 6),
            Products("paired", lanes=2): ("vkq", 4),
            Products(opens_early=True): ("vkq", 6),
            Products(lanes=2, opens_early=True): ("vkq", 6),
        }


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
        layer, plain = fused_and_plain(comm, KINDS[0], PAIRED)
        check(layer, plain, 1)
        (kept,) = layer._packed._kept.values()
        with mock.patch("ulysses_ops.packed_weights._pack", side_effect=AssertionError("again")):
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
        (again,) = layer._packed._kept.values()
        assert again.packed.weight.data_ptr() == kept.packed.weight.data_ptr()


def test_changed_weights_are_copied_anew(ranks: Ranks) -> None:
    ranks(2).run(stale, timeout_s=30)


def never_again(rank: int, world_size: int) -> None:
    right = PackedWeights.of

    def first_only(self: PackedWeights, *projections: Projected) -> Packed:
        kept = self._kept.get(len(projections))
        return right(self, *projections) if kept is None else kept.packed

    with (
        mock.patch.object(PackedWeights, "of", first_only),
        pytest.raises(AssertionError, match="not close"),
    ):
        stale(rank, world_size)


def test_control_a_copy_that_stays_is_seen(ranks: Ranks) -> None:
    ranks(2).run(never_again, timeout_s=30)


def mixed_biases(rank: int, world_size: int) -> None:
    """Where one of the projections has no bias, and where weights count no versions."""
    with (
        mock.patch.object(FusedKernel, "fits", fits),
        UlyssesCommunicator(timeout_s=20) as comm,
        torch.inference_mode(),
    ):
        layer, plain = fused_and_plain(comm, KINDS[0], PAIRED)
        for one in (layer, plain):
            one.k.register_parameter("bias", None)
        x, cos, sin = inputs(comm, KINDS[0], 1, 1)
        for _ in range(2):
            expected = [part.clone() for part in plain.project(x, cos, sin)]
            for found, right in zip(layer.project(x, cos, sin), expected, strict=True):
                torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-5)


def test_one_bias_is_missing(ranks: Ranks) -> None:
    ranks(2).run(mixed_biases, timeout_s=30)


@pytest.mark.parametrize(
    "values",
    [
        {"grouping": "fused"},
        {"values": "middle"},
        {"lanes": 3},
        {"values": "last"},
        {"grouping": "paired", "values": "last", "lanes": 2},
        {"grouping": "packed", "lanes": 2},
    ],
)
def test_products_that_mean_nothing_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="'last' goes with 'paired' in one lane"):
        Products(**values)
