"""What UlyssesAttention refuses, before any rank waits and alike on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from exact_layer import Attention, layer_of
from rank_pool import RankPool
from torch import Tensor, nn

from ulysses_ops import NormRope, Schedule, UlyssesAttention, UlyssesCommunicator, UlyssesError


class Scaled(nn.Linear):
    """Not what its weight says, as with adapters and quantised weights."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def projections(v: nn.Linear | None = None) -> nn.Module:
    module = nn.Module()
    for name in ("to_q", "to_k", "to_v", "to_out"):
        setattr(module, name, nn.Linear(16, 16))
    if v is not None:
        module.to_v = v
    return module


def scaled() -> nn.Module:
    return projections(Scaled(16, 16))


def hooked() -> nn.Module:
    layer = nn.Linear(16, 16)
    layer.register_forward_hook(lambda module, inputs, output: 2 * output)
    return projections(layer)


def patched() -> nn.Module:
    layer = nn.Linear(16, 16)
    layer.forward = lambda x: 2 * x  # type: ignore[method-assign,assignment]
    return projections(layer)


def more_behind() -> nn.Module:
    module = projections()
    module.to_out = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))
    return module


class OnePlusWeight(nn.Module):
    """``x / rms(x) * (1 + w)``, as some models have it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))
        self.eps = 1e-5

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, (4,), 1 + self.weight, self.eps)


def with_attribute(name: str, value: object) -> nn.Module:
    module = Attention(("q", "k", "v", "o"), None)
    setattr(module, name, value)
    return module


MORE_THAN_WEIGHTS: list[tuple[Callable[[], nn.Module], str]] = [
    (lambda: Attention(("q", "k", "v", "o"), OnePlusWeight()), "norm_q of Attention computes"),
    (lambda: with_attribute("scale", 0.25), "scale of Attention is 0.25"),
    (lambda: with_attribute("residual_connection", True), "residual_connection of Attention"),
    (lambda: with_attribute("add_q_proj", nn.Linear(6, 16)), "add_q_proj of Attention is Linear"),
]


def refuse(rank: int, world_size: int) -> list[str]:
    layer = layer_of(world_size, norm_rope=NormRope("per_head", "interleaved"))
    x, cos, sin = layer.inputs(rank, world_size)
    assert cos is not None
    texts = []
    with UlyssesCommunicator(timeout_s=20) as comm:
        module = layer.sharded(comm)
        calls: dict[str, tuple[Tensor | None, ...]] = {
            r"x is \[3, 6\] and must be \(B, S_local, 6\)": (x[0], cos, sin),
            r"x is \[1, 0, 6\]": (x[:, :0], cos, sin),
            r"x is torch.float32 on cpu, weights are torch.float64": (x.float(), cos, sin),
            r"rope 'interleaved' takes cos and sin, given are \['cos'\]": (x, cos, None),
            r"cos is \[3, 1\] on cpu and must be \[3, 2\]": (x, cos[:, :1], sin),
        }
        for pattern, arguments in calls.items():
            with pytest.raises(ValueError, match=f"^UlyssesAttention: {pattern}") as error:
                module(*arguments)
            texts.append(str(error.value))
        weight = torch.ones(4).double()
        options: dict[str, dict[str, Any]] = {
            r"H=5 must be a multiple of H_kv=4": {"num_heads": 5},
            r"H=1 must be divisible by world_size=2": {"num_heads": 1, "num_kv_heads": 1},
            r"k has 16 features for heads": {"num_kv_heads": 2},
            r"q_norm is \[3\], but norm 'per_head' takes \[4\]": {"q_norm": torch.ones(3)},
            r"q, k and v take inputs of \[6, 7\]": {"v": torch.ones(16, 7).double()},
            r"weights and biases are torch.float32 on cpu, torch.float64 on cpu": {
                "v": torch.ones(16, 6)
            },
            r"v, a weight, is \[16\]": {"v": torch.ones(16).double()},
            r"q_bias is \[3\] beside": {"q_bias": torch.ones(3).double()},
            r"schedule='fast' must be a Schedule or 'auto'": {"schedule": "fast"},
            r"q_norm=3 must be a tensor": {"q_norm": 3},
            r"q_norm is torch.int32, .* convert it": {"q_norm": torch.ones(4, dtype=torch.int32)},
            r"k_norm is torch.float64, .* on meta and": {"k_norm": weight.to("meta")},
            r"q_norm is torch.float64, torch.sparse_coo, on": {"q_norm": weight.to_sparse()},
            r"constants=3 must be Constants": {"constants": 3},
            r"norm_rope_kernel=3 must be a function": {"norm_rope_kernel": 3},
            r"q=None must be a tensor \(out, in\)": {"q": None},
            r"v_bias='b' must be a tensor, or left out": {"v_bias": "b"},
        }
        for pattern, option in options.items():
            with pytest.raises(ValueError, match=f"^UlyssesAttention: {pattern}") as error:
                layer.sharded(comm, **option)
            texts.append(str(error.value))
        chunked = layer.sharded(comm, schedule=Schedule("whole", "heads", "slabs", 3))
        with pytest.raises(ValueError, match=r"head_chunks=3 must divide the 2 heads"):
            chunked(x, cos, sin)
        with pytest.raises(ValueError, match=r"has linear layers of none of these names"):
            UlyssesAttention.from_module(comm, nn.Identity(), num_heads=4)
        odd = Attention(("q", "k", "v", "o"), nn.LayerNorm(4))
        with pytest.raises(ValueError, match=r"must be RMS norms"):
            UlyssesAttention.from_module(comm, odd, num_heads=4)
        with pytest.raises(ValueError, match=r"\['Linear', 'GELU', 'Linear'\], of which the first"):
            UlyssesAttention.from_module(comm, more_behind(), num_heads=4)
        for change in (scaled, hooked, patched):
            with pytest.raises(ValueError, match=r"^UlyssesAttention: v is a .*or hooks"):
                UlyssesAttention.from_module(comm, change(), num_heads=4)
        for change, pattern in MORE_THAN_WEIGHTS:
            with pytest.raises(ValueError, match=f"^UlyssesAttention: {pattern}"):
                UlyssesAttention.from_module(comm, change(), num_heads=4)
        with torch.no_grad(), torch.autocast("cpu"), pytest.raises(ValueError, match="autocast is"):
            module(x, cos, sin)
        assert module(x, cos, sin).shape == (1, 3, 5)
    with pytest.raises(UlyssesError, match="is closed; construct a new one"):
        module(x, cos, sin)
    return texts


def test_wrong_arguments_are_refused(ranks: Callable[[int], RankPool]) -> None:
    first, second = ranks(2).run(refuse, timeout_s=30)
    assert first == second


@pytest.mark.parametrize("shape", [3, None, "123", (1, 2), ("a", 2, 3), (1, 0, 6), (1, 2.5, 6)])
def test_a_plan_is_of_three_sizes(shape: Any) -> None:
    with UlyssesCommunicator(device="cpu") as comm:
        module = layer_of(1).sharded(comm)
        with pytest.raises(
            ValueError, match=r"^UlyssesAttention.plan: shape.* \(B, S_local, width"
        ):
            module.plan(shape)
        assert module.plan((1, 2, 6)) == module.plan([1, 2, 6])  # type: ignore[arg-type]


def test_the_number_of_heads_of_a_module_is_a_number() -> None:
    with (
        UlyssesCommunicator(device="cpu") as comm,
        pytest.raises(ValueError, match=r"^UlyssesAttention: num_heads='4' must be a whole number"),
    ):
        UlyssesAttention.from_module(comm, projections(), num_heads="4")  # type: ignore[arg-type]


REPLACED: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    r"q.weight is \[15, 6\], .* must be \[16, 6\]": ("q", lambda weight: weight[1:]),
    r"q.weight is \[16, 5\], .* must be \[16, 6\]": ("q", lambda weight: weight[:, 1:]),
    r"k.weight is \[12, 6\], .* must be \[16, 6\]": ("k", lambda weight: weight[4:]),
    r"v.weight is \[16, 6\], torch.float32 on cpu, and": ("v", lambda weight: weight.float()),
    r"v.weight is \[16, 6\], torch.float64 on meta, and": ("v", lambda weight: weight.to("meta")),
    r"out.weight is \[5, 12\], .* must be \[5, 16\]": ("out", lambda weight: weight[:, 4:]),
}


def replaced(rank: int, world_size: int) -> list[str]:
    """What is replaced after construction is named, and no rank waits."""
    layer = layer_of(world_size, with_bias=True)
    inputs = layer.inputs(rank, world_size)
    texts = []
    with UlyssesCommunicator(timeout_s=20) as comm, torch.no_grad():
        for pattern, (name, change) in REPLACED.items():
            module = layer.sharded(comm)
            projection = getattr(module, name)
            right = projection.weight
            projection.weight = nn.Parameter(change(right.detach()), requires_grad=False)
            for call in (module, module.project):
                with pytest.raises(ValueError, match=f"^UlyssesAttention: {pattern}") as error:
                    call(*inputs)
                texts.append(str(error.value))
            projection.weight = right
        module.v.bias = nn.Parameter(module.v.bias.detach()[1:], requires_grad=False)
        with pytest.raises(ValueError, match=r"^UlyssesAttention: v.bias is \[15\], .* be \[16\]"):
            module(*inputs)
        module.v.register_parameter("bias", None)
        module.q = nn.Linear(6, 12).double()
        with pytest.raises(ValueError, match=r"^UlyssesAttention: q.weight is \[12, 6\], "):
            module(*inputs)
        normed = Attention(("q", "k", "v", "o"), nn.RMSNorm(4, eps=1e-6))
        taken = UlyssesAttention.from_module(comm, normed, num_heads=4)
        x = torch.ones(1, 2, taken.q.in_features)
        for norm, what in (
            (torch.ones(3), "is .3., and was of 4"),
            (torch.ones(4).int(), "is .*int"),
        ):
            taken.norms["k"].weight = nn.Parameter(norm, requires_grad=False)
            with pytest.raises(ValueError, match=rf"^UlyssesAttention: norms\['k'\].weight {what}"):
                taken(x)
        module = layer.sharded(comm)
        assert module(*inputs).shape == (1, 3, 5)
    return texts


def test_what_is_replaced_by_another_shape_is_named(ranks: Callable[[int], RankPool]) -> None:
    first, second = ranks(2).run(replaced, timeout_s=30)
    assert first == second
