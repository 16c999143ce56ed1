"""Transformers of ``diffusers`` at their published sizes, with random weights, and their inputs.

Sizes are those of ``transformer/config.json`` of Wan2.1-T2V-14B, Wan2.1-T2V-1.3B, FLUX.1-dev and
Qwen-Image. Every rank builds the same weights. ``diffusers`` is imported where it is used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

PIXELS_PER_LATENT = 8
FRAMES_PER_LATENT = 4
PATCH = 2
# With weights of 1, random queries and keys attend to all keys alike, and the mean of many values
# hides errors. With 2 some keys are preferred, as in a trained model.
QK_NORM_WEIGHT = 2.0
QK_NORMS = ("norm_q", "norm_k", "norm_added_q", "norm_added_k")


@dataclass(frozen=True)
class Resolution:
    """What is generated, in pixels and frames.

    Attributes:
        height: Divisible by 16.
        width: Divisible by 16.
        frames: 1 more than a multiple of 4; 1 for an image.
    """

    height: int
    width: int
    frames: int = 1

    @property
    def latents(self) -> tuple[int, int, int]:
        """Frames, height and width of the latents."""
        frames = (self.frames - 1) // FRAMES_PER_LATENT + 1
        return (frames, self.height // PIXELS_PER_LATENT, self.width // PIXELS_PER_LATENT)

    @property
    def rows(self) -> int:
        """Image rows of the sequence: patches of 1 x 2 x 2 latents."""
        frames, height, width = self.latents
        return frames * (height // PATCH) * (width // PATCH)


RESOLUTIONS: Mapping[str, Resolution] = {
    "480p": Resolution(480, 832, 81),
    "720p": Resolution(720, 1280, 81),
    "1024": Resolution(1024, 1024),
}


@dataclass(frozen=True)
class PublishedModel:
    """One model.

    Attributes:
        key: Short name on the command line.
        title: Name in tables.
        class_name: Class in ``diffusers``.
        config: What the class is made with.
        layers: Published number of layers: arguments of the class and their values. Fewer layers
            keep their proportion.
        text_rows: Rows of text: the length that pipelines pad to, or one of a long prompt.
        resolution: Key of the resolution it is measured at, when none is given.
    """

    key: str
    title: str
    class_name: str
    config: Mapping[str, Any]
    layers: Mapping[str, int]
    text_rows: int
    resolution: str

    @property
    def heads(self) -> int:
        """H."""
        return int(self.config["num_attention_heads"])

    @property
    def is_video(self) -> bool:
        """Whether it takes latents of frames, or rows of packed patches."""
        return self.class_name == "WanTransformer3DModel"

    @property
    def has_joint_text(self) -> bool:
        """Whether text rows are part of the sequence that attends."""
        return not self.is_video


def _wan(key: str, title: str, heads: int, ffn_dim: int, layers: int) -> PublishedModel:
    config = {
        "patch_size": (1, 2, 2),
        "num_attention_heads": heads,
        "attention_head_dim": 128,
        "in_channels": 16,
        "out_channels": 16,
        "text_dim": 4096,
        "freq_dim": 256,
        "ffn_dim": ffn_dim,
        "cross_attn_norm": True,
        "eps": 1e-6,
    }
    return PublishedModel(
        key, title, "WanTransformer3DModel", config, {"num_layers": layers}, 512, "480p"
    )


MODELS: Mapping[str, PublishedModel] = {
    model.key: model
    for model in (
        _wan("wan-14b", "Wan 2.1 14B", 40, 13824, 40),
        _wan("wan-1.3b", "Wan 2.1 1.3B", 12, 8960, 30),
        PublishedModel(
            "flux",
            "FLUX.1-dev",
            "FluxTransformer2DModel",
            {
                "in_channels": 64,
                "attention_head_dim": 128,
                "num_attention_heads": 24,
                "joint_attention_dim": 4096,
                "pooled_projection_dim": 768,
                "guidance_embeds": True,
                "axes_dims_rope": (16, 56, 56),
            },
            {"num_layers": 19, "num_single_layers": 38},
            512,
            "1024",
        ),
        PublishedModel(
            "qwen-image",
            "Qwen-Image",
            "QwenImageTransformer2DModel",
            {
                "in_channels": 64,
                "out_channels": 16,
                "attention_head_dim": 128,
                "num_attention_heads": 24,
                "joint_attention_dim": 3584,
                "axes_dims_rope": (16, 56, 56),
            },
            {"num_layers": 60},
            256,
            "1024",
        ),
    )
}


def find_model(name: str | PublishedModel) -> PublishedModel:
    """The model of this key, or the one given.

    Raises:
        ValueError: there is none.
    """
    if isinstance(name, PublishedModel):
        return name
    if name not in MODELS:
        message = f"models: {name!r} is unknown; choose from {list(MODELS)}"
        raise ValueError(message)
    return MODELS[name]


def build(
    name: str | PublishedModel,
    *,
    layers: int | None = None,
    device: torch.device | str = "cuda",
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> nn.Module:
    """A model with random weights, for inference, the same ones on every rank.

    Args:
        name: Key in ``MODELS``, or any model of these classes.
        layers: Layers of the first kind; of others in the published proportion (FLUX: 2 single
            stream layers for each double stream layer). All of them when left out.
        device: Where it is made; ``"meta"`` for its shape alone.
        dtype: Of the weights; what ``diffusers`` keeps in float32 when it loads is float32.
        seed: Of the weights.

    Raises:
        ValueError: the name is unknown, or ``layers`` is below 1.
    """
    published = find_model(name)
    if layers is not None and layers < 1:
        message = f"build: layers={layers} must be at least 1"
        raise ValueError(message)
    import diffusers

    counts = dict(published.layers)
    if layers is not None:
        first = next(iter(counts.values()))
        counts = {argument: count * layers // first for argument, count in counts.items()}
    device = torch.device(device)
    cuda = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda), _default_dtype(dtype), device:
        torch.manual_seed(seed)
        model: nn.Module = getattr(diffusers, published.class_name)(**published.config, **counts)
    kept = getattr(model, "_keep_in_fp32_modules", None) or []
    for place, parameter in model.named_parameters():
        parts = place.split(".")
        if any(part in kept for part in parts):
            parameter.data = parameter.data.float()
        if parts[-2:] in ([norm, "weight"] for norm in QK_NORMS):
            parameter.data.fill_(QK_NORM_WEIGHT)
    return model.eval().requires_grad_(False)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def inputs(
    name: str | PublishedModel,
    *,
    resolution: str | Resolution | None = None,
    text_rows: int | None = None,
    batch: int = 1,
    device: torch.device | str = "cuda",
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> dict[str, Any]:
    """Whole random inputs of one call, the same on every rank, as a pipeline would give them.

    Args:
        name: Key in ``MODELS``, or any model of these classes.
        resolution: Key in ``RESOLUTIONS``, or any; the model's usual one when left out.
        text_rows: Rows of text; the model's usual number when left out.
        batch: B.
        device: Where they are made.
        dtype: Of latents and text.
        seed: Of their values, which are made on the CPU: equal on every device.

    Returns:
        Keyword arguments of the model, ``return_dict=False`` among them: ``model(**inputs)[0]``.

    Raises:
        ValueError: a name is unknown.
    """
    published = find_model(name)
    found = find_resolution(published.resolution if resolution is None else resolution)
    count = published.text_rows if text_rows is None else text_rows
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    time = torch.rand(batch, generator=generator).to(device)
    text_dim = published.config["text_dim" if published.is_video else "joint_attention_dim"]
    text = normal(batch, count, text_dim)
    common = {"encoder_hidden_states": text, "return_dict": False}
    if published.is_video:
        latents = normal(batch, published.config["in_channels"], *found.latents)
        return {"hidden_states": latents, "timestep": time * 1000, **common}
    frames, height, width = found.latents
    image = normal(batch, found.rows, published.config["in_channels"])
    common = {"hidden_states": image, "timestep": time.to(dtype), **common}
    if published.class_name == "QwenImageTransformer2DModel":
        return {**common, "img_shapes": [[(frames, height // PATCH, width // PATCH)]] * batch}
    place = torch.arange(found.rows, device=device)
    columns = width // PATCH
    ids = torch.stack([torch.zeros_like(place), place // columns, place % columns], dim=1)
    return {
        **common,
        "pooled_projections": normal(batch, published.config["pooled_projection_dim"]),
        "guidance": torch.full((batch,), 3.5, device=device),
        "img_ids": ids.to(dtype),
        "txt_ids": torch.zeros(count, 3, device=device, dtype=dtype),
    }


def find_resolution(resolution: str | Resolution) -> Resolution:
    """The resolution of this key, or the one given.

    Raises:
        ValueError: there is none.
    """
    if isinstance(resolution, Resolution):
        return resolution
    if resolution not in RESOLUTIONS:
        message = f"models: resolution {resolution!r} is unknown; choose from {list(RESOLUTIONS)}"
        raise ValueError(message)
    return RESOLUTIONS[resolution]
