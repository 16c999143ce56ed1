"""Text and image in one sequence: masked attention between gloo ranks is that of one process."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from rank_pool import RankPool
from torch import Tensor

from ulysses_ops import JointSequence, UlyssesCommunicator, sdpa, ulysses_joint_attention
from ulysses_ops.joint import TEXT_COMES_FIRST, text_comes_first

Ranks = Callable[[int], RankPool]

REPLICATED, SHARDED = "replicated", "sharded"


def qkv(joint: JointSequence, heads: int = 4, kv_heads: int = 4) -> list[Tensor]:
    """Whole tensors in the order of the model, the same on every rank."""
    generator = torch.Generator().manual_seed(5)
    shapes = [(2, joint.total_rows, count, 8) for count in (heads, kv_heads, kv_heads)]
    return [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]


def padding_mask(joint: JointSequence, real_text: int) -> Tensor:
    """Nobody attends to text rows that are padding: ``(1, 1, 1, S)``."""
    text = torch.arange(joint.text_rows) < real_text
    image = torch.ones(sum(joint.image_splits), dtype=torch.bool)
    return torch.cat((text, image) if joint.text_first else (image, text)).view(1, 1, 1, -1)


def pairs_mask(joint: JointSequence) -> Tensor:
    """Some mask over queries and keys, added to the scores: ``(2, 1, S, S)``."""
    generator = torch.Generator().manual_seed(6)
    rows = joint.total_rows
    return torch.randn(2, 1, rows, rows, dtype=torch.float64, generator=generator)


def compare(
    rank: int,
    world_size: int,
    joint: JointSequence,
    mask: Tensor,
    heads: int,
    kv_heads: int,
) -> None:
    wholes = qkv(joint, heads, kv_heads)
    expected = joint.shard(sdpa(*wholes, mask=mask), rank)
    q, k, v = (joint.shard(x, rank) for x in wholes)
    assert q.shape[1] == joint.local_rows(rank)
    with UlyssesCommunicator(timeout_s=10) as comm:
        out = ulysses_joint_attention(q, k, v, comm, joint, mask=mask)
        torch.testing.assert_close(out, expected)
        if not torch.equal(mask, joint.arrange(mask)):
            with mock.patch.object(JointSequence, "arrange", lambda self, mask: mask):
                blind = ulysses_joint_attention(q, k, v, comm, joint, mask=mask)
            assert q.numel() == 0 or not torch.allclose(blind, expected), "any mask is right here"
        unmasked = ulysses_joint_attention(q, k, v, comm, joint)
        torch.testing.assert_close(unmasked, joint.shard(sdpa(*wholes), rank))
        assert q.numel() == 0 or not torch.allclose(unmasked, out)


@pytest.mark.parametrize("text", [REPLICATED, SHARDED])
@pytest.mark.parametrize("text_first", [True, False])
@pytest.mark.parametrize("over_pairs", [True, False])
def test_padded_text_beside_a_small_image(
    ranks: Ranks, text: Any, text_first: bool, over_pairs: bool
) -> None:
    """8 rows of text, 2 of them real, and 4 of image on 2 ranks."""
    joint = JointSequence.divided(8, 4, 2, text=text, text_first=text_first)
    mask = pairs_mask(joint) if over_pairs else padding_mask(joint, 2)
    ranks(2).run(compare, joint, mask, 4, 2, timeout_s=20)


@pytest.mark.parametrize("text", [REPLICATED, SHARDED])
@pytest.mark.parametrize("text_first", [True, False])
def test_uneven_rows_and_shared_heads(ranks: Ranks, text: Any, text_first: bool) -> None:
    joint = JointSequence.divided(5, 7, 4, text=text, text_first=text_first)
    ranks(4).run(compare, joint, padding_mask(joint, 3), 6, 2, timeout_s=20)
    joint = JointSequence.divided(2, 3, 4, text=text, text_first=text_first)
    ranks(4).run(compare, joint, pairs_mask(joint), 8, 1, timeout_s=20)
    joint = JointSequence.divided(0, 7, 2, text=text, text_first=text_first)
    ranks(2).run(compare, joint, pairs_mask(joint), 4, 4, timeout_s=20)


def gradients(rank: int, world_size: int, joint: JointSequence) -> None:
    """Every rank's loss is a sum over its own rows, replicated text rows counted once a rank."""
    wholes = [x.requires_grad_() for x in qkv(joint, 6, 3)]
    mask = padding_mask(joint, 3)
    out = sdpa(*wholes, mask=mask)
    loss = torch.stack([joint.shard(out.sin(), other).sum() for other in range(world_size)]).sum()
    expected = torch.autograd.grad(loss, wholes)
    local = [joint.shard(x.detach(), rank).requires_grad_() for x in wholes]
    with UlyssesCommunicator(timeout_s=10) as comm:
        out = ulysses_joint_attention(local[0], local[1], local[2], comm, joint, mask=mask)
        torch.testing.assert_close(out, joint.shard(sdpa(*wholes, mask=mask), rank))
        found = torch.autograd.grad(out.sin().sum(), local)
    for mine, whole in zip(found, expected, strict=True):
        text, image = joint.split(mine, rank)
        expected_text, expected_image = joint.split(joint.shard(whole, rank), rank)
        torch.testing.assert_close(image, expected_image)
        if joint.text_splits is None:
            text = text.contiguous()
            torch.distributed.all_reduce(text)
        torch.testing.assert_close(text, expected_text)


@pytest.mark.parametrize("text", [REPLICATED, SHARDED])
@pytest.mark.parametrize("text_first", [True, False])
def test_gradients(ranks: Ranks, text: Any, text_first: bool) -> None:
    joint = JointSequence.divided(5, 7, 2, text=text, text_first=text_first)
    ranks(2).run(gradients, joint, timeout_s=20)


# ---- models --------------------------------------------------------------------------------------


def test_the_page_lists_the_order_of_every_model() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "shapes.md").read_text()
    listed = dict(
        re.findall(r"^\| `(\w+)` \| (text, image|image, text) \|", page, flags=re.MULTILINE)
    )
    first = {name: order == "text, image" for name, order in listed.items()}
    assert first == dict(TEXT_COMES_FIRST)
    assert text_comes_first("FluxTransformer2DModel")
    with pytest.raises(ValueError, match=r"'WanTransformer3DModel' is none of \['AuraFlow"):
        text_comes_first("WanTransformer3DModel")


# ---- the value -----------------------------------------------------------------------------------


def test_shards_are_runs_of_the_model_s_order() -> None:
    rows = torch.arange(12).view(1, 12)
    first = JointSequence.divided(5, 7, 2, text="sharded")
    assert first.shard(rows, 0).tolist() == [[0, 1, 2, 5, 6, 7, 8]]
    assert first.shard(rows, 1).tolist() == [[3, 4, 9, 10, 11]]
    last = JointSequence.divided(5, 7, 2, text="sharded", text_first=False)
    assert last.shard(rows, 0).tolist() == [[0, 1, 2, 3, 7, 8, 9]]
    assert last.arrange(rows).tolist() == [[0, 1, 2, 3, 7, 8, 9, 4, 5, 6, 10, 11]]
    everywhere = JointSequence.divided(5, 7, 2, text_first=False)
    assert everywhere.shard(rows, 1).tolist() == [[4, 5, 6, 7, 8, 9, 10, 11]]
    assert everywhere.arrange(rows) is rows
    for joint in (first, last, everywhere):
        x = torch.randn(2, 12, 3)
        for rank in range(2):
            mine = joint.shard(x, rank)
            assert torch.equal(joint.join(*joint.split(mine, rank)), mine)


@pytest.mark.parametrize(
    "values",
    [
        {"text_rows": -1, "image_splits": (2, 2)},
        {"text_rows": 4, "image_splits": ()},
        {"text_rows": 4, "image_splits": (2, -2)},
        {"text_rows": 4, "image_splits": (2, 2), "text_splits": (4,)},
        {"text_rows": 4, "image_splits": (2, 2), "text_splits": (2, 3)},
    ],
)
def test_rows_that_do_not_add_up_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"^JointSequence: text_rows=.* must be sizes >= 0"):
        JointSequence(**values)


def refuse(rank: int, world_size: int) -> list[str]:
    joint = JointSequence.divided(4, 6, 2)
    q, k, v = (joint.shard(x, rank) for x in qkv(joint))
    texts = []
    with UlyssesCommunicator(timeout_s=2) as comm:
        with pytest.raises(ValueError, match="joint is of 3 ranks, the communicator of 2") as error:
            ulysses_joint_attention(q, k, v, comm, JointSequence.divided(4, 6, 3))
        texts.append(str(error.value))
        with pytest.raises(ValueError, match=r"mask \[1, 9\] must have 10 keys") as error:
            ulysses_joint_attention(q, k, v, comm, joint, mask=torch.ones(1, 9, dtype=torch.bool))
        texts.append(str(error.value))
        wrong = {
            "must be \\(B, S_local, H, D\\)": (q, k[:1], v[:1], None),
            "twice \\(B, S_local, H_kv, D\\)": (q[0], k, v, None),
            "dtypes torch.float16, torch": (q.half(), k, v, None),
            "mask \\[9, 10\\] of torch.bool": (q, k, v, torch.ones(9, 10, dtype=torch.bool)),
            "mask \\[10, 10\\] of torch.int64": (q, k, v, torch.ones(10, 10, dtype=torch.int64)),
        }
        for pattern, (a, b, c, mask) in wrong.items():
            with pytest.raises(ValueError, match=f"^ulysses_joint_attention: .*{pattern}"):
                ulysses_joint_attention(a, b, c, comm, joint, mask=mask)
        cut = slice(0, 6 if rank == 1 else None)  # on rank 1 alone
        with pytest.raises(ValueError, match=r"rank 1 holds q \[2, 6, .* gives it 7 row") as error:
            ulysses_joint_attention(q[:, cut], k[:, cut], v[:, cut], comm, joint)
        texts.append(str(error.value))
        wanted = q[:, cut].clone().requires_grad_()  # without windows: another meeting
        with pytest.raises(ValueError, match=r"rank 1 holds q \[2, 6, .* gives it 7 row") as error:
            ulysses_joint_attention(wanted, k[:, cut], v[:, cut], comm, joint)
        texts.append(str(error.value))
        assert ulysses_joint_attention(q, k, v, comm, joint).shape == q.shape
    return texts


def test_rows_that_are_not_as_divided_are_refused_by_all(ranks: Ranks) -> None:
    first, second = ranks(2).run(refuse, timeout_s=20)
    assert first == second
