"""The first stage from packed weights, over the copy engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from unittest import mock

import pytest
import torch
from fused_layer import KINDS, compare_all, fused_and_plain, inputs, spoil
from on_gpu import NO_OPEN, communicator, delay, fault, settle
from rank_pool import RankPool
from torch import Tensor

from ulysses_ops import (
    NormRope,
    Schedule,
    UlyssesAttention,
    UlyssesCommunicator,
    qkv_projection,
)
from ulysses_ops.graphs import capture_step
from ulysses_ops.packed_projection import Packed, PackedWeights
from ulysses_ops.peers_first import Projected

PACKED = Schedule("peers", "whole", "whole", qkv_weights="packed")


def eager(rank: int, world_size: int) -> None:
    with communicator() as comm:
        compare_all(comm, KINDS, 1, "packed")
        compare_all(comm, KINDS, 2, "packed")
        settle()


def test_packed_equals_the_plain_stage(pair: RankPool) -> None:
    pair.run(eager, timeout_s=120)


def replays(rank: int, world_size: int, kind: NormRope, is_warm: bool) -> int:
    """Replays with changing rows against eager calls, ranks skewed."""
    wrong = 0
    with communicator() as comm:
        layer, _ = fused_and_plain(comm, kind, PACKED)
        x, cos, sin = inputs(comm, kind, 1, 0)

        def stage(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            if not is_warm and torch.cuda.is_current_stream_capturing():
                layer._packed._kept = None  # the copy is then a part of the graph
            return layer.project(x, cos, sin)

        step = capture_step(comm, stage, [x])
        for seed in range(20):
            x = inputs(comm, kind, 1, seed)[0]
            expected = [part.clone() for part in layer.project(x, cos, sin)]
            spoil(layer, x)
            if seed % 2 != rank:
                delay(2)
            got = step.replay(x)
            wrong += sum(not torch.equal(a, b) for a, b in zip(got, expected, strict=True))
        settle()
        step.close()
    return wrong


@pytest.mark.parametrize("is_warm", [True, False])
@pytest.mark.parametrize("kind", KINDS[:2], ids=lambda kind: kind.norm)
def test_replays(pair: RankPool, kind: NormRope, is_warm: bool) -> None:
    assert pair.run(replays, kind, is_warm, timeout_s=60) == [0, 0]


def read_late(
    comm: UlyssesCommunicator,
    layer: UlyssesAttention,
    given: Sequence[tuple[Tensor, Tensor | None, Tensor | None]],
    faults: int,
) -> list[list[Tensor]]:
    """Rounds from two streams in turn; a rank reads the windows late, while the next is issued."""
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    found: list[list[Tensor]] = []
    with fault(comm, faults):
        for number, one in enumerate(given):
            with torch.cuda.stream(streams[number % 2]):
                windows = layer.project(*one)
                if number % 2 == comm.rank:
                    delay(10)
                found.append([part.clone() for part in windows])
        settle()
    return found


def late_readers(rank: int, world_size: int, kind: NormRope, faults: int) -> int:
    """The copy is made anew for the first of the late rounds, and read on the other stream next."""
    with communicator() as comm:
        layer, plain = fused_and_plain(comm, kind, PACKED)
        given = [inputs(comm, kind, 1, seed) for seed in range(20)]
        with torch.no_grad():
            layer.project(*given[0])
            layer.q.weight.mul_(-2)  # the plain layer shares it
        expected = [[part.clone() for part in plain.project(*one)] for one in given]
        settle()
        found = read_late(comm, layer, given, faults)
        wrong = 0
        for got, wanted in zip(found, expected, strict=True):
            pairs = zip(got, wanted, strict=True)
            wrong += sum(not torch.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in pairs)
        return wrong


@pytest.mark.parametrize("kind", KINDS[:2], ids=lambda kind: kind.norm)
def test_windows_are_written_behind_readers_of_another_stream(
    pair: RankPool, kind: NormRope
) -> None:
    assert pair.run(late_readers, kind, 0, timeout_s=60) == [0, 0]


def test_control_a_round_that_is_not_opened_is_seen(pair: RankPool) -> None:
    assert max(pair.run(late_readers, KINDS[0], NO_OPEN, timeout_s=60)) > 0


def changed(rank: int, world_size: int, is_stale: bool) -> int:
    """A graph sees a changed weight after the next call outside of it; a stale copy never."""
    right = PackedWeights.of

    def first_only(self: PackedWeights, *projections: Projected) -> Packed:
        return right(self, *projections) if self._kept is None else self._kept.packed

    with communicator() as comm, pytest.MonkeyPatch.context() as patch:
        if is_stale:
            patch.setattr(PackedWeights, "of", first_only)
        layer, plain = fused_and_plain(comm, KINDS[0], PACKED)
        x, cos, sin = inputs(comm, KINDS[0], 1, 0)
        step = capture_step(comm, lambda x: layer.project(x, cos, sin), [x])
        with torch.no_grad():
            layer.k.weight.mul_(-2)  # the plain layer shares it
        layer.project(x, cos, sin)
        expected = [part.clone() for part in plain.project(x, cos, sin)]
        spoil(layer, x)
        got = step.replay(x)
        pairs = zip(got, expected, strict=True)
        wrong = sum(not torch.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in pairs)
        settle()
        step.close()
        return wrong


def test_a_graph_sees_a_changed_weight_after_the_next_call(pair: RankPool) -> None:
    assert pair.run(changed, False, timeout_s=60) == [0, 0]


def test_control_a_stale_copy_is_seen(pair: RankPool) -> None:
    assert min(pair.run(changed, True, timeout_s=60)) > 0


# ---- norm and RoPE in the epilogue ---------------------------------------------------------------

EPILOGUE = replace(PACKED, norm_rope="epilogue")
MODEL = {"num_heads": 8, "num_kv_heads": 4, "width": 320, "rows": 200}


def model_layers(comm: UlyssesCommunicator) -> tuple[UlyssesAttention, UlyssesAttention]:
    """A bf16 layer of heads of 128 with one kernel for its first stage, and with several."""
    generator = torch.Generator().manual_seed(5)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(comm.device, torch.bfloat16)

    columns = {"q": 8 * 128, "k": 4 * 128, "v": 4 * 128}
    tensors = {name: numbers(count, MODEL["width"]) / 16 for name, count in columns.items()}
    tensors |= {f"{name}_bias": numbers(count) for name, count in columns.items()}
    tensors |= {"out": numbers(64, columns["q"]), "q_norm": numbers(128), "k_norm": numbers(128)}
    layers = [
        UlyssesAttention.from_weights(
            comm,
            **tensors,
            num_heads=MODEL["num_heads"],
            num_kv_heads=MODEL["num_kv_heads"],
            norm_rope=NormRope("per_head", "interleaved"),
            schedule=schedule,
        )
        for schedule in (EPILOGUE, replace(PACKED, qkv_weights="apart"))
    ]
    return layers[0], layers[1]


def model_inputs(comm: UlyssesCommunicator, batch: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * comm.rank + seed)
    x = torch.randn(batch, MODEL["rows"], MODEL["width"], generator=generator)
    angles = torch.rand(MODEL["rows"], 64, generator=generator).to(comm.device)
    return x.to(comm.device, torch.bfloat16), angles.cos(), angles.sin()


def in_epilogue(rank: int, world_size: int, batch: int, faults: int) -> tuple[int, int]:
    """Eager rounds from two streams in turn, then replays; ranks late, windows read late."""
    wrong = [0, 0]
    by_kernel = qkv_projection._by_kernel
    with (
        communicator() as comm,
        mock.patch.object(qkv_projection, "_by_kernel", side_effect=by_kernel) as taken,
    ):
        layer, plain = model_layers(comm)
        other, _ = model_layers(comm)
        given = [model_inputs(comm, batch, seed) for seed in range(12)]
        expected = [[part.clone() for part in plain.project(*one)] for one in given]
        settle()
        found = read_late(comm, layer, given, faults)
        for got, wanted in zip(found, expected, strict=True):
            pairs = zip(got, wanted, strict=True)
            # One rounding against three: within 2^-6 of the largest element; NaN is not.
            wrong[0] += sum(not bool((a - b).abs().max() <= b.abs().max() / 64) for a, b in pairs)
        if faults == 0:
            cos, sin = given[0][1:]

            def stages(x: Tensor) -> tuple[Tensor, ...]:
                """Several in one graph, of two layers: counters are used again at once."""
                first = [part.clone() for part in layer.project(x, cos, sin)]
                other.project(x * 2, cos, sin)
                return (*layer.project(x, cos, sin), *first)

            step = capture_step(comm, stages, [given[0][0]])
            for number, (x, _, _) in enumerate(given):
                eager = [part.clone() for part in layer.project(x, cos, sin)] * 2
                spoil(layer, x)
                if number % 2 != rank:
                    delay(2)
                same = zip(step.replay(x), eager, strict=True)
                wrong[1] += sum(not torch.equal(a, b) for a, b in same)
            settle()
            step.close()
        assert taken.call_count >= len(given)  # and the packed stage did not stand in for it
    return wrong[0], wrong[1]


@pytest.mark.parametrize("batch", [1, 2])
def test_one_kernel_equals_the_plain_stage(pair: RankPool, batch: int) -> None:
    assert pair.run(in_epilogue, batch, 0, timeout_s=60) == [(0, 0), (0, 0)]


def test_control_one_kernel_in_a_round_that_is_not_opened_is_seen(pair: RankPool) -> None:
    assert max(wrong for wrong, _ in pair.run(in_epilogue, 1, NO_OPEN, timeout_s=60)) > 0
