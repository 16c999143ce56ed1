"""Joint attention: text rows and image rows in one sequence, the image sharded between ranks.

NOTE [joint order]: a kernel sees rows in another order than the model where text is sharded, for
rows arrive rank by rank: rank 0's text and image, then rank 1's. Attention does not depend on the
order of keys, and each query's result goes back to where the query came from; but a mask has to be
put into the same order. Where text is replicated the order is the model's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from types import MappingProxyType
from typing import Any, Literal, cast

import torch
from torch import Tensor

from .attention import AttentionKernel, attend, sdpa, ulysses_attention
from .communicator import UlyssesCommunicator
from .exchange import Exchange, check_source
from .heads import HeadShare, share_heads
from .ops import gather, scatter
from .plan import Direction, as_tuple, even_splits
from .window_spec import WindowSpec
from .windows import Window, refuse, reserve

# Transformers of diffusers 0.42.1 that attend over text and image rows jointly -> whether text
# comes first: read from their attention processors, or from the model where its streams are one.
TEXT_COMES_FIRST = MappingProxyType(
    {
        "AuraFlowTransformer2DModel": True,
        "ChromaTransformer2DModel": True,
        "CogVideoXTransformer3DModel": True,
        "Flux2Transformer2DModel": True,
        "FluxTransformer2DModel": True,
        "HunyuanVideo15Transformer3DModel": False,
        "HunyuanVideoTransformer3DModel": False,
        "MochiTransformer3DModel": False,
        "QwenImageTransformer2DModel": True,
        "SD3Transformer2DModel": False,
        "ZImageTransformer2DModel": False,
    }
)


def text_comes_first(transformer: str) -> bool:
    """Whether a model puts text before image in joint attention, for :class:`JointSequence`.

    Args:
        transformer: Name of the class in ``diffusers``.

    Raises:
        ValueError: it is not known.
    """
    if transformer not in TEXT_COMES_FIRST:
        message = (
            f"text_comes_first: {transformer!r} is none of {sorted(TEXT_COMES_FIRST)}; look at "
            f"what its attention processor concatenates"
        )
        raise ValueError(message)
    return TEXT_COMES_FIRST[transformer]


@dataclass(frozen=True)
class JointSequence:
    """Which rank holds which rows of text and image; equal on every rank.

    Attributes:
        text_rows: Rows of text, on all ranks together.
        image_splits: Image rows held by each rank.
        text_splits: Text rows held by each rank; ``None`` where every rank holds all of them.
        text_first: Whether the model puts text before image.
    """

    text_rows: int
    image_splits: tuple[int, ...]
    text_splits: tuple[int, ...] | None = None
    text_first: bool = True

    def __post_init__(self) -> None:
        """Refuse splits that are not of these rows."""
        text = self.text_splits
        if (
            self.text_rows < 0
            or min(self.image_splits, default=-1) < 0
            or (text is not None and (len(text) != self.world_size or min(text) < 0))
            or (text is not None and sum(text) != self.text_rows)
        ):
            message = (
                f"JointSequence: text_rows={self.text_rows}, image_splits={self.image_splits}, "
                f"text_splits={text} must be sizes >= 0, one for each rank, and text_splits add up "
                f"to text_rows"
            )
            raise ValueError(message)

    @classmethod
    def divided(
        cls,
        text_rows: int,
        image_rows: int,
        world_size: int,
        *,
        text: Literal["sharded", "replicated"] = "replicated",
        text_first: bool = True,
    ) -> JointSequence:
        """Divide as evenly as it goes; see :func:`ulysses_ops.even_splits`."""
        if text not in ("sharded", "replicated"):
            message = f"JointSequence: text={text!r} must be 'sharded' or 'replicated'"
            raise ValueError(message)
        text_splits = even_splits(text_rows, world_size) if text == "sharded" else None
        return cls(text_rows, even_splits(image_rows, world_size), text_splits, text_first)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.image_splits)

    @property
    def total_rows(self) -> int:
        """Rows that attend to each other."""
        return self.text_rows + sum(self.image_splits)

    def local_text_rows(self, rank: int) -> int:
        """Text rows that this rank holds."""
        return self.text_rows if self.text_splits is None else self.text_splits[rank]

    def local_rows(self, rank: int) -> int:
        """Rows that this rank holds."""
        return self.local_text_rows(rank) + self.image_splits[rank]

    def split(self, x: Tensor, rank: int) -> tuple[Tensor, Tensor]:
        """Views of the text and of the image rows of this rank's ``(B, S_local, ...)``."""
        text, image = self.local_text_rows(rank), self.image_splits[rank]
        if self.text_first:
            return x.narrow(1, 0, text), x.narrow(1, text, image)
        return x.narrow(1, image, text), x.narrow(1, 0, image)

    def join(self, text: Tensor, image: Tensor) -> Tensor:
        """Undo :meth:`split`, in the order of the model."""
        return torch.cat((text, image) if self.text_first else (image, text), dim=1)

    def shard(self, x: Tensor, rank: int) -> Tensor:
        """The rows of ``x``, ``(B, S, ...)`` in the order of the model, that ``rank`` holds."""
        return torch.cat([x.narrow(1, *run) for run in self._runs(rank)], dim=1)

    def arrange(self, mask: Tensor) -> Tensor:
        """Put a mask from the order of the model into the order in which a kernel sees the rows.

        Args:
            mask: ``(..., S_q, S)`` or ``(..., S)`` over the whole sequence, the same for every
                head; ``S_q`` is S, or 1 where the mask is over keys alone.
        """
        if mask.shape[-1] != self.total_rows:
            message = (
                f"JointSequence: mask {list(mask.shape)} must have {self.total_rows} keys in its "
                f"last dimension, text and image; build it over the whole sequence"
            )
            raise ValueError(message)
        if self.text_splits is None:
            return mask
        runs = [run for rank in range(self.world_size) for run in self._runs(rank)]
        mask = torch.cat([mask.narrow(-1, *run) for run in runs], dim=-1)
        if mask.dim() > 1 and mask.shape[-2] == self.total_rows:
            mask = torch.cat([mask.narrow(-2, *run) for run in runs], dim=-2)
        return mask

    def image_starts(self) -> tuple[int, ...]:
        """First row of each rank's image in the order of the model."""
        first = self.text_rows if self.text_first else 0
        return tuple(accumulate(self.image_splits[:-1], initial=first))

    @property
    def text_start(self) -> int:
        """First row of text in the order of the model."""
        return 0 if self.text_first else sum(self.image_splits)

    def _runs(self, rank: int) -> list[tuple[int, int]]:
        """First row and number of rows of what ``rank`` holds, in the order of the model."""
        before = 0 if self.text_splits is None else sum(self.text_splits[:rank])
        text = (self.text_start + before, self.local_text_rows(rank))
        image = (self.image_starts()[rank], self.image_splits[rank])
        return [text, image] if self.text_first else [image, text]


def ulysses_joint_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    comm: UlyssesCommunicator,
    joint: JointSequence,
    *,
    attention: AttentionKernel = sdpa,
    mask: Tensor | None = None,
    head_splits: Sequence[int] | None = None,
) -> Tensor:
    """Attention over text and image, of which this rank holds a part.

    Text that is sharded travels like image rows. Text that is replicated is not sent before
    attention, since every rank has it: a rank writes its own heads of it beside the image rows that
    arrive. After attention every rank gets all heads of all text rows.

    Args:
        q: ``(B, S_local, H, D)``, text and image of this rank in the order of the model.
        k: ``(B, S_local, H_kv, D)``; H is a multiple of ``H_kv``.
        v: As ``k``.
        comm: An open communicator.
        joint: Who holds what.
        attention: The kernel, on ``(B, S, heads, D)``; with ``mask`` it is called with that
            keyword.
        mask: Over all rows in the order of the model; see :meth:`JointSequence.arrange`.
        head_splits: As in :func:`ulysses_ops.ulysses_attention`.

    Returns:
        ``(B, S_local, H, D)``, rows as in ``q``, ready on the current stream.

    Raises:
        ValueError: shapes, splits, dtypes or devices are wrong; on every rank or on this rank alone
            as in :func:`ulysses_ops.ulysses_attention`.
        UlyssesError: closed, or a capture needs windows that are not reserved.

    Collective: every rank calls it with matching shapes, in the same order. Differentiable where an
    input requires grad; gradients are those of the sum of all ranks' losses, and those of a
    replicated row have to be added up over the ranks.

    Source: DeepSpeed-Ulysses, arXiv:2309.14509.
    """
    if joint.world_size != comm.world_size:
        message = (
            f"ulysses_joint_attention: joint is of {joint.world_size} ranks, the communicator of "
            f"{comm.world_size}; divide the rows over the ranks of the communicator"
        )
        raise ValueError(message)
    if mask is not None:
        masked = cast("Callable[..., Tensor]", attention)
        attention = partial(masked, mask=joint.arrange(mask))
    if joint.text_splits is not None:
        splits = tuple(joint.local_rows(rank) for rank in range(joint.world_size))
        options: dict[str, Any] = {"seq_splits": splits, "head_splits": head_splits}
        return ulysses_attention(q, k, v, comm, attention=attention, **options)
    share = share_heads(q.shape[2], k.shape[2], comm.world_size, as_tuple(head_splits))
    specs = _specs(joint, share, q, k)
    rows = joint.local_rows(comm.rank)
    if not q.shape[1] == k.shape[1] == v.shape[1] == rows:
        message = (
            f"ulysses_joint_attention: rank {comm.rank} holds q {list(q.shape)}, "
            f"k {list(k.shape)}, v {list(v.shape)}, but {joint} gives it {rows} rows; shard as it "
            f"says"
        )
        refuse(comm, specs, message)
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    if needs_grad or torch.compiler.is_compiling():
        return _attend_functionally(q, k, v, comm, joint, share, attention)
    windows = reserve(comm, specs)
    values, keys, queries, image_out, text_out = windows
    sent = [(joint.split(x, comm.rank), w) for x, w in zip((v, k, q), windows[:3], strict=True)]
    for (_, image), window in sent:
        check_source(comm, window, image, None, "scatter_into")
    with Exchange(comm) as exchange:
        for (text, image), window in sent:
            exchange.send(image, window)
            beside = window.tensor.narrow(1, joint.text_start, joint.text_rows)
            beside.copy_(_own_heads(text, window, comm.rank))
    arrived = (queries.tensor, keys.tensor, values.tensor)
    attended = attend(attention, share, comm.rank, *arrived)
    with Exchange(comm) as exchange:
        exchange.send(attended, image_out)
        exchange.send(attended, text_out)
    return joint.join(text_out.tensor, image_out.tensor)


def _specs(joint: JointSequence, share: HeadShare, q: Tensor, k: Tensor) -> list[WindowSpec]:
    """V, K, Q and the output's image and text rows, where text is replicated."""
    rows, ranks = joint.total_rows, joint.world_size

    def spec(name: str, x: Tensor, heads: Any, splits: Any, starts: Any) -> WindowSpec:
        direction: Direction = "gather" if name in ("image", "text") else "scatter"
        channel = "joint.out" if direction == "gather" else "joint.qkv"
        shape = (x.shape[0], rows, x.shape[2], x.shape[3])
        return WindowSpec(
            f"joint.{name}", direction, shape, x.dtype, channel, splits, heads[0], starts, heads[1]
        )

    image = (joint.image_splits, joint.image_starts())
    text = ((joint.text_rows,) * ranks, (joint.text_start,) * ranks)
    kv_heads, q_heads = (share.kv_splits, share.kv_starts), (share.q_splits, None)
    return [
        spec("v", k, kv_heads, *image),
        spec("k", k, kv_heads, *image),
        spec("q", q, q_heads, *image),
        spec("image", q, q_heads, *image),
        spec("text", q, q_heads, *text),
    ]


def _own_heads(text: Tensor, window: Window, rank: int) -> Tensor:
    return text.narrow(2, window.layout.head_offset(rank), window.layout.head_splits[rank])


def _attend_functionally(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    comm: UlyssesCommunicator,
    joint: JointSequence,
    share: HeadShare,
    attention: AttentionKernel,
) -> Tensor:
    rank, ranks = comm.rank, comm.world_size
    wholes = []
    for x, splits, starts in (
        (q, share.q_splits, tuple(accumulate(share.q_splits[:-1], initial=0))),
        (k, share.kv_splits, share.kv_starts),
        (v, share.kv_splits, share.kv_starts),
    ):
        text, image = joint.split(x, rank)
        arrived = scatter(
            image, comm, seq_splits=joint.image_splits, head_splits=splits, head_starts=starts
        )
        wholes.append(joint.join(text.narrow(2, starts[rank], splits[rank]), arrived))
    attended = attend(attention, share, rank, *wholes)
    heads = share.q_splits
    text = attended.narrow(1, joint.text_start, joint.text_rows)
    image = attended.narrow(1, joint.image_starts()[0], sum(joint.image_splits))
    everywhere = gather(
        text,
        comm,
        seq_splits=(joint.text_rows,) * ranks,
        head_splits=heads,
        seq_starts=(0,) * ranks,
    )
    return joint.join(
        everywhere, gather(image, comm, seq_splits=joint.image_splits, head_splits=heads)
    )
