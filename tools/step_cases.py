"""Which model takes which step: resolutions, layers, and the shapes of its graphs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ulysses_ops.tools.models import MODELS, PublishedModel, Resolution, find_model, find_resolution
from ulysses_ops.tools.shapes import Shape

DEFAULT_MODELS = "flux,wan-14b"
NUM_SHAPES = 10
# A generation of a long video takes minutes; its loop runs all layers on few rows.
SHORT_VIDEO = Resolution(256, 256, 17)


@dataclass(frozen=True)
class StepCase:
    """One model.

    Attributes:
        model: Its sizes.
        layers: Layers of the first kind that run; all of them when ``None``.
        resolution: Of the step that is timed.
        loop_resolution: Of whole generations.
        loop_branches: Branches of guidance in them.
        resolutions: Of the graphs that are held together, from large to small.
    """

    model: PublishedModel
    layers: int | None
    resolution: Resolution
    loop_resolution: Resolution
    loop_branches: int
    resolutions: tuple[Resolution, ...]

    @property
    def num_layers(self) -> int:
        """Layers that run, of all kinds."""
        if self.layers is None:
            return self.published_layers
        first = next(iter(self.model.layers.values()))
        return sum(count * self.layers // first for count in self.model.layers.values())

    @property
    def published_layers(self) -> int:
        """Layers that the model has."""
        return sum(self.model.layers.values())

    def shape(self, resolution: Resolution) -> Shape:
        """Q of a layer at a resolution; joint text is part of the sequence."""
        model = self.model
        rows = resolution.rows + (model.text_rows if model.has_joint_text else 0)
        title = f"{model.title} {described(resolution)}"
        return Shape(model.key, title, rows, model.heads, int(model.config["attention_head_dim"]))


def described(resolution: Resolution) -> str:
    """Width, height and frames, in words."""
    size = f"{resolution.width}x{resolution.height}"
    return size if resolution.frames == 1 else f"{size}, {resolution.frames} frames"


def parse_size(text: str) -> Resolution:
    """The resolution of ``"<width>x<height>"``, or of ``"<width>x<height>x<frames>"``.

    Raises:
        ValueError: it is none that the models can take.
    """
    numbers = [int(part) if part.isdecimal() else 0 for part in text.split("x")]
    width, height, frames = (*numbers, 1, 1, 1)[:3]
    is_whole = len(numbers) in (2, 3) and min(numbers) > 0
    if not is_whole or width % 16 or height % 16 or frames % 4 != 1:
        message = (
            f"size: '{text}' must be width x height, both divisible by 16, and for a video x "
            f"frames, 1 more than a multiple of 4; such as 1024x1024 or 832x480x81"
        )
        raise ValueError(message)
    return Resolution(height, width, frames)


def case_of(name: str, layers: int | None = None, size: str = "") -> StepCase:
    """The case of a published model.

    Args:
        name: Of the model.
        layers: Layers of the first kind; all of them when ``None``.
        size: Of the step that is timed; that of the model when empty.

    Raises:
        ValueError: there is no such model, or no such size.
    """
    model = find_model(name)
    whole = find_resolution(model.resolution)
    timed = parse_size(size) if size else whole
    if timed.frames > 1 and not model.is_video:
        message = (
            f"size: '{size}' has {timed.frames} frames, and {name} makes images; leave them out"
        )
        raise ValueError(message)
    if model.is_video:
        ten = [replace(whole, frames=whole.frames - 4 * n) for n in range(NUM_SHAPES)]
        return StepCase(model, layers, timed, SHORT_VIDEO, 2, tuple(ten))
    ten = [replace(whole, height=whole.height - 64 * n) for n in range(NUM_SHAPES)]
    return StepCase(model, layers, timed, whole, 1, tuple(ten))


def select_cases(names: str, layers: int | None = None, size: str = "") -> tuple[StepCase, ...]:
    """The cases of models named in a comma-separated list.

    Raises:
        ValueError: a name is unknown, none is given, or there is no such size.
    """
    return tuple(case_of(name.strip(), layers, size) for name in names.split(","))


def _tiny(name: str, changes: Mapping[str, object], layers: Mapping[str, int]) -> StepCase:
    model = MODELS[name]
    small = replace(
        model,
        key=f"tiny-{name}",
        title=f"tiny {model.title}",
        config={**model.config, "num_attention_heads": 4, "attention_head_dim": 32, **changes},
        layers=layers,
        text_rows=16,
    )
    if small.is_video:
        sizes = [Resolution(64, 64, 4 * n + 1) for n in (2, 1)]
        return StepCase(small, None, sizes[0], sizes[1], 2, tuple(sizes))
    sizes = [Resolution(32 * n, 64) for n in (4, 2)]
    return StepCase(small, None, sizes[0], sizes[1], 1, tuple(sizes))


# The same classes with few, narrow layers: what CPU ranks and tests run.
TINY_CASES = (
    _tiny("wan-14b", {"text_dim": 16, "freq_dim": 16, "ffn_dim": 64}, {"num_layers": 2}),
    _tiny(
        "flux",
        {"joint_attention_dim": 16, "pooled_projection_dim": 16, "axes_dims_rope": (8, 12, 12)},
        {"num_layers": 1, "num_single_layers": 2},
    ),
)
