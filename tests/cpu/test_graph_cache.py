"""The bookkeeping of graphs, padding, and the cache where nothing can be captured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rank_pool import RankPool
from torch import Tensor

from ulysses_ops import UlyssesCommunicator, ulysses_attention
from ulysses_ops.graphs import Bucket, GraphCache, capture_step
from ulysses_ops.graphs.ledger import Ledger

CALLS = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 40)), max_size=60)


@given(calls=CALLS, max_entries=st.integers(1, 4), max_bytes=st.none() | st.integers(0, 100))
def test_a_ledger_keeps_its_bounds_and_drops_the_oldest(
    calls: list[tuple[int, int]], max_entries: int, max_bytes: int | None
) -> None:
    ledger: Ledger[int, str] = Ledger(max_entries, max_bytes)
    order: list[int] = []  # keys, least recently used first
    sizes: dict[int, int] = {}
    for key, size in calls:
        if ledger.use(key) is not None:
            order.remove(key)
            order.append(key)
            continue
        assert key not in order
        if not ledger.fits(size):
            continue
        dropped = ledger.make_room(size)
        assert dropped == [f"graph {old}" for old in order[: len(dropped)]]
        order = order[len(dropped) :]
        ledger.add(key, f"graph {key}", size)
        order.append(key)
        sizes[key] = size
        assert len(ledger) == len(order) <= max_entries
        assert ledger.num_bytes == sum(sizes[kept] for kept in order)
        assert max_bytes is None or ledger.num_bytes <= max_bytes
        assert list(ledger) == [f"graph {kept}" for kept in order]
    assert len(set(ledger.numbers())) == len(order)
    assert ledger.clear() == [f"graph {kept}" for kept in order]
    assert len(ledger) == 0


def test_nothing_is_dropped_without_need() -> None:
    ledger: Ledger[str, int] = Ledger(2, 10)
    ledger.add("a", 1, 5)
    assert ledger.make_room(5) == []
    ledger.add("b", 2, 5)
    assert ledger.make_room(1) == [1]


@given(length=st.integers(1, 40))
def test_padding_keeps_what_is_there(length: int) -> None:
    bucket = Bucket(("prompt", 1), 1, (8, 16, 32), fill=-1)
    prompt, mask = torch.randn(2, length, 3), torch.ones(2, length)
    padded = bucket.padded((5, mask), {"prompt": prompt, "other": None})
    if length > 32:
        assert padded is None
        return
    assert padded is not None
    (five, long_mask), named = padded
    assert five == 5
    assert named["other"] is None
    assert (
        named["prompt"].shape[1]
        == long_mask.shape[1]
        == min(bound for bound in (8, 16, 32) if bound >= length)
    )
    assert torch.equal(named["prompt"][:, :length], prompt)
    assert bool((named["prompt"][:, length:] == -1).all())
    assert torch.equal(long_mask[:, :length], mask)


def test_masks_stay_masks() -> None:
    bucket = Bucket(("mask",), 1, (4,))
    padded = bucket.padded((), {"mask": torch.ones(1, 2, dtype=torch.bool)})
    assert padded is not None
    assert padded[1]["mask"].tolist() == [[True, True, False, False]]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ({}, "input 'prompt' is NoneType"),
        ({"prompt": torch.zeros(3)}, r"input 'prompt' is \[3\]"),
        ({"prompt": torch.zeros(1, 3), "mask": torch.zeros(1, 4)}, "differs between inputs"),
    ],
)
def test_what_cannot_be_padded_is_refused(call: dict[str, Tensor], said: str) -> None:
    names = ("prompt", "mask") if "mask" in call else ("prompt",)
    with pytest.raises(ValueError, match=said):
        Bucket(names, 1, (8,)).padded((), call)


@pytest.mark.parametrize("lengths", [(), (4, 4), (8, 4), (0, 4)])
def test_useless_buckets_are_refused(lengths: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="Bucket: inputs="):
        Bucket(("x",), 1, lengths)


def test_inputs_of_a_bucket_are_no_single_name() -> None:
    with pytest.raises(ValueError, match="inputs='prompt' must be a tuple"):
        Bucket("prompt", 1, (4,))  # type: ignore[arg-type]


def cached_on_cpu(rank: int, world_size: int) -> tuple[int, int, int]:
    """The same program without GPUs: every call is eager, and right."""
    with UlyssesCommunicator(device="cpu") as comm:
        cache = GraphCache(comm, lambda q, scale: ulysses_attention(q, q, q, comm) * scale)
        q = torch.full((1, 2, world_size, 4), float(rank), requires_grad=True)
        for scale in (1.0, 2.0):
            out = cache(q, scale=scale)
            assert not out.requires_grad
            with torch.no_grad():
                assert torch.equal(out, ulysses_attention(q, q, q, comm) * scale)
        with pytest.raises(RuntimeError, match="cannot be captured; use a CUDA device"):
            capture_step(comm, lambda: None)
        return cache.stats.eager, cache.stats.captures, cache.stats.hits


def test_the_cache_on_a_cpu(ranks: Callable[[int], RankPool]) -> None:
    assert ranks(2).run(cached_on_cpu) == [(2, 0, 0)] * 2


@pytest.mark.parametrize("bound", ["max_graphs", "capture_after", "warmup", "max_bytes"])
def test_bounds_below_one_are_refused(bound: str) -> None:
    said = f"GraphCache: {bound}=0 must be a whole number >= 1"
    with UlyssesCommunicator(device="cpu") as comm, pytest.raises(ValueError, match=said):
        GraphCache(comm, lambda: None, **{bound: 0})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"buckets": 3}, "buckets=3 must be a list of Buckets"),
        ({"buckets": [3]}, "each of buckets=3 must be in a list of Buckets"),
        ({"generators": 3}, "generators=3 must be a list of torch.Generators"),
        ({"generators": "ab"}, "generators='ab' must be a list of torch.Generators"),
        ({"generators": [3]}, "each of generators=3 must be in a list of torch.Generators"),
        ({"copy_out": "no"}, "copy_out='no' must be True or False"),
        ({"max_bytes": True}, "max_bytes=True must be a whole number >= 1"),
        ({"max_bytes": 2.5}, "max_bytes=2.5 must be a whole number >= 1"),
        ({"max_graphs": True}, "max_graphs=True must be a whole number >= 1"),
    ],
)
def test_options_of_another_kind_are_refused(wrong: dict[str, Any], said: str) -> None:
    with UlyssesCommunicator(device="cpu") as comm:
        with pytest.raises(ValueError, match=f"^GraphCache: {said}$"):
            GraphCache(comm, lambda: None, **wrong)
        if "generators" in wrong:
            with pytest.raises(ValueError, match=f"^capture_step: {said}$"):
                capture_step(comm, lambda: None, **wrong)


def test_options_may_be_gone_through_once() -> None:
    bucket = Bucket(("x",), 0, (4,))
    with UlyssesCommunicator(device="cpu") as comm:
        cache = GraphCache(
            comm,
            lambda x: x,
            buckets=(one for one in [bucket]),  # type: ignore[arg-type]
            generators=iter([torch.Generator()]),  # type: ignore[arg-type]
        )
        for _ in range(2):
            with pytest.raises(ValueError, match="input 'x' is NoneType"):
                cache()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"dim": "0"}, "dim='0' must be a whole number"),
        ({"dim": True}, "dim=True must be a whole number"),
        ({"lengths": 4}, "lengths=4 must be lengths that ascend"),
        ({"lengths": None}, "lengths=None must be lengths that ascend"),
        ({"lengths": (2.5,)}, "lengths holds 2.5 and must be lengths that ascend"),
        ({"lengths": (True,)}, "lengths holds True and must be lengths that ascend"),
        ({"fill": "x"}, "fill='x' must be a number, True or False"),
        ({"fill": None}, "fill=None must be a number, True or False"),
        ({"inputs": None}, "inputs=None must be a tuple of keywords or positions"),
        ({"inputs": (None,)}, "inputs holds None and must be a tuple of keywords or positions"),
        ({"inputs": (True,)}, "inputs holds True and must be a tuple of keywords or positions"),
        ({"inputs": (-1,)}, "inputs holds -1 and must be a tuple of keywords or positions"),
    ],
)
def test_buckets_of_another_kind_are_refused(wrong: dict[str, Any], said: str) -> None:
    usual: dict[str, Any] = {"inputs": ("x",), "dim": 0, "lengths": (4,)}
    with pytest.raises(ValueError, match=f"^Bucket: {said}"):
        Bucket(**{**usual, **wrong})


def test_lists_will_do_for_a_bucket() -> None:
    bucket = Bucket(["x", 0], 0, [2, 4], fill=0.5)  # type: ignore[arg-type]
    assert (bucket.inputs, bucket.lengths) == (("x", 0), (2, 4))
    assert hash(bucket) == hash(Bucket(("x", 0), 0, (2, 4), 0.5))
