"""``xFuserLongContextAttention`` with the signature of xDiT 0.7 (``xfuser``)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from .attention import ulysses_attention
from .communicator import UlyssesCommunicator
from .from_yunchang import check_exact, exact_attention
from .joint import JointSequence
from .joint_attention import ulysses_joint_attention
from .names import shared_communicator
from .usp import UspAttention

STRATEGIES = ("front", "rear")


class xFuserLongContextAttention(nn.Module):  # noqa: N801  its name is what callers write
    """Attention between two exchanges, with text that every rank holds beside the image rows.

    xDiT finds its ranks in state of its own; here they are given: a group for Ulysses alone, a
    :class:`ulysses_ops.usp.UspAttention` for Ulysses and a ring.
    """

    def __init__(
        self,
        scatter_idx: int = 2,
        gather_idx: int = 1,
        ring_impl_type: str = "basic",
        use_pack_qkv: bool = False,
        use_kv_cache: bool = False,
        use_sync: bool = False,
        attn_type: Any = None,
        attn_processor: Callable[..., Any] | None = None,
        *,
        ranks: ProcessGroup | DeviceMesh | UlyssesCommunicator | UspAttention | None = None,
    ) -> None:
        """Take the communicator that is open over these ranks, or construct one.

        Args:
            scatter_idx: 2.
            gather_idx: 1.
            ring_impl_type: ``"basic"``.
            use_pack_qkv: Nothing: the three tensors have one completion in any case.
            use_kv_cache: False.
            use_sync: Wait for the result on the host.
            attn_type: A kind of yunchang's that is exact, or its name.
            attn_processor: Another kernel, ``(q, k, v, dropout_p=, softmax_scale=, causal=)``.
            ranks: The ranks; all of them when left out.

        Raises:
            ValueError: an option is not served; the message says what to use.

        Collective where no communicator is open over these ranks.
        """
        super().__init__()
        wanted: dict[str, tuple[Any, Any]] = {
            "scatter_idx": (scatter_idx, 2),
            "gather_idx": (gather_idx, 1),
            "ring_impl_type": (ring_impl_type, "basic"),
            "use_kv_cache": (use_kv_cache, False),
        }
        for name, (value, served) in wanted.items():
            if value != served:
                message = f"xFuserLongContextAttention: {name}={value!r} must be {served!r}"
                raise ValueError(message)
        check_exact("xFuserLongContextAttention", attn_type, attn_processor)
        self.use_sync = use_sync
        self.attention = exact_attention if attn_processor is None else attn_processor
        self.usp = ranks if isinstance(ranks, UspAttention) else None
        self.comm = ranks.comm if isinstance(ranks, UspAttention) else shared_communicator(ranks)
        if self.usp is not None and attn_processor is not None:
            message = (
                "xFuserLongContextAttention: a ring needs a kernel that returns its log-sum-exp; "
                "give it to UspAttention as kernel="
            )
            raise ValueError(message)

    def forward(
        self,
        attn: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        joint_tensor_query: Tensor | None = None,
        joint_tensor_key: Tensor | None = None,
        joint_tensor_value: Tensor | None = None,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        joint_strategy: str = "none",
        **options: Any,
    ) -> Tensor:
        """Attend over the whole sequence, and over the text.

        Args:
            attn: Any value: xDiT keeps its cache of keys there.
            query: ``(B, S_local, H, D)``.
            key: ``(B, S_local, H, D)``.
            value: As ``key``.
            joint_tensor_query: Text ``(B, T, H, D)``, the same on every rank; all three or none.
            joint_tensor_key: Likewise.
            joint_tensor_value: Likewise.
            dropout_p: As for flash-attn.
            softmax_scale: ``1 / sqrt(D)`` when left out.
            causal: Attend to earlier rows alone.
            joint_strategy: ``"front"`` or ``"rear"``: text before the image or after it.
            options: Others of flash-attn, passed to the kernel, which refuses what it does not
                know.

        Returns:
            ``(B, S_local, H, D)``, or ``(B, T + S_local, H, D)`` with text, where the strategy puts
            it; ready on the current stream.

        Raises:
            ValueError: shapes, dtypes, devices or options are wrong or not served.

        Collective; see :func:`ulysses_ops.ulysses_attention`.
        """
        options = {"dropout_p": dropout_p, "softmax_scale": softmax_scale, "causal": causal} | (
            options
        )
        text = (joint_tensor_query, joint_tensor_key, joint_tensor_value)
        if self.usp is not None:
            return self._synchronised(
                self._over_a_ring(self.usp, (query, key, value), text, options)
            )
        attention = partial(self.attention, **options)
        if all(x is None for x in text):
            return self._synchronised(
                ulysses_attention(query, key, value, self.comm, attention=attention)
            )
        if any(x is None for x in text) or joint_strategy not in STRATEGIES:
            message = (
                f"xFuserLongContextAttention: joint_strategy={joint_strategy!r} must be one of "
                f"{STRATEGIES}, with joint_tensor_query, joint_tensor_key and joint_tensor_value"
            )
            raise ValueError(message)
        first = joint_strategy == "front"
        rows = joint_tensor_query.shape[1] if joint_tensor_query is not None else 0
        joint = JointSequence(rows, (query.shape[1],) * self.comm.world_size, text_first=first)
        q, k, v = (
            joint.join(x, y)
            for x, y in zip(text, (query, key, value), strict=True)
            if x is not None
        )
        return self._synchronised(
            ulysses_joint_attention(q, k, v, self.comm, joint, attention=attention)
        )

    def _over_a_ring(
        self,
        usp: UspAttention,
        image: tuple[Tensor, Tensor, Tensor],
        text: tuple[Tensor | None, Tensor | None, Tensor | None],
        options: dict[str, Any],
    ) -> Tensor:
        unserved = [name for name, value in options.items() if value not in (0.0, None, False)]
        if any(x is not None for x in text):
            unserved.append("joint_tensor_query")
        if unserved:
            message = (
                f"xFuserLongContextAttention: {unserved[0]} is not served over a ring; give a "
                f"group of one host as ranks="
            )
            raise ValueError(message)
        return usp(*image)

    def _synchronised(self, out: Tensor) -> Tensor:
        if self.use_sync:
            self.comm.synchronize()
        return out
