"""What the attention processors of all ``diffusers`` models have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from .attention import AttentionKernel
from .communicator import UlyssesCommunicator
from .errors import UlyssesError
from .joint_attention import (
    NONE_REPLICATED,
    Producer,
    ReplicatedRows,
    attend_as_computed,
    interleave_keys,
    replicate_rows,
)


class Forward:
    """What moves the rows of a model, and what is known of the call that is under way.

    Attributes:
        comm: The ranks.
        text_rows: Rows of text in joint attention, on all ranks together; 0 where there is none.
        is_under_way: Whether there is such a call, and the other attributes are about it.
    """

    def __init__(self, comm: UlyssesCommunicator) -> None:
        """Before the first call."""
        self.comm = comm
        self.text_rows = 0
        self.is_under_way = False

    @property
    def is_text_sharded(self) -> bool:
        """Whether each rank holds a share of the text rows, or all of them."""
        return self.text_rows % self.comm.world_size == 0

    def attend(
        self,
        v: Producer,
        k: Producer,
        q: Producer,
        *,
        attention: AttentionKernel,
        replicated: ReplicatedRows,
        copy_out: bool,
    ) -> Tensor:
        """:func:`.joint_attention.attend_as_computed` between the ranks. Collective."""
        return attend_as_computed(
            self.comm, v, k, q, attention=attention, replicated=replicated, copy_out=copy_out
        )

    def replicate(self, x: Tensor) -> Tensor:
        """:func:`.joint_attention.replicate_rows` between the ranks. Collective."""
        return replicate_rows(self.comm, x)


class Processor:
    """What the processors share; ``diffusers`` reads and writes the two private attributes."""

    _attention_backend: Any = None
    _parallel_config: Any = None

    def __init__(self, forward: Forward, backend: Any) -> None:
        """Take the place of a stock processor with this attention backend."""
        from diffusers.models.attention_dispatch import dispatch_attention_fn

        self.dispatch: Callable[..., Tensor] = dispatch_attention_fn
        self.rotate: Callable[..., Tensor] = self.import_rotation()
        self.forward = forward
        self._attention_backend = backend

    def import_rotation(self) -> Any:
        """The function that turns queries and keys by their positions."""
        raise NotImplementedError

    def kernel(self, mask: Tensor | None) -> AttentionKernel:
        """The attention backend, with a mask over all keys in the order of the ranks."""

        def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return self.dispatch(q, k, v, attn_mask=mask, backend=self._attention_backend)

        return attention

    def attend(
        self,
        v: Producer,
        k: Producer,
        q: Producer,
        *,
        mask: Tensor | None = None,
        is_text_first: bool = True,
        copy_out: bool = False,
    ) -> Tensor:
        """Attention between the ranks, heads flattened: ``(B, S_local, H * D)``.

        ``mask`` is over the keys in the order of the model: text before image or after it.
        """
        forward, world_size = self.forward, self.forward.comm.world_size
        if not forward.is_under_way:
            message = (
                "parallelize: attention was called outside a call of the model; call the model "
                "itself, neither its forward nor a part of it"
            )
            raise UlyssesError(message)
        replicated = NONE_REPLICATED
        if not forward.is_text_sharded:
            replicated = ReplicatedRows(forward.text_rows, is_text_first)
        elif mask is not None:
            image_rows = mask.shape[-1] - forward.text_rows
            first = forward.text_rows if is_text_first else image_rows
            mask = interleave_keys(mask, first, world_size)
        out = forward.attend(
            v,
            k,
            q,
            attention=self.kernel(mask),
            replicated=replicated,
            copy_out=copy_out,
        )
        return out.flatten(2)
