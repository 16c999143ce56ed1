"""What parallelize refuses, alike on every rank; and that it can be undone."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from rank_pool import RankPool
from tiny_models import BY_NAME, TINY_MODELS, assert_near, output
from torch import nn

from ulysses_ops import UlyssesCommunicator, UlyssesError, collective
from ulysses_ops.diffusers_models import parallelize

pytest.importorskip("diffusers", reason="diffusers is not installed: pip install -e .[diffusers]")

ROOT = Path(__file__).resolve().parents[2]
Ranks = Callable[[int], RankPool]
FLUX = BY_NAME["FluxTransformer2DModel"]


def test_importing_the_module_imports_no_diffusers() -> None:
    script = (
        "import sys, ulysses_ops.diffusers_models\n"
        "assert not any(name.split('.')[0] == 'diffusers' for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120, cwd=ROOT)


# ---- undone --------------------------------------------------------------------------------------


def undone(rank: int, world_size: int, name: str) -> None:
    tiny = BY_NAME[name]
    model: Any = tiny.make()
    model.set_attention_backend("native")
    inputs = tiny.call_with(8)
    processors, expected = model.attn_processors, output(model, inputs)
    backend = list(processors.values())[-1]._attention_backend
    assert backend is not None
    with UlyssesCommunicator(timeout_s=20) as comm:
        for _ in range(2):
            parallel = parallelize(model, comm)
            assert_near(output(model, inputs), expected)
            changed = [
                processor
                for place, processor in model.attn_processors.items()
                if processor is not processors[place]
            ]
            assert changed
            assert all(processor._attention_backend == backend for processor in changed)
            parallel.close()
            parallel.close()
            assert model.attn_processors == processors
            assert torch.equal(output(model, inputs), expected)
        parallel = parallelize(model, comm)
    with pytest.raises(UlyssesError, match="is closed; construct a new one"):
        output(model, inputs)
    parallel.close()
    assert torch.equal(output(model, inputs), expected)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("name", [model.name for model in TINY_MODELS])
def test_close_gives_the_model_back(ranks: Ranks, name: str) -> None:
    ranks(2).run(undone, name, timeout_s=60)


# ---- refused by parallelize ----------------------------------------------------------------------


def plain_layer(rank: int) -> nn.Module:
    return nn.Linear(2, 2)


def three_heads(rank: int) -> nn.Module:
    return FLUX.make(num_attention_heads=3)


def other_processor(rank: int) -> nn.Module:
    from diffusers.models.transformers.transformer_flux import FluxIPAdapterAttnProcessor

    model: Any = FLUX.make()
    model.set_attn_processor(FluxIPAdapterAttnProcessor(16, 16))
    return FLUX.make() if rank == 0 else model


def token_replace(rank: int) -> nn.Module:
    return BY_NAME["HunyuanVideoTransformer3DModel"].make(image_condition_type="token_replace")


def another_depth(rank: int) -> nn.Module:
    return FLUX.make(num_layers=1 + rank)


def refused(rank: int, world_size: int, make: Callable[[int], nn.Module]) -> str:
    with UlyssesCommunicator(timeout_s=20) as comm:
        with pytest.raises(ValueError, match=r"^parallelize: ") as error:
            parallelize(make(rank), comm)
        works_afterwards(comm)
    return str(error.value)


def works_afterwards(comm: UlyssesCommunicator) -> None:
    model, inputs = FLUX.make(), FLUX.call_with(8)
    expected = output(model, inputs)
    with parallelize(model, comm):
        assert_near(output(model, inputs), expected)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (plain_layer, "a Linear is not supported; pass one of WanTransformer3DModel, LTXVideo"),
        (three_heads, "num_attention_heads=3 of FluxTransformer2DModel must be divisible by world"),
        (other_processor, "rank 1: ValueError: transformer_blocks.0.attn.processor is a FluxIPAd"),
        (token_replace, "image_condition_type='token_replace' is not supported"),
        (another_depth, "models differ between ranks: ranks [0]: {"),
    ],
)
def test_models_that_are_refused(ranks: Ranks, make: Callable[[int], nn.Module], said: str) -> None:
    first, second = ranks(2).run(refused, make, timeout_s=60)
    assert first == second
    assert said in first


def other_versions(rank: int, world_size: int) -> list[str]:
    import diffusers

    texts = []
    model = FLUX.make()
    with UlyssesCommunicator(timeout_s=20) as comm:
        # one rank alone has it: all of them hear of it
        with (
            mock.patch.object(diffusers, "__version__", "0.41.0" if rank else "0.42.1"),
            pytest.raises(ValueError, match=r"^parallelize: ") as error,
        ):
            parallelize(model, comm)
        texts.append(str(error.value))
        with (
            mock.patch.dict(sys.modules, {"diffusers": None}),
            pytest.raises(ValueError, match=r"^parallelize: ") as error,
        ):
            parallelize(model, comm)
        texts.append(str(error.value))
        works_afterwards(comm)
    return texts


def test_other_versions_are_refused(ranks: Ranks) -> None:
    first, second = ranks(2).run(other_versions, timeout_s=60)
    assert first == second
    version, missing = first
    assert "rank 1: ValueError: diffusers 0.41.0 is not supported; install one of 0.42.1" in version
    assert "rank 0" not in version
    assert "diffusers cannot be imported" in missing
    assert "install diffusers==0.42.1" in missing


def twice(rank: int, world_size: int) -> str:
    model, inputs = FLUX.make(), FLUX.call_with(8)
    expected = output(model, inputs)
    with UlyssesCommunicator(timeout_s=20) as comm, parallelize(model, comm):
        with pytest.raises(ValueError, match=r"^parallelize: ") as error:
            parallelize(model, comm)
        assert_near(output(model, inputs), expected)
    with pytest.raises(UlyssesError, match=r"^parallelize: .* is closed"):
        parallelize(model, comm)
    return str(error.value)


def test_a_model_that_is_parallel_already(ranks: Ranks) -> None:
    for text in ranks(2).run(twice, timeout_s=60):
        assert "this FluxTransformer2DModel is parallel already; close() what" in text


# ---- refused by calls of the model ---------------------------------------------------------------


def wrong_calls(rank: int, world_size: int, name: str) -> list[str]:
    """Each is refused before any rank waits, and a right call works after it."""
    tiny = BY_NAME[name]
    model: Any = tiny.make()
    inputs = tiny.call_with(8)
    expected = output(model, inputs)
    odd = {**inputs, "hidden_states": odd_rows(inputs["hidden_states"])}
    texts = []
    with UlyssesCommunicator(timeout_s=20) as comm, parallelize(model, comm):
        wrong: list[tuple[type[Exception], Callable[[], Any]]] = [
            (ValueError, lambda: output(model, odd)),
            (UlyssesError, lambda: model.forward(**tiny.call_with(8))),
        ]
        if "Flux" in name or "Qwen" in name:
            residuals = {**inputs, "controlnet_block_samples": [inputs["hidden_states"]]}
            wrong.append((ValueError, lambda: output(model, residuals)))
        if "Flux" in name:
            masked = {**inputs, "joint_attention_kwargs": {"attention_mask": torch.ones(2, 32)}}
            wrong.append((ValueError, lambda: output(model, masked)))
        for kind, call in wrong:
            with (
                mock.patch.object(collective, "all_to_all", side_effect=KeyError),
                pytest.raises(kind) as error,
            ):
                call()
            texts.append(str(error.value))
            assert_near(output(model, inputs), expected)
    return texts


def odd_rows(hidden_states: torch.Tensor) -> torch.Tensor:
    """25 rows, or 5 x 1 x 1 patches."""
    if hidden_states.dim() == 3:
        return torch.cat([hidden_states, hidden_states[:, :1]], dim=1)
    return hidden_states[:, :, :5, :2, :2]


@pytest.mark.parametrize("name", [model.name for model in TINY_MODELS])
def test_calls_that_are_refused(ranks: Ranks, name: str) -> None:
    first, second = ranks(2).run(wrong_calls, name, timeout_s=60)
    assert first == second
    rows = 25 if name[:4] in ("Flux", "Qwen", "LTXV") else 5
    assert first[0].startswith(f"{name}: the {rows} image rows of hidden_states [2, ")
    assert "must be divisible by world_size=2; choose another resolution" in first[0]
    assert "call the model itself, neither its forward" in first[1]
    assert all("controlnet_block_samples cannot be sharded" in text for text in first[2:3])
    assert all("an attention_mask over sharded rows" in text for text in first[3:4])


def processor_set_later(rank: int, world_size: int) -> None:
    """It would attend to the rows of one rank, and give a wrong picture without an error."""
    model: Any = FLUX.make()
    inputs = FLUX.call_with(8)
    expected, stock = output(model, inputs), next(iter(model.attn_processors.values()))
    with UlyssesCommunicator(timeout_s=20) as comm, parallelize(model, comm) as parallel:
        model.single_transformer_blocks[0].attn.set_processor(stock)
        with pytest.raises(UlyssesError, match="an attention processor was set after parallelize"):
            output(model, inputs)
        with mock.patch.object(parallel, "_check_processors"):
            wrong = output(model, inputs)
        assert float((wrong - expected).abs().max()) > 1e-3, "BLIND"
    assert model.single_transformer_blocks[0].attn.processor is stock
    assert torch.equal(output(model, inputs), expected)


def test_a_processor_set_later_is_noticed(ranks: Ranks) -> None:
    ranks(2).run(processor_set_later, timeout_s=60)
