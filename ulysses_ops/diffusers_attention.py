"""What the attention processors of all ``diffusers`` models have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from .communicator import UlyssesCommunicator
from .errors import UlyssesError
from .joint import JointSequence
from .joint_attention import attend_as_computed, replicate_rows
from .values_first import AttentionKernel, Producer


class Forward:
    """What moves the rows of a model, and what is known of the call that is under way.

    Attributes:
        comm: The ranks.
        text_rows: Rows of text in joint attention, on all ranks together; 0 where there is none.
        image_rows: Rows of image, on all ranks together.
        is_under_way: Whether there is such a call, and the other attributes are about it.
    """

    def __init__(self, comm: UlyssesCommunicator) -> None:
        """Before the first call."""
        self.comm = comm
        self.text_rows = 0
        self.image_rows = 0
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
        joint: JointSequence | None,
        attention: AttentionKernel,
        mask: Tensor | None,
        copy_out: bool,
    ) -> Tensor:
        """:func:`.joint_attention.attend_as_computed` between the ranks. Collective."""
        return attend_as_computed(
            self.comm, v, k, q, joint=joint, attention=attention, mask=mask, copy_out=copy_out
        )

    def replicate(self, x: Tensor) -> Tensor:
        """:func:`.joint_attention.replicate_rows` between the ranks. Collective."""
        return replicate_rows(self.comm, x)

    def joint(self, is_text_first: bool) -> JointSequence | None:
        """Who holds which rows; ``None`` where there is no text among them."""
        if self.text_rows == 0:
            return None
        ranks = self.comm.world_size
        text = (self.text_rows // ranks,) * ranks if self.is_text_sharded else None
        return JointSequence(
            self.text_rows, (self.image_rows // ranks,) * ranks, text, is_text_first
        )


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

    def kernel(self, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None) -> Tensor:
        """The attention backend; a mask is over all keys in the order in which they arrive."""
        return self.dispatch(q, k, v, attn_mask=mask, backend=self._attention_backend)

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
        forward = self.forward
        if not forward.is_under_way:
            message = (
                "parallelize: attention was called outside a call of the model; call the model "
                "itself, neither its forward nor a part of it"
            )
            raise UlyssesError(message)
        out = forward.attend(
            v,
            k,
            q,
            joint=forward.joint(is_text_first),
            attention=self.kernel,
            mask=mask,
            copy_out=copy_out,
        )
        return out.flatten(2)
