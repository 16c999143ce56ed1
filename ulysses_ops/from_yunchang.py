"""``SeqAllToAll4D`` and ``UlyssesAttention`` with the signatures of yunchang 0.6."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from .attention import ulysses_attention
from .communicator import UlyssesCommunicator
from .names import open_communicator, shared_communicator
from .ops import gather, scatter

Ranks = ProcessGroup | DeviceMesh | UlyssesCommunicator | None
# Kinds of yunchang's AttnType that compute softmax(q k^T scale) v to within rounding.
EXACT_KINDS = (
    "AITER",
    "FA",
    "FA3",
    "FLASHINFER",
    "TORCH_MATH",
    "TORCH_FLASH",
    "TORCH_EFFICIENT",
    "TORCH_CUDNN",
)


class SeqAllToAll4D:
    """The exchange alone: :func:`ulysses_ops.scatter` and :func:`ulysses_ops.gather`."""

    @staticmethod
    def apply(
        group: Ranks, x: Tensor, scatter_idx: int, gather_idx: int, use_sync: bool = False
    ) -> Tensor:
        """Trade the sequence for heads with ``(2, 1)``, and back with ``(1, 2)``.

        ``(2, 1)``: ``(B, S_local, H, D) -> (B, S_global, H_local, D)``; ``(1, 2)`` is its inverse.

        Args:
            group: The ranks, over which a communicator is open, or that communicator.
            x: The tensor; contiguous or not.
            scatter_idx: Dimension that is divided.
            gather_idx: Dimension that is put together.
            use_sync: Wait for the result on the host.

        Raises:
            ValueError: indices or shapes are wrong, or no communicator is open over the group.

        Collective and differentiable; see :func:`ulysses_ops.scatter`.
        """
        comm = group if isinstance(group, UlyssesCommunicator) else open_communicator(group)
        if comm is None:
            message = (
                "SeqAllToAll4D: no communicator is open over this group; construct a "
                "UlyssesCommunicator(group) beforehand and keep it"
            )
            raise ValueError(message)
        if (scatter_idx, gather_idx) not in ((2, 1), (1, 2)):
            message = (
                f"SeqAllToAll4D: scatter_idx={scatter_idx} and gather_idx={gather_idx} must be 2 "
                f"and 1, or 1 and 2"
            )
            raise ValueError(message)
        out = scatter(x, comm) if scatter_idx == 2 else gather(x, comm)
        if use_sync:
            comm.synchronize()
        return out


class UlyssesAttention(nn.Module):
    """Attention between two exchanges, by PyTorch's scaled dot product attention or a kernel given.

    ``out = gather(attention(scatter(q), scatter(k), scatter(v)))``.
    """

    def __init__(
        self,
        sequence_process_group: Ranks = None,
        scatter_idx: int = 2,
        gather_idx: int = 1,
        use_sync: bool = False,
        attn_type: Any = None,
        *,
        attention: Callable[..., Any] | None = None,
    ) -> None:
        """Take the communicator that is open over these ranks, or construct one.

        Args:
            sequence_process_group: The ranks, or their communicator; all ranks when left out.
            scatter_idx: 2.
            gather_idx: 1.
            use_sync: Wait for the result on the host.
            attn_type: A kind of yunchang's that is exact, or its name; which kernel runs is chosen
                by PyTorch.
            attention: Another kernel, ``(q, k, v, **options)`` with the options of :meth:`forward`;
                it may return a tuple that begins with the output.

        Raises:
            ValueError: an index is another one, or ``attn_type`` is approximate.

        Collective where no communicator is open over these ranks.
        """
        super().__init__()
        if (scatter_idx, gather_idx) != (2, 1):
            message = (
                f"UlyssesAttention: scatter_idx={scatter_idx} and gather_idx={gather_idx} must be "
                f"2 and 1; give (B, S, H, D)"
            )
            raise ValueError(message)
        check_exact("UlyssesAttention", attn_type, attention)
        self.use_sync = use_sync
        self.attention = exact_attention if attention is None else attention
        self.comm = shared_communicator(sequence_process_group)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        *args: Any,
    ) -> Tensor:
        """Attend over the whole sequence.

        Args:
            query: ``(B, S_local, H, D)``.
            key: ``(B, S_local, H_kv, D)``.
            value: As ``key``.
            dropout_p: As for flash-attn, as are the others; what the kernel does not know, it
                refuses.
            softmax_scale: ``1 / sqrt(D)`` when left out.
            causal: Attend to earlier rows alone.
            window_size: Rows to the left and right that are attended to; -1 is all.
            softcap: Bound of the scores; 0 is none.
            alibi_slopes: Slopes of a bias by distance.
            deterministic: For the backward.
            return_attn_probs: For the kernel; the output alone is returned in any case.
            args: Nothing: there is none more.

        Returns:
            ``(B, S_local, H, D)``, ready on the current stream.

        Raises:
            ValueError: shapes, dtypes or devices are wrong, or an option is not known.

        Collective; see :func:`ulysses_ops.ulysses_attention`.
        """
        if args:
            message = f"UlyssesAttention: {len(args)} arguments more than there are; leave them out"
            raise ValueError(message)

        def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            found = self.attention(
                q,
                k,
                v,
                dropout_p=dropout_p,
                softmax_scale=softmax_scale,
                causal=causal,
                window_size=window_size,
                softcap=softcap,
                alibi_slopes=alibi_slopes,
                deterministic=deterministic,
                return_attn_probs=return_attn_probs,
            )
            out: Tensor = found[0] if isinstance(found, tuple) else found
            return out

        out = ulysses_attention(query, key, value, self.comm, attention=attention)
        if self.use_sync:
            self.comm.synchronize()
        return out


def exact_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    **options: Any,
) -> Tensor:
    """``softmax(q k^T softmax_scale) v`` with flash-attn's keywords, by PyTorch.

    Raises:
        ValueError: a window, a soft cap or slopes are asked for.
    """
    neutral = {"window_size": (-1, -1), "softcap": 0.0, "alibi_slopes": None}
    for name, value in options.items():
        default = neutral.get(name)
        if value is not None and (default is None or value != default):
            message = (
                f"UlyssesAttention: {name} is not known to scaled_dot_product_attention; "
                f"pass a kernel that knows it as attention="
            )
            raise ValueError(message)
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        dropout_p=dropout_p,
        is_causal=causal,
        scale=softmax_scale,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return out.transpose(1, 2)


def check_exact(op: str, attn_type: Any, attention: object) -> None:
    """Refuse a kind of attention that is approximate, unless a kernel is given beside it."""
    name = getattr(attn_type, "name", attn_type)
    if attention is None and name is not None and str(name).upper() not in EXACT_KINDS:
        message = (
            f"{op}: attn_type={name} is none of {list(EXACT_KINDS)}, which are exact; pass its "
            f"kernel as attention="
        )
        raise ValueError(message)
