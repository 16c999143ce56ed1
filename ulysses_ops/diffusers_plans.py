"""What is known of each model class of ``diffusers``, how it is cut, and what is refused.

Pinned to the versions that it was tested with. Image rows are cut by the public hooks of
``diffusers``, with plans of our own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .communicator import UlyssesCommunicator
from .diffusers_attention import Processor
from .diffusers_processors import (
    FluxProcessor,
    HunyuanVideoProcessor,
    LTXProcessor,
    QwenImageProcessor,
    WanProcessor,
)

VERSIONS = ("0.42.1",)


@dataclass(frozen=True)
class Family:
    """How the models of one class are cut.

    Attributes:
        processor: The processor that takes the place of the stock one.
        stock: Class name of the stock processor.
        plan: Module -> {name of an input, or number of an output, that holds image rows: their
            dimension}.
        rows: ``(config, hidden_states) -> S_global`` of the image rows.
        entry: Module whose inputs are the whole text rows, and are not needed whole inside it.
        text_inputs: Names of those inputs; none where text is attended to by cross attention,
            whose keys and values every rank computes.
    """

    processor: type[Processor]
    stock: str
    plan: Mapping[str, Mapping[str | int, int]]
    rows: Callable[[Any, Tensor], int]
    entry: str
    text_inputs: tuple[str, ...] = ()


def _rows_given(config: Any, hidden_states: Tensor) -> int:
    return hidden_states.shape[1]


def _rows_of_patches(config: Any, hidden_states: Tensor) -> int:
    """Rows of ``(B, C, frames, height, width)``; patch sizes as the two video models give them."""
    patch = config.patch_size
    if isinstance(patch, int):
        patch = (config.patch_size_t, patch, patch)
    frames, height, width = hidden_states.shape[2:]
    return int((frames // patch[0]) * (height // patch[1]) * (width // patch[2]))


FAMILIES: Mapping[str, Family] = {
    "WanTransformer3DModel": Family(
        WanProcessor,
        "WanAttnProcessor",
        {"rope": {0: 1, 1: 1}, "blocks.0": {"hidden_states": 1}},
        _rows_of_patches,
        "blocks.0",
    ),
    "LTXVideoTransformer3DModel": Family(
        LTXProcessor,
        "LTXVideoAttnProcessor",
        {"": {"hidden_states": 1}, "rope": {0: 1, 1: 1}},
        _rows_given,
        "",
    ),
    "FluxTransformer2DModel": Family(
        FluxProcessor,
        "FluxAttnProcessor",
        {"": {"hidden_states": 1, "img_ids": -2}},
        _rows_given,
        "",
        ("encoder_hidden_states", "txt_ids"),
    ),
    "QwenImageTransformer2DModel": Family(
        QwenImageProcessor,
        "QwenDoubleStreamAttnProcessor2_0",
        {
            "pos_embed": {0: 0},
            "transformer_blocks.0": {"hidden_states": 1},
            "transformer_blocks.*": {"modulate_index": 1},
        },
        _rows_given,
        "transformer_blocks.0",
        ("encoder_hidden_states",),
    ),
    "HunyuanVideoTransformer3DModel": Family(
        HunyuanVideoProcessor,
        "HunyuanVideoAttnProcessor2_0",
        {"rope": {0: 0, 1: 0}, "transformer_blocks.0": {"hidden_states": 1}},
        _rows_of_patches,
        "transformer_blocks.0",
        ("encoder_hidden_states",),
    ),
}
# Residuals for every image row, which nobody cuts.
REFUSED_INPUTS = ("controlnet_block_samples", "controlnet_single_block_samples")


# ---- checks --------------------------------------------------------------------------------------


def is_sharded(name: str) -> bool:
    """Whether this attention has the rows of the sequence as its keys: not text, not cross."""
    in_block = name.startswith(("blocks.", "transformer_blocks.", "single_transformer_blocks."))
    return in_block and not name.endswith(".attn2.processor")


def family_of(model: Any, comm: UlyssesCommunicator) -> Family:
    """How to cut this model between these ranks; local.

    Raises:
        ValueError: it cannot be.
    """
    try:
        import diffusers
    except ImportError as error:
        message = f"diffusers cannot be imported ({error}); install diffusers=={VERSIONS[-1]}"
        raise ValueError(message) from error
    if diffusers.__version__ not in VERSIONS:
        message = (
            f"diffusers {diffusers.__version__} is not supported; "
            f"install one of {', '.join(VERSIONS)}"
        )
        raise ValueError(message)
    name = type(model).__name__
    if name not in FAMILIES:
        message = f"a {name} is not supported; pass one of {', '.join(FAMILIES)}"
        raise ValueError(message)
    family = FAMILIES[name]
    heads = model.config.num_attention_heads
    if heads % comm.world_size != 0:
        message = (
            f"num_attention_heads={heads} of {name} must be divisible by "
            f"world_size={comm.world_size}; use fewer ranks"
        )
        raise ValueError(message)
    if model.config.get("image_condition_type") == "token_replace":
        message = (
            f"{name} with image_condition_type='token_replace' is not supported: the rows of "
            f"the first frame would need a modulation of their own on every rank"
        )
        raise ValueError(message)
    for place, processor in model.attn_processors.items():
        if not is_sharded(place):
            continue
        if isinstance(processor, Processor):
            message = f"this {name} is parallel already; close() what parallelize returned first"
            raise ValueError(message)
        found = type(processor).__name__
        if found != family.stock or processor._parallel_config is not None:
            message = (
                f"{place} is a {found}, and only a {family.stock} without another parallelism can "
                f"be replaced; set that first"
            )
            raise ValueError(message)
    return family


def description(model: Any) -> dict[str, str]:
    """What has to be equal on every rank."""
    config = {key: value for key, value in model.config.items() if not key.startswith("_")}
    text = json.dumps(config, sort_keys=True, default=str)
    digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    return {"class": type(model).__name__, "config": digest}


# ---- the plan of diffusers' hooks ----------------------------------------------------------------


class _Mesh:
    """What ``ContextParallelConfig`` and its hooks ask a device mesh for, of one process group.

    A ``DeviceMesh`` with the dimensions that they want would create process groups, in which every
    process of the job has to take part, ranks of other groups included.
    """

    def __init__(self, comm: UlyssesCommunicator) -> None:
        self._group = comm.group
        self._size = comm.world_size
        self._rank = comm.rank

    def __getitem__(self, names: object) -> _Mesh:
        return self

    def _flatten(self) -> _Mesh:
        return self

    def get_group(self) -> Any:
        return self._group

    def get_local_rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


class CutRows:
    """Hooks that hand each rank its share of the image rows; none where there is one rank."""

    def __init__(self, model: Any, comm: UlyssesCommunicator, family: Family) -> None:
        """Put them in place."""
        from diffusers import ContextParallelConfig
        from diffusers.hooks import apply_context_parallel
        from diffusers.hooks.context_parallel import ContextParallelInput

        self._model = model
        self._plan: dict[str, Any] = {}
        if comm.world_size == 1:
            return
        for module, dims in family.plan.items():
            self._plan[module] = {
                key: ContextParallelInput(split_dim=dim, split_output=isinstance(key, int))
                for key, dim in dims.items()
            }
        config = ContextParallelConfig(ulysses_degree=comm.world_size)
        config.setup(comm.rank, comm.world_size, comm.device, mesh=_Mesh(comm))
        apply_context_parallel(model, config, self._plan)

    def undo(self) -> None:
        """Take them away."""
        from diffusers.hooks.context_parallel import remove_context_parallel

        remove_context_parallel(self._model, self._plan)
