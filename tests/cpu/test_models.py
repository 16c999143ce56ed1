"""Published transformers: their sizes, their inputs, and that both fit together."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ulysses_ops.tools.models import MODELS, RESOLUTIONS, Resolution, build, inputs

pytest.importorskip("diffusers", reason="diffusers is not installed: pip install -e .[diffusers]")

# As published, counted in the checkpoints.
PARAMETERS = {
    "wan-14b": 14_288_491_584,
    "wan-1.3b": 1_418_996_800,
    "flux": 11_901_408_320,
    "qwen-image": 20_430_401_088,
}


@pytest.mark.parametrize("name", MODELS)
def test_whole_models_have_the_published_number_of_parameters(name: str) -> None:
    model = build(name, device="meta")
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[name]
    in_float32 = {
        place for place, parameter in model.named_parameters() if parameter.dtype == torch.float32
    }
    assert bool(in_float32) == name.startswith("wan")
    assert all(not parameter.requires_grad for parameter in model.parameters())


def test_resolutions_have_the_rows_of_the_published_models() -> None:
    rows = {key: resolution.rows for key, resolution in RESOLUTIONS.items()}
    assert rows == {"480p": 32760, "720p": 75600, "1024": 4096}


def test_layers_keep_their_proportion() -> None:
    model: Any = build("flux", layers=2, device="meta")
    assert (len(model.transformer_blocks), len(model.single_transformer_blocks)) == (2, 4)


@pytest.mark.parametrize("name", MODELS)
def test_inputs_fit_the_model(name: str) -> None:
    """On the meta device: shapes alone."""
    model: Any = build(name, layers=1, device="meta", dtype=torch.float32)
    given = inputs(name, resolution=Resolution(64, 96), text_rows=5, batch=2, device="meta")
    given = {
        key: value.float() if isinstance(value, torch.Tensor) else value
        for key, value in given.items()
    }
    out = model(**given)[0]
    assert out.shape == given["hidden_states"].shape


def test_a_model_runs_and_its_seeds_count() -> None:
    options: dict[str, Any] = {"device": "cpu", "dtype": torch.bfloat16}
    small: dict[str, Any] = {"resolution": Resolution(32, 48, 5), "text_rows": 4, **options}
    before = torch.get_default_dtype(), torch.random.get_rng_state()
    first, same, other = (build("wan-1.3b", layers=1, seed=seed, **options) for seed in (0, 0, 1))
    assert torch.get_default_dtype() == before[0]
    assert torch.equal(torch.random.get_rng_state(), before[1])
    given, another = (inputs("wan-1.3b", seed=seed, **small) for seed in (0, 1))
    with torch.no_grad():
        out = first(**given)[0]
        assert bool(out.isfinite().all())
        assert out.dtype == torch.bfloat16
        assert torch.equal(same(**given)[0], out)
        assert not torch.equal(other(**given)[0], out)
        assert not torch.equal(first(**another)[0], out)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="'wan' is unknown; choose from"):
        build("wan")
    with pytest.raises(ValueError, match="'4k' is unknown; choose from"):
        inputs("flux", resolution="4k", device="cpu")
    with pytest.raises(ValueError, match="layers=0 must be at least 1"):
        build("flux", layers=0, device="meta")
