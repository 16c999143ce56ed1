"""The linear layers and norms of an attention layer, taken from weights or from a module."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import isclose

import torch
from torch import Tensor, nn

from .kinds import check_kind
from .norm_rope_checks import Norm
from .part_norm_rope import NormRope

OP = "UlyssesAttention"
# Names that libraries give to the same four projections.
NAMES = (
    ("to_q", "to_k", "to_v", "to_out"),
    ("q_proj", "k_proj", "v_proj", "o_proj"),
    ("q", "k", "v", "o"),
)
NORM_NAMES = (("norm_q", "norm_k"), ("q_norm", "k_norm"))


@dataclass(frozen=True)
class Projections:
    """Four linear layers, and how many heads they are for.

    Attributes:
        q: ``(H * D, width)``.
        k: ``(H_kv * D, width)``.
        v: As ``k``.
        out: ``(out_width, H * D)``.
        num_heads: H.
        num_kv_heads: ``H_kv``.
    """

    q: nn.Linear
    k: nn.Linear
    v: nn.Linear
    out: nn.Linear
    num_heads: int
    num_kv_heads: int

    @property
    def head_dim(self) -> int:
        """D."""
        return self.q.out_features // self.num_heads

    def check(self, norm_rope: NormRope, world_size: int) -> None:
        """Raise unless all sizes fit each other and the ranks.

        Raises:
            ValueError: a count, size, dtype or device is wrong.
        """
        self._refuse_other_forwards()
        self._check_heads(world_size)
        features = {
            "q": (self.q.out_features, self.num_heads * self.head_dim),
            "k": (self.k.out_features, self.num_kv_heads * self.head_dim),
            "v": (self.v.out_features, self.num_kv_heads * self.head_dim),
            "out": (self.out.in_features, self.num_heads * self.head_dim),
        }
        for name, (found, expected) in features.items():
            if found != expected:
                message = (
                    f"UlyssesAttention: {name} has {found} features for heads, H={self.num_heads} "
                    f"and H_kv={self.num_kv_heads} of D={self.head_dim} need {expected}"
                )
                raise ValueError(message)
        widths = {layer.in_features for layer in (self.q, self.k, self.v)}
        if len(widths) > 1:
            message = f"UlyssesAttention: q, k and v take inputs of {sorted(widths)} features; one"
            raise ValueError(f"{message} input feeds all three")
        tensors = list(self.tensors())
        kinds = {(tensor.dtype, tensor.device) for tensor in tensors}
        if len(kinds) > 1 or not tensors[0].is_floating_point():
            found_kinds = sorted(f"{dtype} on {device}" for dtype, device in kinds)
            message = (
                f"UlyssesAttention: weights and biases are {', '.join(found_kinds)}; convert them "
                f"to one floating dtype on one device"
            )
            raise ValueError(message)
        self.check_weights(self.head_dim)
        if norm_rope.rope != "none" and self.head_dim % 2:
            message = f"UlyssesAttention: D={self.head_dim} must be even for RoPE"
            raise ValueError(message)

    def _refuse_other_forwards(self) -> None:
        """Raise where a layer does more than multiply: its weight and bias alone are used.

        Raises:
            ValueError: a layer has a forward of its own, or hooks.
        """
        for name in ("q", "k", "v", "out"):
            layer: nn.Linear = getattr(self, name)
            is_plain = getattr(layer.forward, "__func__", None) is nn.Linear.forward
            if not is_plain or layer._forward_hooks or layer._forward_pre_hooks:
                message = (
                    f"UlyssesAttention: {name} is a {type(layer).__name__} with a forward of its "
                    f"own or hooks, which would be left out; merge them into its weight"
                )
                raise ValueError(message)

    def _check_heads(self, world_size: int) -> None:
        heads, kv_heads = self.num_heads, self.num_kv_heads
        if min(heads, kv_heads) < 1 or heads % kv_heads or self.q.out_features % heads:
            message = (
                f"UlyssesAttention: H={heads} must be a multiple of H_kv={kv_heads} and divide "
                f"q's {self.q.out_features} features"
            )
            raise ValueError(message)
        for name, count in (("H", heads), ("H_kv", kv_heads)):
            if count % world_size:
                message = (
                    f"UlyssesAttention: {name}={count} must be divisible by "
                    f"world_size={world_size}; replicate or pad heads, or use fewer ranks"
                )
                raise ValueError(message)

    def check_weights(self, head_dim: int) -> None:
        """Refuse a weight or bias that does not fit the heads: any may be replaced at any time.

        Args:
            head_dim: D, which heads had at construction.

        Raises:
            ValueError: one has another shape, dtype or device; by its name.
        """
        features, kv_features = self.num_heads * head_dim, self.num_kv_heads * head_dim
        width, like = self.q.in_features, self.q.weight
        for name, layer, rows, columns in (
            ("q", self.q, features, width),
            ("k", self.k, kv_features, width),
            ("v", self.v, kv_features, width),
            ("out", self.out, self.out.out_features, features),
        ):
            _check_fits(f"{name}.weight", layer.weight, (rows, columns), like)
            if layer.bias is not None:
                _check_fits(f"{name}.bias", layer.bias, (rows,), like)

    def tensors(self) -> Iterator[Tensor]:
        """Weights and biases."""
        for layer in (self.q, self.k, self.v, self.out):
            yield layer.weight
            if layer.bias is not None:
                yield layer.bias

    def norm_weight(
        self, name: str, weight: Tensor | None, heads: int, kind: Norm
    ) -> Tensor | None:
        """The weight of a norm as the stages use it: ``(D,)``, or ``(heads, D)`` across heads.

        Raises:
            ValueError: it is no such tensor, or there is none of that size in this kind of norm.
        """
        if weight is None:
            return None
        check_kind(OP, name, weight, Tensor, "a tensor, or left out")
        sizes = {"none": None, "per_head": self.head_dim, "across_heads": heads * self.head_dim}
        if sizes[kind] is None or weight.shape != (sizes[kind],):
            message = (
                f"UlyssesAttention: {name} is {list(weight.shape)}, but norm {kind!r} takes "
                f"{'no weight' if sizes[kind] is None else [sizes[kind]]}"
            )
            raise ValueError(message)
        _check_norm_weight(name, weight, self.q.weight.device)
        weight = weight.detach()
        return weight.view(heads, self.head_dim) if kind == "across_heads" else weight


def _check_fits(name: str, tensor: Tensor, shape: tuple[int, ...], like: Tensor) -> None:
    """Refuse a weight or bias that is not of this shape, or not as the weight of q otherwise."""
    check_kind(OP, name, tensor, Tensor, "a tensor")
    if tensor.shape != shape or tensor.dtype != like.dtype or tensor.device != like.device:
        message = (
            f"{OP}: {name} is {list(tensor.shape)}, {tensor.dtype} on {tensor.device}, and must be "
            f"{list(shape)}, {like.dtype} on {like.device}, for the heads that the layer was built "
            f"for; put such a one there, or build another layer"
        )
        raise ValueError(message)


def _check_norm_weight(name: str, weight: Tensor, device: torch.device) -> None:
    """Refuse what no row can be multiplied by.

    Raises:
        ValueError: it is not dense, not floating, or not where the projections are.
    """
    is_dense = weight.layout is torch.strided and not weight.is_nested
    if not is_dense or not weight.is_floating_point() or weight.device != device:
        message = (
            f"{OP}: {name} is {weight.dtype}, {weight.layout}, on {weight.device} and must be a "
            f"dense tensor of a floating dtype on {device}, where the projections are; convert it"
        )
        raise ValueError(message)


def linear_of(name: str, weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """A linear layer around tensors that exist; nothing is allocated, gradients are off.

    Raises:
        ValueError: they are no tensors, or of shapes that no such layer has.
    """
    check_kind(OP, name, weight, Tensor, "a tensor (out, in) features")
    if weight.dim() != 2:
        message = f"{OP}: {name}, a weight, is {list(weight.shape)}, not (out, in) features"
        raise ValueError(message)
    if bias is not None:
        check_kind(OP, f"{name}_bias", bias, Tensor, "a tensor, or left out")
    if bias is not None and bias.shape != weight.shape[:1]:
        message = (
            f"{OP}: {name}_bias is {list(bias.shape)} beside a weight of {list(weight.shape)}; "
            f"give one value an output feature"
        )
        raise ValueError(message)
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight.detach(), requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach(), requires_grad=False)
    return layer


def projections_of(module: nn.Module) -> tuple[nn.Linear, nn.Linear, nn.Linear, nn.Linear]:
    """The projections Q, K, V and output of an attention module, by their usual names.

    Raises:
        ValueError: it has none of these names, or they are no linear layers.
    """
    for names in NAMES:
        found = [getattr(module, name, None) for name in names]
        if isinstance(found[3], nn.ModuleList | nn.Sequential) and len(found[3]) > 0:
            found[3] = _without_dropout(module, found[3])
        layers = [layer for layer in found if isinstance(layer, nn.Linear)]
        if len(layers) == len(names):
            return layers[0], layers[1], layers[2], layers[3]
    message = (
        f"UlyssesAttention: {type(module).__name__} has linear layers of none of these names: "
        f"{'; '.join(', '.join(names) for names in NAMES)}; pass them by from_weights()"
    )
    raise ValueError(message)


def _check_nothing_is_lost(module: nn.Module, head_dim: int) -> None:
    """Refuse a module that does more than its projections and norms say.

    Raises:
        ValueError: it scales scores or outputs otherwise, adds its input, or has projections of a
            second stream.
    """
    usual = {
        "scale": head_dim**-0.5,
        "scaling": head_dim**-0.5,
        "rescale_output_factor": 1.0,
        "residual_connection": False,
        "add_q_proj": None,
        "add_k_proj": None,
        "add_v_proj": None,
    }
    for name, value in usual.items():
        found = getattr(module, name, None)
        if found is None or found == value:
            continue
        if isinstance(found, float) and isinstance(value, float) and isclose(found, value):
            continue
        message = (
            f"UlyssesAttention: {name} of {type(module).__name__} is "
            f"{found if isinstance(found, int | float) else type(found).__name__}, which the layer "
            f"would leave out; pass weights by from_weights(), and do that around the layer"
        )
        raise ValueError(message)


def _is_rms(norm: nn.Module, eps: float) -> bool:
    """Whether it is what the layer computes in its place, by a look at one row."""
    weight = norm.weight
    assert isinstance(weight, Tensor)
    if weight.is_meta:
        return True
    with torch.no_grad():
        row = torch.linspace(-1.5, 2.0, weight.numel(), device=weight.device).to(weight.dtype)[None]
        wide = row.float()
        expected = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()
        tolerance = 8 * torch.finfo(weight.dtype).eps
        return torch.allclose(norm(row).float(), expected, rtol=tolerance, atol=tolerance)


def _without_dropout(module: nn.Module, layers: nn.ModuleList | nn.Sequential) -> nn.Module:
    first, *others = layers
    if any(not isinstance(other, nn.Dropout | nn.Identity) for other in others):
        message = (
            f"UlyssesAttention: the output of {type(module).__name__} is "
            f"{[type(layer).__name__ for layer in layers]}, of which the first alone would be "
            f"used; pass weights by from_weights(), and do the rest behind the layer"
        )
        raise ValueError(message)
    return first


def weight_of(norm: nn.Module | None) -> Tensor | None:
    """The weight of a norm as it is now."""
    weight = getattr(norm, "weight", None)
    return weight if isinstance(weight, Tensor) else None


def weight_like(name: str, norm: nn.Module, given: Tensor, device: torch.device) -> Tensor | None:
    """The weight of a norm as it is now, laid out as the one that the layer was built with.

    Raises:
        ValueError: it has been replaced by one that does not fit.
    """
    weight = weight_of(norm)
    if weight is None:
        return None
    if weight.numel() != given.numel():
        message = (
            f"{OP}: {name}.weight is {list(weight.shape)}, and was of {given.numel()} elements "
            f"when the layer was built; put such a one there, or build another layer"
        )
        raise ValueError(message)
    _check_norm_weight(f"{name}.weight", weight, device)
    return weight.view(given.shape)


def norms_of(
    module: nn.Module, features: int, num_heads: int
) -> tuple[Norm, float, dict[str, nn.Module]]:
    """Kind and epsilon of the RMS norms of Q and K, and these; ``"none"`` where there are none.

    A norm over D features is per head, a wider one across heads.

    Args:
        module: Has them.
        features: Of Q.
        num_heads: H.

    Raises:
        ValueError: a norm subtracts a mean, has no size, or Q's and K's differ in kind; or the
            module does more than its projections and norms say.
    """
    check_kind(OP, "num_heads", num_heads, int, "a whole number")
    head_dim = features // max(num_heads, 1)
    _check_nothing_is_lost(module, head_dim)
    for names in NORM_NAMES:
        norms = [getattr(module, name, None) for name in names]
        if all(norm is None or isinstance(norm, nn.Identity) for norm in norms):
            continue
        weights = [getattr(norm, "weight", None) for norm in norms]
        is_rms = not any(
            isinstance(norm, nn.LayerNorm) or getattr(norm, "bias", None) is not None
            for norm in norms
        )
        if not is_rms or not all(isinstance(weight, Tensor) for weight in weights):
            message = (
                f"UlyssesAttention: {' and '.join(names)} of {type(module).__name__} must be RMS "
                f"norms with weights and without biases; pass weights by from_weights()"
            )
            raise ValueError(message)
        across = {weight.numel() != head_dim for weight in weights if weight is not None}
        epsilons = {
            getattr(norm, "eps", None) or getattr(norm, "variance_epsilon", None) for norm in norms
        }
        if len(across) > 1 or len(epsilons) > 1:
            message = f"UlyssesAttention: {' and '.join(names)} differ in kind or epsilon"
            raise ValueError(f"{message}; one kind of norm serves Q and K")
        eps = epsilons.pop() or torch.finfo(torch.float32).eps  # torch's default of no epsilon
        for name, norm in zip(names, norms, strict=True):
            if norm is not None and not _is_rms(norm, float(eps)):
                message = (
                    f"UlyssesAttention: {name} of {type(module).__name__} computes something else "
                    f"than x / sqrt(mean(x^2) + {eps:g}) * weight; pass weights by from_weights()"
                )
                raise ValueError(message)
        kind: Norm = "across_heads" if across.pop() else "per_head"
        found = dict(zip("qk", norms, strict=True))
        return kind, float(eps), {name: norm for name, norm in found.items() if norm is not None}
    return "none", 0.0, {}
