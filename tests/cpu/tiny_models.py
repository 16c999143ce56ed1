"""The real classes of diffusers, tiny and with random weights, and inputs for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

HEADS = 4
TEXT_WIDTH = 16


@dataclass(frozen=True)
class TinyModel:
    """One model class.

    Attributes:
        name: Class name.
        config: What the class is made with.
        inputs: ``(generator, text_rows, image_rows) -> inputs``; image rows are a multiple of 4.
    """

    name: str
    config: dict[str, Any]
    inputs: Callable[[torch.Generator, int, int], dict[str, Any]]

    def make(self, **changes: Any) -> nn.Module:
        """The same weights every time."""
        import diffusers

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model: nn.Module = getattr(diffusers, self.name)(**{**self.config, **changes})
        return model.eval()

    def call_with(self, text_rows: int, image_rows: int = 24, seed: int = 1) -> dict[str, Any]:
        """Whole inputs, the same on every rank."""
        generator = torch.Generator().manual_seed(seed)
        return {**self.inputs(generator, text_rows, image_rows), "return_dict": False}


def output(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    """What the model makes of them, a tensor of the caller's own."""
    with torch.no_grad():
        result: Tensor = model(**inputs)[0]
    return result


def assert_near(got: Tensor, expected: Tensor) -> None:
    """Equal but for float32 sums of another order; outputs are of order 1."""
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=3e-6)


def _video(generator: torch.Generator, image_rows: int) -> Tensor:
    """Patches of 1 x 2 x 2: two rows of patches."""
    return torch.randn(2, 4, image_rows // 4, 4, 4, generator=generator)


def _wan_inputs(generator: torch.Generator, text_rows: int, image_rows: int) -> dict[str, Any]:
    return {
        "hidden_states": _video(generator, image_rows),
        "timestep": torch.tensor([17.0, 400.0]),
        "encoder_hidden_states": torch.randn(2, text_rows, TEXT_WIDTH, generator=generator),
    }


def _ltx_inputs(generator: torch.Generator, text_rows: int, image_rows: int) -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(2, image_rows, 8, generator=generator),
        "encoder_hidden_states": torch.randn(2, text_rows, TEXT_WIDTH, generator=generator),
        "timestep": torch.tensor([17.0, 400.0]),
        "encoder_attention_mask": _text_mask(text_rows),
        "num_frames": image_rows // 4,
        "height": 2,
        "width": 2,
    }


def _flux_inputs(generator: torch.Generator, text_rows: int, image_rows: int) -> dict[str, Any]:
    ids = torch.arange(image_rows)
    return {
        "hidden_states": torch.randn(2, image_rows, 8, generator=generator),
        "encoder_hidden_states": torch.randn(2, text_rows, TEXT_WIDTH, generator=generator),
        "pooled_projections": torch.randn(2, TEXT_WIDTH, generator=generator),
        "timestep": torch.tensor([0.3, 0.7]),
        "img_ids": torch.stack([torch.zeros_like(ids), ids // 4, ids % 4], dim=1).float(),
        "txt_ids": torch.zeros(text_rows, 3),
        "guidance": torch.tensor([3.5, 3.5]),
    }


def _qwen_inputs(generator: torch.Generator, text_rows: int, image_rows: int) -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(2, image_rows, 8, generator=generator),
        "encoder_hidden_states": torch.randn(2, text_rows, TEXT_WIDTH, generator=generator),
        "encoder_hidden_states_mask": _text_mask(text_rows).bool(),
        "timestep": torch.tensor([0.3, 0.7]),
        "img_shapes": [[(1, image_rows // 4, 4)]] * 2,
    }


def _hunyuan_inputs(generator: torch.Generator, text_rows: int, image_rows: int) -> dict[str, Any]:
    return {
        "hidden_states": _video(generator, image_rows),
        "timestep": torch.tensor([17, 400]),
        "encoder_hidden_states": torch.randn(2, text_rows, TEXT_WIDTH, generator=generator),
        "encoder_attention_mask": _text_mask(text_rows),
        "pooled_projections": torch.randn(2, TEXT_WIDTH, generator=generator),
        "guidance": torch.tensor([3500.0, 3500.0]),
    }


def _text_mask(text_rows: int) -> Tensor:
    """Padding behind the text, another length for each of the two samples."""
    lengths = torch.tensor([[max(text_rows - 5, 1)], [max(text_rows - 1, 1)]])
    return (torch.arange(text_rows) < lengths).long()


TINY_MODELS = (
    TinyModel(
        "WanTransformer3DModel",
        {
            "num_attention_heads": HEADS,
            "attention_head_dim": 12,
            "in_channels": 4,
            "out_channels": 4,
            "text_dim": TEXT_WIDTH,
            "freq_dim": 16,
            "ffn_dim": 32,
            "num_layers": 2,
        },
        _wan_inputs,
    ),
    TinyModel(
        "LTXVideoTransformer3DModel",
        {
            "in_channels": 8,
            "out_channels": 8,
            "num_attention_heads": HEADS,
            "attention_head_dim": 8,
            "cross_attention_dim": HEADS * 8,
            "num_layers": 2,
            "caption_channels": TEXT_WIDTH,
        },
        _ltx_inputs,
    ),
    TinyModel(
        "FluxTransformer2DModel",
        {
            "in_channels": 8,
            "num_layers": 1,
            "num_single_layers": 2,
            "attention_head_dim": 16,
            "num_attention_heads": HEADS,
            "joint_attention_dim": TEXT_WIDTH,
            "pooled_projection_dim": TEXT_WIDTH,
            "guidance_embeds": True,
            "axes_dims_rope": (4, 6, 6),
        },
        _flux_inputs,
    ),
    TinyModel(
        "QwenImageTransformer2DModel",
        {
            "in_channels": 8,
            "out_channels": 2,
            "num_layers": 2,
            "attention_head_dim": 16,
            "num_attention_heads": HEADS,
            "joint_attention_dim": TEXT_WIDTH,
            "axes_dims_rope": (4, 6, 6),
        },
        _qwen_inputs,
    ),
    TinyModel(
        "HunyuanVideoTransformer3DModel",
        {
            "in_channels": 4,
            "out_channels": 4,
            "num_attention_heads": HEADS,
            "attention_head_dim": 16,
            "num_layers": 1,
            "num_single_layers": 2,
            "num_refiner_layers": 1,
            "mlp_ratio": 2.0,
            "text_embed_dim": TEXT_WIDTH,
            "pooled_projection_dim": TEXT_WIDTH,
            "rope_axes_dim": (4, 6, 6),
        },
        _hunyuan_inputs,
    ),
)
BY_NAME = {model.name: model for model in TINY_MODELS}
