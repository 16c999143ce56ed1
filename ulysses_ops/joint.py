"""Which rank holds which rows of text and image, where both are one sequence; pure.

NOTE [joint order]: a kernel sees rows in another order than the model where text is sharded, for
rows arrive rank by rank: rank 0's text and image, then rank 1's. Attention does not depend on the
order of keys, and each query's result goes back to where the query came from; but a mask has to be
put into the same order. Where text is replicated the order is the model's.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor

from .kinds import check_sizes
from .plan import even_splits

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
        check_sizes("JointSequence", "text_rows", (self.text_rows,), "a whole number")
        check_sizes("JointSequence", "image_splits", self.image_splits)
        check_sizes("JointSequence", "text_splits", text)
        # Not min(): compilers do not trace it with a default, and note which one is the smallest.
        if (
            self.text_rows < 0
            or len(self.image_splits) == 0
            or any(rows < 0 for rows in (*self.image_splits, *(text or ())))
            or (text is not None and len(text) != self.world_size)
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
    def row_splits(self) -> tuple[int, ...]:
        """Rows that each rank holds."""
        return tuple(self.local_rows(rank) for rank in range(self.world_size))

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
