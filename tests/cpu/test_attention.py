"""ulysses_attention between gloo ranks against attention in one process."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from rank_pool import RankPool
from torch import Tensor

from ulysses_ops import (
    AttentionWindows,
    UlyssesCommunicator,
    UlyssesError,
    reserve_attention,
    sdpa,
    ulysses_attention,
)

Ranks = Callable[[int], RankPool]


def whole_qkv(
    world_size: int, heads: int = 4, kv_heads: int = 4, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    """The same on every rank."""
    generator = torch.Generator().manual_seed(7)
    rows = 3 * world_size
    sizes = (heads, kv_heads, kv_heads)
    q, k, v = (torch.randn(2, rows, size, 8, generator=generator).to(dtype) for size in sizes)
    return q, k, v


def rows_of(x: Tensor, rank: int, world_size: int) -> Tensor:
    return x.chunk(world_size, dim=1)[rank]


def compare(rank: int, world_size: int, heads: int, kv_heads: int, dtype: torch.dtype) -> None:
    wholes = whole_qkv(world_size, heads, kv_heads, dtype)
    q, k, v = (rows_of(x, rank, world_size) for x in wholes)
    expected = rows_of(sdpa(*wholes), rank, world_size)
    with UlyssesCommunicator(timeout_s=10) as comm:
        out = ulysses_attention(q, k, v, comm)
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
        assert out.shape == q.shape
        assert out.is_contiguous()
        # windows given: no lookup, no meeting; not copied out: the window itself
        windows = reserve_attention(comm, tuple(q.shape), tuple(k.shape), dtype)
        with mock.patch.object(comm.agreement, "exchange", side_effect=AssertionError):
            again = ulysses_attention(q, k, v, comm, windows=windows, copy_out=False)
            assert again.data_ptr() == windows.out.tensor.data_ptr()
            assert torch.equal(again, out)
            other = ulysses_attention(-q, k, v, comm)
        assert not torch.equal(other, out)
        assert torch.equal(again, other)  # valid only until the next attention of this shape


@pytest.mark.parametrize(
    ("world_size", "heads", "kv_heads"),
    [
        (1, 4, 4),
        (2, 4, 4),
        (4, 4, 4),
        (2, 40, 8),
        (4, 8, 4),
        (2, 6, 2),
        (1, 7, 1),
        # heads that do not divide, and KV heads that several ranks need
        (2, 28, 7),
        (2, 6, 3),
        (4, 8, 1),
        (4, 16, 2),
        (4, 42, 7),
        (4, 6, 6),
    ],
)
def test_attention_equals_that_of_one_process(
    ranks: Ranks, world_size: int, heads: int, kv_heads: int
) -> None:
    ranks(world_size).run(compare, heads, kv_heads, torch.float32, timeout_s=30)


def test_attention_in_double_precision(ranks: Ranks) -> None:
    ranks(2).run(compare, 4, 2, torch.float64, timeout_s=30)


def fused_views(rank: int, world_size: int) -> None:
    """q, k and v are views of one projection; the kernel and the scale are the caller's."""
    wholes = whole_qkv(world_size)
    fused = torch.stack([rows_of(x, rank, world_size) for x in wholes], dim=2)
    q, k, v = fused.unbind(dim=2)
    assert not q.is_contiguous()
    seen: list[torch.Size] = []

    def kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen.extend(x.shape for x in (q, k, v))
        return sdpa(q * 2, k, v)

    with UlyssesCommunicator(timeout_s=10) as comm:
        out = ulysses_attention(q, k, v, comm, attention=kernel)
    q, k, v = wholes
    expected = rows_of(sdpa(q * 2, k, v), rank, world_size)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
    assert seen == [torch.Size((2, 3 * world_size, 4 // world_size, 8))] * 3


def test_views_of_a_fused_projection_and_a_kernel_of_the_callers(ranks: Ranks) -> None:
    ranks(2).run(fused_views, timeout_s=30)


def test_sdpa_is_softmax_attention() -> None:
    q, k, v = whole_qkv(1, 4, 2, torch.float64)
    k4, v4 = (x.repeat_interleave(2, dim=2) for x in (k, v))  # head h reads KV head h // 2
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k4) / 8**0.5
    expected = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v4)
    torch.testing.assert_close(sdpa(q, k, v), expected)


def gradients(rank: int, world_size: int) -> None:
    wholes = [x.requires_grad_() for x in whole_qkv(world_size, dtype=torch.float64)]
    expected = torch.autograd.grad(sdpa(*wholes).sin().sum(), wholes)
    local = [rows_of(x.detach(), rank, world_size).clone().requires_grad_() for x in wholes]
    with UlyssesCommunicator(timeout_s=10) as comm:
        out = ulysses_attention(local[0], local[1], local[2], comm)
        found = torch.autograd.grad(out.sin().sum(), local)
    for mine, whole in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, rows_of(whole, rank, world_size))


def test_gradients_are_those_of_one_process(ranks: Ranks) -> None:
    ranks(2).run(gradients, timeout_s=30)


# ---- uneven splits -------------------------------------------------------------------------------


def uneven(
    rank: int, world_size: int, seq_splits: tuple[int, ...], heads: int, kv_heads: int
) -> None:
    """Eager with windows, then with gradients: values and gradients are those of one process."""
    generator = torch.Generator().manual_seed(7)
    shapes = [(2, sum(seq_splits), count, 8) for count in (heads, kv_heads, kv_heads)]
    wholes = [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]
    for whole in wholes:
        whole.requires_grad_()
    expected = sdpa(*wholes)
    expected_grads = torch.autograd.grad(expected.sin().sum(), wholes)
    local = [whole.detach().split(list(seq_splits), dim=1)[rank].clone() for whole in wholes]
    with UlyssesCommunicator(timeout_s=10) as comm:
        for _ in range(2):
            out = ulysses_attention(local[0], local[1], local[2], comm, seq_splits=seq_splits)
            torch.testing.assert_close(out, expected.split(list(seq_splits), dim=1)[rank])
        leaves = [x.requires_grad_() for x in local]
        out = ulysses_attention(leaves[0], leaves[1], leaves[2], comm, seq_splits=seq_splits)
        torch.testing.assert_close(out, expected.split(list(seq_splits), dim=1)[rank])
        found = torch.autograd.grad(out.sin().sum(), leaves)
    for mine, whole in zip(found, expected_grads, strict=True):
        torch.testing.assert_close(mine, whole.split(list(seq_splits), dim=1)[rank])


@pytest.mark.parametrize(
    ("seq_splits", "heads", "kv_heads"),
    [
        ((7, 6), 4, 4),
        ((7, 6), 28, 7),
        ((6, 7), 6, 3),
        ((13, 0), 4, 2),
        ((1, 1, 1, 0), 4, 4),
        ((251, 250, 250, 250), 8, 1),
        ((8, 7, 7, 7), 16, 2),
        ((3, 0, 0, 2), 6, 6),
    ],
)
def test_uneven_shards_and_shared_heads(
    ranks: Ranks, seq_splits: tuple[int, ...], heads: int, kv_heads: int
) -> None:
    ranks(len(seq_splits)).run(uneven, seq_splits, heads, kv_heads, timeout_s=40)


def heads_of_the_callers(rank: int, world_size: int) -> None:
    """A rank without heads attends with nothing and still gets its rows."""
    wholes = whole_qkv(world_size, 6, 3)
    q, k, v = (rows_of(x, rank, world_size) for x in wholes)
    expected = rows_of(sdpa(*wholes), rank, world_size)
    with UlyssesCommunicator(timeout_s=10) as comm:
        for head_splits in ((6, 0), (1, 5), (4, 2)):
            out = ulysses_attention(q, k, v, comm, head_splits=head_splits)
            torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
            shapes = (tuple(q.shape), tuple(k.shape))
            windows = reserve_attention(comm, *shapes, q.dtype, head_splits=head_splits)
            again = ulysses_attention(q, k, v, comm, windows=windows)
            assert torch.equal(again, out)
            with pytest.raises(ValueError, match=r"head_splits=\[3, 3\], but the windows are res"):
                ulysses_attention(q, k, v, comm, windows=windows, head_splits=(3, 3))
        for wrong in ((6, 1), (6,), (7, -1)):
            with pytest.raises(ValueError, match="2 sizes >= 0, one for each rank, that add up"):
                ulysses_attention(q, k, v, comm, head_splits=wrong)


def test_heads_as_the_caller_divides_them(ranks: Ranks) -> None:
    ranks(2).run(heads_of_the_callers, timeout_s=30)


def wrong_rows(rank: int, world_size: int, requires_grad: bool) -> list[str]:
    """Rank 1 alone has other rows than declared: an unsharded K, or all of its tensors too long."""
    generator = torch.Generator().manual_seed(7)
    q, k, v = (torch.randn(1, 7, 4, 8, generator=generator) for _ in range(3))
    q.requires_grad_(requires_grad)
    texts = []
    with UlyssesCommunicator(timeout_s=2) as comm:
        for seq_splits, wrong in (((4, 3), (3, 7, 7)), ((4, 2), (3, 3, 3))):
            q_rows, k_rows, v_rows = (4, 4, 4) if rank == 0 else wrong
            with pytest.raises(ValueError, match=r"rank 1 holds q .* but seq_splits") as error:
                ulysses_attention(
                    q[:, :q_rows], k[:, :k_rows], v[:, :v_rows], comm, seq_splits=seq_splits
                )
            texts.append(str(error.value))
        rows = (4, 3)[rank]
        out = ulysses_attention(q[:, :rows], k[:, :rows], v[:, :rows], comm, seq_splits=(4, 3))
        assert out.shape == (1, rows, 4, 8)
        if rank == 1:  # these splits are agreed on: nobody meets, and this rank raises alone
            with pytest.raises(ValueError, match="rank 1 holds q"):
                ulysses_attention(q, k, v, comm, seq_splits=(4, 3))
        with pytest.raises(ValueError, match=r"seq_splits=\[4\] must be 2 sizes"):
            ulysses_attention(q, k, v, comm, seq_splits=(4,))
        again = ulysses_attention(q[:, :rows], k[:, :rows], v[:, :rows], comm, seq_splits=(4, 3))
        assert torch.equal(again, out)
    return texts


@pytest.mark.parametrize("requires_grad", [False, True])
def test_rows_that_are_not_as_declared_are_refused_by_all(
    ranks: Ranks, requires_grad: bool
) -> None:
    first, second = ranks(2).run(wrong_rows, requires_grad, timeout_s=30)
    assert first == second


# ---- cross-attention -----------------------------------------------------------------------------


def replicated_keys(rank: int, world_size: int) -> None:
    """Every rank holds all keys and values: nothing is exchanged, and nobody is met."""
    generator = torch.Generator().manual_seed(7)
    whole = torch.randn(2, 7, 4, 8, generator=generator)
    k, v = (torch.randn(2, 5, 2, 8, generator=generator) for _ in range(2))
    q = whole.split([4, 3], dim=1)[rank]
    expected = sdpa(whole, k, v).split([4, 3], dim=1)[rank]
    with UlyssesCommunicator(timeout_s=10) as comm:
        with mock.patch.object(comm.agreement, "exchange", side_effect=AssertionError):
            out = ulysses_attention(q, k, v, comm, kv="replicated")
        torch.testing.assert_close(out, expected)
        with pytest.raises(ValueError, match="must have the same rows; pass kv='replicated'"):
            ulysses_attention(q, k, v, comm)
        with pytest.raises(ValueError, match="kv='both' must be 'sharded' or 'replicated'"):
            ulysses_attention(q, k, v, comm, kv="both")  # type: ignore[arg-type]


def test_replicated_keys_and_values_are_not_sent(ranks: Ranks) -> None:
    ranks(2).run(replicated_keys, timeout_s=20)


# ---- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("heads", "kv_heads", "world_size", "match"),
    [
        (40, 6, 4, "H=40 must be a multiple of H_kv=6"),
        (42, 8, 4, "H=42 must be a multiple of H_kv=8"),
        (4, 8, 2, "H=4 must be a multiple of H_kv=8"),
        (
            3,
            3,
            4,
            r"H=3 cannot give each of world_size=4 ranks a head; use one of \[1, 2, 3\] ranks",
        ),
    ],
)
def test_the_error_names_the_count_that_fails(
    heads: int, kv_heads: int, world_size: int, match: str
) -> None:
    """Said from the shapes alone: no other rank is needed, and none waits."""
    q, k, v = whole_qkv(1, heads, kv_heads)
    comm = object.__new__(UlyssesCommunicator)
    comm.world_size = world_size
    with pytest.raises(ValueError, match=f"^ulysses_attention: {match}"):
        ulysses_attention(q, k, v, comm)


def wrong_inputs() -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    q, k, v = whole_qkv(2)
    return {
        r"q \[6, 4, 8\], k": (q[0], k, v),
        r"k \[2, 6, 4, 8\], v \[2, 5, 4, 8\]": (q, k, v[:, :5]),
        r"q \[2, 6, 4, 8\], k \[2, 5, 4, 8\]": (q, k[:, :5], v[:, :5]),
        r"q \[2, 6, 4, 8\], k \[2, 6, 4, 4\]": (q, k[..., :4], v[..., :4]),
        r"q \[1, 6, 4, 8\], k \[2, 6, 4, 8\]": (q[:1], k, v),
        "dtypes torch.float32, torch.float32, torch.bfloat16": (q, k, v.bfloat16()),
        "dtypes torch.float64, torch.float32, torch.float32": (q.double(), k, v),
    }


def refuse(rank: int, world_size: int) -> list[str]:
    """Wrong calls, the same on every rank; a right one works after each."""
    q, k, v = whole_qkv(world_size)
    texts = []
    with UlyssesCommunicator(timeout_s=10) as comm:
        for pattern, inputs in wrong_inputs().items():
            with pytest.raises(ValueError, match=f"^ulysses_attention: .*{pattern}") as error:
                ulysses_attention(*inputs, comm)
            texts.append(str(error.value))
            assert ulysses_attention(q, k, v, comm).shape == q.shape
    with pytest.raises(UlyssesError, match="is closed; construct a new one"):
        ulysses_attention(q, k, v, comm)
    return texts


def test_wrong_inputs_are_refused(ranks: Ranks) -> None:
    first, second = ranks(2).run(refuse, timeout_s=30)
    assert first == second


def windows_of_another_shape(rank: int, world_size: int) -> None:
    q, k, v = whole_qkv(world_size)
    with UlyssesCommunicator(timeout_s=10) as comm:
        shape = (1, *q.shape[1:])
        windows: AttentionWindows = reserve_attention(comm, shape, shape, q.dtype)
        with pytest.raises(ValueError, match=r"x is \[2, 6, 4, 8\].*takes \[1, 6, 4, 8\]"):
            ulysses_attention(q, k, v, comm, windows=windows)
        q, k, v = q[:1], k[:1], v[:1]
        assert ulysses_attention(q, k, v, comm, windows=windows).shape == shape


def test_windows_of_another_shape_are_refused(ranks: Ranks) -> None:
    ranks(2).run(windows_of_another_shape, timeout_s=30)


def fail_in_kernel(rank: int, world_size: int) -> None:
    """An exception between the exchanges leaves nothing in flight."""
    q, k, v = whole_qkv(world_size)

    def kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise KeyError("ours")

    with UlyssesCommunicator(timeout_s=10) as comm:
        with pytest.raises(KeyError, match="ours"):
            ulysses_attention(q, k, v, comm, attention=kernel)
        assert ulysses_attention(q, k, v, comm).shape == q.shape


def test_a_kernel_that_raises_leaves_nothing_in_flight(ranks: Ranks) -> None:
    ranks(2).run(fail_in_kernel, timeout_s=30)
