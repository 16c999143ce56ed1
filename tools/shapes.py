"""Problem sizes: what the models of the benchmark exchange in one attention layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """Global shape of one of Q, K, V.

    Attributes:
        key: Short name on the command line.
        title: Name in tables.
        seq: ``S_global``.
        heads: H.
        head_dim: D.
        batch: B.
    """

    key: str
    title: str
    seq: int
    heads: int
    head_dim: int
    batch: int = 1

    @property
    def dims(self) -> tuple[int, int, int, int]:
        """``(B, S_global, H, D)``."""
        return (self.batch, self.seq, self.heads, self.head_dim)

    def local_source(self, world_size: int) -> tuple[int, int, int, int]:
        """``(B, S_local, H, D)``: what a rank sends by scatter and receives by gather."""
        return (self.batch, self.seq // world_size, self.heads, self.head_dim)

    def local_window(self, world_size: int) -> tuple[int, int, int, int]:
        """``(B, S_global, H_local, D)``: what a rank receives by scatter and sends by gather."""
        return (self.batch, self.seq, self.heads // world_size, self.head_dim)

    def bytes_per_peer(self, world_size: int, itemsize: int) -> int:
        """Bytes that a rank sends to one peer, the same for scatter and gather."""
        rows, heads = self.seq // world_size, self.heads // world_size
        return self.batch * rows * heads * self.head_dim * itemsize

    def fits(self, world_size: int) -> bool:
        """Whether it can be split evenly."""
        return self.seq % world_size == 0 and self.heads % world_size == 0


PRODUCTION = (
    Shape("wan-480p", "Wan 480p", 32760, 40, 128),
    Shape("flux", "FLUX", 4608, 24, 128),
    Shape("lingbot", "LingBot", 6240, 40, 128),
    Shape("minimax-h3", "MiniMax-H3", 37888, 56, 128),
)
# Blocks of these as well. Qwen-Image: 4096 image tokens and 256 of text, as an example prompt has.
BLOCKS = (
    PRODUCTION[1],
    Shape("qwen-image", "Qwen-Image, 256 text tokens", 4096 + 256, 24, 128),
    PRODUCTION[2],
    Shape("s9360", "S=9360, H=40", 9360, 40, 128),
    PRODUCTION[0],
    Shape("wan-720p", "Wan 720p", 75600, 40, 128),
    PRODUCTION[3],
)
# What language models gather along the sequence: at 2 ranks from 1 MB to 75 MB for a peer. The last
# is a row longer than divides by the ranks.
GATHERED = (
    Shape("latents-2k", "latents, 2K", 2 << 10, 1, 576),
    Shape("latents-16k", "latents, 16K", 16 << 10, 1, 576),
    Shape("latents-128k", "latents, 128K", 128 << 10, 1, 576),
    Shape("latents-256k", "latents, 256K", 256 << 10, 1, 576),
    Shape("mqa-4k", "K and V of one head, 4K", 4 << 10, 2, 128),
    Shape("mqa-32k", "K and V of one head, 32K", 32 << 10, 2, 128),
    Shape("mqa-256k", "K and V of one head, 256K", 256 << 10, 2, 128),
    Shape("indexer-8k", "keys of an indexer, 8K", 8 << 10, 1, 128),
    Shape("indexer-128k", "keys of an indexer, 128K", 128 << 10, 1, 128),
    Shape("latents-uneven", "latents, 128K and a row", (128 << 10) + 1, 1, 576),
)
SMALL_STEP = Shape("small", "small step", 4096, 8, 64)
FUNCTIONAL = (
    Shape("tiny", "tiny", 64, 4, 32),
    Shape("batch", "batch of 2", 96, 8, 64, batch=2),
    Shape("odd", "odd row size", 30, 6, 5),
)
# Smaller still: a CPU takes its time over the matrix products of a block.
FUNCTIONAL_BLOCKS = (FUNCTIONAL[0], Shape("batch", "batch of 2", 32, 4, 32, batch=2))
FUNCTIONAL_GATHERED = (
    Shape("latents", "latents", 32, 1, 72),
    Shape("uneven", "uneven", 29, 2, 16),
)


def select_shapes(keys: str, among: Sequence[Shape] = PRODUCTION) -> tuple[Shape, ...]:
    """Shapes named in a comma-separated list; all of ``among`` for ``"all"``.

    Those that are known but not in ``among`` are left out.

    Raises:
        ValueError: a name is unknown.
    """
    known = {shape.key for shape in (*PRODUCTION, *BLOCKS, *GATHERED)}
    wanted = [key.strip() for key in keys.split(",")]
    unknown = [key for key in wanted if key not in known and keys != "all"]
    if unknown:
        names = [shape.key for shape in (*BLOCKS, *GATHERED)]
        message = f"shapes: {unknown} are unknown; choose from {names} or 'all'"
        raise ValueError(message)
    by_key = {shape.key: shape for shape in among}
    chosen = list(by_key) if keys == "all" else [key for key in wanted if key in by_key]
    return tuple(by_key[key] for key in chosen)
