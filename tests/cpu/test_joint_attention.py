"""Joint attention of image and text between ranks, against attention in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_pool import RankPool
from torch import Tensor

from ulysses_ops import JointSequence, UlyssesCommunicator, sdpa, ulysses_joint_attention
from ulysses_ops.joint_attention import attend_as_computed, replicate_rows

Ranks = Callable[[int], RankPool]
BATCH, HEADS, DIM = 2, 4, 8


def assert_near(got: Tensor, expected: Tensor) -> None:
    """Float32 sums of another order."""
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def masked(q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2)


def joint(first: Tensor, second: Tensor, is_text_first: bool) -> Tensor:
    return torch.cat([first, second] if is_text_first else [second, first], dim=1)


def against_one_process(
    rank: int, world_size: int, text_rows: int, is_text_first: bool, is_sharded: bool, grad: bool
) -> None:
    """Padding within the text, another amount for each sample."""
    generator = torch.Generator().manual_seed(5)
    image_rows = 3 * world_size
    text, image = (
        torch.randn(3, BATCH, rows, HEADS, DIM, generator=generator)
        for rows in (text_rows, image_rows)
    )
    is_text = torch.arange(text_rows) < torch.tensor([[2], [text_rows - 1]])
    mask = joint(is_text, torch.ones(BATCH, image_rows, dtype=torch.bool), is_text_first)
    mask = mask[:, None, None, :]
    wholes = [joint(*pair, is_text_first) for pair in zip(text, image, strict=True)]
    wholes[2].requires_grad_()
    expected = masked(*wholes, mask=mask)

    def own(x: Tensor) -> Tensor:
        return x.chunk(world_size, dim=1)[rank]

    def local(x: Tensor, y: Tensor) -> Tensor:
        return joint(own(x) if is_sharded else x, own(y), is_text_first)

    q, k, v = (local(*pair).requires_grad_(grad) for pair in zip(text, image, strict=True))
    sequence = JointSequence.divided(
        text_rows,
        image_rows,
        world_size,
        text="sharded" if is_sharded else "replicated",
        text_first=is_text_first,
    )
    with UlyssesCommunicator(timeout_s=20) as comm, torch.set_grad_enabled(grad):
        for _ in range(2):
            out = attend_as_computed(
                comm,
                lambda: v,
                lambda: k,
                lambda: q,
                joint=sequence,
                attention=masked,
                mask=mask,
            )
        right = local(*parts(expected, text_rows, is_text_first))
        assert_near(out, right)
        if grad:
            # Of the image rows alone: replicated rows of the result are there once on each rank.
            share = v.shape[1] - image_rows // world_size
            _, own_image = parts(out, share, is_text_first)
            (found,) = torch.autograd.grad(own_image.square().sum(), [v])
            _, whole_image = parts(expected, text_rows, is_text_first)
            (whole,) = torch.autograd.grad(whole_image.square().sum(), [wholes[2]])
            _, own_gradient = parts(found, share, is_text_first)
            _, gradient = parts(whole, text_rows, is_text_first)
            assert_near(own_gradient, own(gradient))


def parts(x: Tensor, text_rows: int, is_text_first: bool) -> tuple[Tensor, Tensor]:
    """Text rows and image rows."""
    if is_text_first:
        return x[:, :text_rows], x[:, text_rows:]
    return x[:, x.shape[1] - text_rows :], x[:, : x.shape[1] - text_rows]


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("is_text_first", [False, True])
@pytest.mark.parametrize(
    ("world_size", "text_rows", "is_sharded"),
    [(1, 5, True), (1, 5, False), (2, 8, True), (2, 8, False), (2, 5, False), (4, 7, False)],
)
def test_joint_attention(
    ranks: Ranks,
    world_size: int,
    text_rows: int,
    is_sharded: bool,
    is_text_first: bool,
    grad: bool,
) -> None:
    arguments = (text_rows, is_text_first, is_sharded, grad)
    ranks(world_size).run(against_one_process, *arguments, timeout_s=30)


def rows_of_all(rank: int, world_size: int) -> None:
    parts = torch.randn(world_size, BATCH, 3, 5, generator=torch.Generator().manual_seed(1))
    expected = torch.cat(list(parts), dim=1)
    with UlyssesCommunicator(timeout_s=20) as comm:
        for grad in (False, True):
            with torch.set_grad_enabled(grad):
                first = replicate_rows(comm, parts[rank])
                second = replicate_rows(comm, -parts[rank])
            assert torch.equal(first, expected)
            assert torch.equal(second, -expected)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_replicated_rows_are_the_callers_own(ranks: Ranks, world_size: int) -> None:
    ranks(world_size).run(rows_of_all, timeout_s=30)


def own_copy_or_window(rank: int, world_size: int) -> None:
    x = torch.randn(1, 2, HEADS, DIM, generator=torch.Generator().manual_seed(rank))
    with UlyssesCommunicator(timeout_s=20) as comm, torch.no_grad():
        kept = attend_as_computed(comm, lambda: x, lambda: x, lambda: x)
        window = attend_as_computed(comm, lambda: x, lambda: x, lambda: x, copy_out=False)
        assert torch.equal(kept, window)
        attend_as_computed(comm, lambda: -x, lambda: x, lambda: x)
        assert torch.equal(kept, -window)  # valid only until the next attention of this shape


def test_without_copy_out_the_result_is_a_window(ranks: Ranks) -> None:
    ranks(2).run(own_copy_or_window, timeout_s=30)


@settings(max_examples=50, deadline=None)
@given(
    world_size=st.integers(1, 4),
    first=st.integers(0, 5),
    second=st.integers(0, 5),
    text_first=st.booleans(),
)
def test_keys_of_a_mask_go_where_their_rank_puts_them(
    world_size: int, first: int, second: int, text_first: bool
) -> None:
    counts = (first, second) if text_first else (second, first)
    sequence = JointSequence.divided(
        counts[0] * world_size,
        counts[1] * world_size,
        world_size,
        text="sharded",
        text_first=text_first,
    )
    mask = torch.arange((first + second) * world_size)
    count = first * world_size
    by_rank = [
        torch.cat([mask[:count][r * first : (r + 1) * first], mask[count:][r * second :][:second]])
        for r in range(world_size)
    ]
    assert torch.equal(sequence.arrange(mask), torch.cat(by_rank))


# ---- fewer KV heads, uneven rows, refusals -------------------------------------------------------


def shared_and_uneven(rank: int, world_size: int, text: Literal["sharded", "replicated"]) -> None:
    """Six query heads over two KV heads, told beforehand, since V leaves before Q is there."""
    sequence = JointSequence.divided(5, 7, world_size, text=text)
    generator = torch.Generator().manual_seed(3)
    wholes = [torch.randn(1, 12, heads, DIM, generator=generator) for heads in (6, 2, 2)]
    expected = sequence.shard(sdpa(*wholes), rank)
    q, k, v = (sequence.shard(x, rank) for x in wholes)
    with UlyssesCommunicator(timeout_s=20) as comm, torch.no_grad():
        out = attend_as_computed(comm, lambda: v, lambda: k, lambda: q, num_heads=6, joint=sequence)
        assert_near(out, expected)
        with pytest.raises(ValueError, match=r"rank \d computes v \[1, \d, 2, 8\], but"):
            attend_as_computed(comm, lambda: v[:, 1:], lambda: k, lambda: q, joint=sequence)
        with pytest.raises(ValueError, match="a mask needs joint="):
            attend_as_computed(comm, lambda: v, lambda: k, lambda: q, mask=torch.ones(1))
        assert_near(ulysses_joint_attention(q, k, v, comm, sequence), expected)


@pytest.mark.parametrize("text", ["sharded", "replicated"])
def test_shared_heads_and_uneven_rows(ranks: Ranks, text: Literal["sharded", "replicated"]) -> None:
    ranks(2).run(shared_and_uneven, text, timeout_s=30)
