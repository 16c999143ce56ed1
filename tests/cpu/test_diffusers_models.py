"""Transformers of diffusers on shards of their sequence, against the same model on one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from denoising import denoise
from rank_pool import RankPool
from tiny_models import BY_NAME, HEADS, TINY_MODELS, assert_near, output
from torch import Tensor

from ulysses_ops import Exchange, UlyssesCommunicator, collective
from ulysses_ops.agreement import Agreement
from ulysses_ops.diffusers_models import parallelize
from ulysses_ops.joint import JointSequence
from ulysses_ops.joint_attention import replicate_rows

pytest.importorskip("diffusers", reason="diffusers is not installed: pip install -e .[diffusers]")

Ranks = Callable[[int], RankPool]
NOTICED = 2e-4  # an output that is wrong differs by more: ten times what is tolerated
NAMES = [model.name for model in TINY_MODELS]
JOINT = ["FluxTransformer2DModel", "QwenImageTransformer2DModel", "HunyuanVideoTransformer3DModel"]
SHARDED_TEXT, REPLICATED_TEXT = 8, 5


def against_one_rank(
    rank: int, world_size: int, name: str, config: dict[str, Any], text_rows: int
) -> None:
    tiny = BY_NAME[name]
    model, alone = tiny.make(**config), tiny.make(**config)
    with UlyssesCommunicator(timeout_s=20) as comm, parallelize(model, comm):
        for seed in (1, 2):
            inputs = {**tiny.call_with(text_rows, seed=seed), **extra_inputs(name, config)}
            expected = output(alone, inputs)
            got = output(model, inputs)
            assert expected.abs().max() > 0.5
            if world_size == 1:
                assert torch.equal(got, expected)
            assert_near(got, expected)


def extra_inputs(name: str, config: dict[str, Any]) -> dict[str, Any]:
    """What a config needs besides."""
    if "image_dim" in config:
        generator = torch.Generator().manual_seed(3)
        return {"encoder_hidden_states_image": torch.randn(2, 3, 8, generator=generator)}
    return {}


@pytest.mark.parametrize("text_rows", [SHARDED_TEXT, REPLICATED_TEXT])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_output_is_that_of_one_rank(
    ranks: Ranks, world_size: int, name: str, text_rows: int
) -> None:
    ranks(world_size).run(against_one_rank, name, {}, text_rows, timeout_s=60)


@pytest.mark.parametrize(
    ("name", "config", "text_rows"),
    [
        ("QwenImageTransformer2DModel", {"zero_cond_t": True}, SHARDED_TEXT),
        ("QwenImageTransformer2DModel", {"zero_cond_t": True}, REPLICATED_TEXT),
        ("HunyuanVideoTransformer3DModel", {"image_condition_type": "latent_concat"}, 8),
        # image to video: the stock processor of cross attention takes the last 512 rows for text
        ("WanTransformer3DModel", {"image_dim": 8, "added_kv_proj_dim": HEADS * 12}, 512),
    ],
)
def test_other_configurations(
    ranks: Ranks, name: str, config: dict[str, Any], text_rows: int
) -> None:
    ranks(2).run(against_one_rank, name, config, text_rows, timeout_s=60)


# ---- the same comparison without one of the exchanges --------------------------------------------


@contextmanager
def keeping(window_name: str) -> Iterator[list[str]]:
    """Each rank keeps what it would send into these windows; yields the exchanges concerned."""
    exchange = collective._exchange
    concerned: list[str] = []

    def kept(comm: UlyssesCommunicator, received: Tensor, sent: Tensor, *sizes: Any) -> None:
        received.copy_(sent)

    def selective(*args: Any) -> Tensor:
        if f"window '{window_name}'" in args[-1]:
            concerned.append(args[-1])
            with mock.patch.object(collective, "all_to_all", kept):
                return exchange(*args)
        return exchange(*args)

    with mock.patch.object(collective, "_exchange", selective):
        yield concerned


def without_an_exchange(
    rank: int, world_size: int, name: str, text_rows: int, windows: list[str]
) -> None:
    tiny = BY_NAME[name]
    model = tiny.make()
    inputs = tiny.call_with(text_rows)
    expected = output(model, inputs)
    with UlyssesCommunicator(timeout_s=20) as comm, parallelize(model, comm):
        for window in windows:
            with keeping(window) as concerned:
                wrong = output(model, inputs)
            assert concerned, f"{window} is not among the windows of {name}"
            difference = float((wrong - expected).abs().max())
            assert difference > NOTICED, f"BLIND: {name} without {window}: {difference}"
        assert_near(output(model, inputs), expected)


EVERY_EXCHANGE = ["attention.v", "attention.k", "attention.q", "attention.out", "ulysses::scatter"]


@pytest.mark.parametrize("name", NAMES)
def test_the_comparison_notices_an_exchange_that_is_left_out(ranks: Ranks, name: str) -> None:
    ranks(2).run(without_an_exchange, name, SHARDED_TEXT, EVERY_EXCHANGE, timeout_s=60)


@pytest.mark.parametrize("name", JOINT)
def test_the_comparison_notices_replicated_text_that_is_not_sent(ranks: Ranks, name: str) -> None:
    windows = [*EVERY_EXCHANGE, "attention.text"]
    ranks(2).run(without_an_exchange, name, REPLICATED_TEXT, windows, timeout_s=60)


def without_order(rank: int, world_size: int, name: str) -> None:
    """A mask that is left in the order of the model, where keys come in that of the ranks."""
    tiny = BY_NAME[name]
    model = tiny.make()
    inputs = tiny.call_with(SHARDED_TEXT)
    expected = output(model, inputs)
    with UlyssesCommunicator(timeout_s=20) as comm, parallelize(model, comm):
        with mock.patch.object(JointSequence, "arrange", lambda self, mask: mask):
            wrong = output(model, inputs)
        assert float((wrong - expected).abs().max()) > NOTICED, "BLIND"


@pytest.mark.parametrize("name", ["QwenImageTransformer2DModel", "HunyuanVideoTransformer3DModel"])
def test_the_comparison_notices_a_mask_out_of_order(ranks: Ranks, name: str) -> None:
    ranks(2).run(without_order, name, timeout_s=60)


# ---- inputs and projections in other forms -------------------------------------------------------


def time_of_every_row(rank: int, world_size: int, name: str) -> None:
    """Part of a video is given: its rows have a time of their own."""
    tiny = BY_NAME[name]
    model = tiny.make()
    inputs = tiny.call_with(SHARDED_TEXT)
    rows = 24
    times = torch.linspace(0, 900, 2 * rows).view(2, rows).round()
    inputs["timestep"] = times
    expected = output(model, inputs)
    inputs_of_one_time = {**inputs, "timestep": times[:, 0]}
    assert float((output(model, inputs_of_one_time) - expected).abs().max()) > NOTICED
    with UlyssesCommunicator(timeout_s=20) as comm, parallelize(model, comm):
        assert_near(output(model, inputs), expected)


@pytest.mark.parametrize("name", ["WanTransformer3DModel", "LTXVideoTransformer3DModel"])
def test_a_time_for_every_row(ranks: Ranks, name: str) -> None:
    ranks(2).run(time_of_every_row, name, timeout_s=60)


def fused_and_positional(rank: int, world_size: int, name: str) -> None:
    tiny = BY_NAME[name]
    model: Any = tiny.make()
    model.fuse_qkv_projections()
    inputs = tiny.call_with(SHARDED_TEXT)
    expected = output(model, inputs)
    with UlyssesCommunicator(timeout_s=20) as comm, parallelize(model, comm), torch.no_grad():
        with mock.patch.object(torch.nn.Linear, "forward", autospec=True) as forward:
            forward.side_effect = lambda self, x: torch.nn.functional.linear(
                x, self.weight, self.bias
            )
            got = model(inputs.pop("hidden_states"), **inputs)[0]
        used = {id(call.args[0]) for call in forward.call_args_list}
        layers = [layer for layer, _ in attention_layers(model)]
        assert all(id(layer.to_qkv) in used for layer in layers)
        assert all(id(layer.to_v) not in used for layer in layers)
    assert_near(got, expected)


def attention_layers(model: Any) -> list[tuple[Any, Any]]:
    """Those that attend between the ranks, and their processors."""
    return [
        (model.get_submodule(name.removesuffix(".processor")), processor)
        for name, processor in model.attn_processors.items()
        if type(processor).__module__.startswith("ulysses_ops")
    ]


@pytest.mark.parametrize("name", ["WanTransformer3DModel", "FluxTransformer2DModel"])
def test_fused_projections_and_an_input_by_place(ranks: Ranks, name: str) -> None:
    ranks(2).run(fused_and_positional, name, timeout_s=60)


# ---- how the exchanges are made ------------------------------------------------------------------


def order_and_meetings(rank: int, world_size: int, name: str, text_rows: int) -> list[str]:
    """What happens in a call after the first one, which is what a capture would see."""
    tiny = BY_NAME[name]
    model = tiny.make()
    inputs = tiny.call_with(text_rows)
    events: list[str] = []
    send = Exchange.send

    def noted(exchange: Exchange, x: Tensor, window: Any, **options: Any) -> None:
        events.append(f"send {window.spec.name}")
        send(exchange, x, window, **options)

    def replicated(comm: UlyssesCommunicator, x: Tensor) -> Tensor:
        events.append("replicate rows")
        return replicate_rows(comm, x)

    with UlyssesCommunicator(timeout_s=20) as comm, parallelize(model, comm):
        output(model, inputs)
        layer, _ = attention_layers(model)[0]
        for letter in "vkq":
            getattr(layer, f"to_{letter}").register_forward_hook(
                lambda *_, letter=letter: events.append(f"project {letter}")
            )
        with (
            mock.patch.object(Exchange, "send", noted),
            mock.patch("ulysses_ops.diffusers_attention.replicate_rows", replicated),
            mock.patch.object(Agreement, "exchange", side_effect=AssertionError("a meeting")),
        ):
            output(model, inputs)
    return events


@pytest.mark.parametrize("text_rows", [SHARDED_TEXT, REPLICATED_TEXT])
@pytest.mark.parametrize("name", NAMES)
def test_values_leave_before_keys_are_computed_and_ranks_meet_once(
    ranks: Ranks, name: str, text_rows: int
) -> None:
    first, second = ranks(2).run(order_and_meetings, name, text_rows, timeout_s=60)
    assert first == second
    expected = [f"{what}{letter}" for letter in "vkq" for what in ("project ", "send attention.")]
    expected.append("send attention.out")
    if name in JOINT and text_rows == REPLICATED_TEXT:
        expected.append("send attention.text")
    assert first[: len(expected)] == expected
    assert first[-1] == "replicate rows"


def with_gradients_enabled(rank: int, world_size: int, name: str, text_rows: int) -> None:
    """The functional operators carry the same numbers; and gradients."""
    tiny = BY_NAME[name]
    model = tiny.make()
    inputs = tiny.call_with(text_rows)
    with UlyssesCommunicator(timeout_s=20) as comm, parallelize(model, comm):
        expected = output(model, inputs)
        got = model(**inputs)[0]
        assert torch.equal(got, expected)
        got.square().sum().backward()
        gradient = next(model.parameters()).grad
        assert gradient is not None and bool(gradient.isfinite().all())


@pytest.mark.parametrize("text_rows", [SHARDED_TEXT, REPLICATED_TEXT])
@pytest.mark.parametrize("name", NAMES)
def test_functional_operators_give_the_same(ranks: Ranks, name: str, text_rows: int) -> None:
    ranks(2).run(with_gradients_enabled, name, text_rows, timeout_s=60)


def generation(rank: int, world_size: int, name: str) -> None:
    """Ten steps with a scheduler of diffusers: differences do not grow from step to step."""
    tiny = BY_NAME[name]
    model: Any = tiny.make()
    inputs = tiny.call_with(SHARDED_TEXT)
    unit = 1.0 if name == "WanTransformer3DModel" else 1e-3

    def velocity(latents: Tensor, time: Tensor) -> Tensor:
        return output(model, {**inputs, "hidden_states": latents, "timestep": time * unit})

    expected = denoise(velocity, inputs["hidden_states"], 10)
    with UlyssesCommunicator(timeout_s=20) as comm, parallelize(model, comm):
        got = denoise(velocity, inputs["hidden_states"], 10)
        with keeping("attention.k"):
            wrong = denoise(velocity, inputs["hidden_states"], 10)
    assert_near(got, expected)
    assert float((wrong - expected).abs().max()) > NOTICED, "BLIND"


@pytest.mark.parametrize("name", ["WanTransformer3DModel", "FluxTransformer2DModel"])
def test_a_whole_generation_is_that_of_one_rank(ranks: Ranks, name: str) -> None:
    ranks(2).run(generation, name, timeout_s=60)


def compiled_whole(rank: int, world_size: int, name: str, text_rows: int) -> None:
    tiny = BY_NAME[name]
    model: Any = tiny.make()
    inputs = [tiny.call_with(text_rows, seed=seed) for seed in (1, 2)]
    expected = [output(model, one) for one in inputs]
    with UlyssesCommunicator(timeout_s=20) as comm, parallelize(model, comm):
        torch._dynamo.reset()
        compiled: Any = torch.compile(model, fullgraph=True, backend="aot_eager")
        for one, right in zip(inputs, expected, strict=True):
            assert_near(output(compiled, one), right)
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("name", "text_rows"),
    [
        ("WanTransformer3DModel", SHARDED_TEXT),
        pytest.param("LTXVideoTransformer3DModel", SHARDED_TEXT, marks=pytest.mark.long),
        ("FluxTransformer2DModel", SHARDED_TEXT),
        ("FluxTransformer2DModel", REPLICATED_TEXT),
        ("QwenImageTransformer2DModel", REPLICATED_TEXT),
        pytest.param("HunyuanVideoTransformer3DModel", SHARDED_TEXT, marks=pytest.mark.long),
    ],
)
def test_compiled_without_a_graph_break(
    compiling_ranks: RankPool, name: str, text_rows: int
) -> None:
    compiling_ranks.run(compiled_whole, name, text_rows, timeout_s=150)


def two_groups(rank: int, world_size: int) -> None:
    """Each pair of ranks has a model and a communicator of its own, and asks no one else."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    tiny = BY_NAME["FluxTransformer2DModel"]
    if rank < 2:  # the other pair does something else meanwhile
        model = tiny.make()
        inputs = tiny.call_with(SHARDED_TEXT)
        expected = output(model, inputs)
        with UlyssesCommunicator(pairs[0], timeout_s=20) as comm, parallelize(model, comm):
            assert_near(output(model, inputs), expected)
    dist.barrier()


def test_other_groups_take_no_part(ranks: Ranks) -> None:
    ranks(4).run(two_groups, timeout_s=60)
