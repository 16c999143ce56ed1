"""Attention over latents: both forms, selected rows, and parts that are merged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ulysses_ops.indexer import index_scores
from ulysses_ops.latent import (
    LatentHeads,
    attend_latent,
    attend_selected,
    merge_partials,
    partial_attention,
)

NOPE, ROPE, VALUE, RANK = 6, 4, 5, 8


def problem(rows: int = 70, keys: int = 70) -> tuple[Tensor, Tensor, LatentHeads]:
    generator = torch.Generator().manual_seed(4)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    heads = LatentHeads(draw(3, NOPE + VALUE, RANK), NOPE, 0.3)
    return draw(2, rows, 3, NOPE + ROPE), draw(2, keys, 1, RANK + ROPE), heads


def by_loops(q: Tensor, rows: Tensor, heads: LatentHeads, allowed: Tensor) -> Tensor:
    """Keys and values written out for each head; ``allowed`` is ``(B, S, S_kv)``."""
    out = torch.zeros(*q.shape[:3], heads.value_dim, dtype=q.dtype)
    for h in range(q.shape[2]):
        keys = rows[:, :, 0, :RANK] @ heads.up[h, :NOPE].T
        keys = torch.cat([keys, rows[:, :, 0, RANK:]], dim=-1)
        values = rows[:, :, 0, :RANK] @ heads.up[h, NOPE:].T
        scores = q[:, :, h] @ keys.transpose(1, 2) * heads.scale
        weights = scores.masked_fill(~allowed, -torch.inf).softmax(-1).nan_to_num(0.0)
        out[:, :, h] = weights @ values
    return out


def causal(rows: int, keys: int) -> Tensor:
    return torch.ones(rows, keys, dtype=torch.bool).tril().expand(2, -1, -1)


@pytest.mark.parametrize("form", ["expanded", "absorbed"])
def test_both_forms_are_the_definition(form: str) -> None:
    q, rows, heads = problem()
    allowed = causal(70, 70)
    got = attend_latent(q, rows, heads, mask=allowed.unsqueeze(1), form=form)  # type: ignore[arg-type]
    torch.testing.assert_close(got, by_loops(q, rows, heads, allowed))
    without = attend_latent(q, rows, heads, form=form)  # type: ignore[arg-type]
    torch.testing.assert_close(without, by_loops(q, rows, heads, torch.ones_like(allowed)))
    assert not torch.allclose(without, got)


def test_selected_rows_and_no_others() -> None:
    q, rows, heads = problem()
    generator = torch.Generator().manual_seed(5)
    selected = torch.rand(2, 70, 70, generator=generator).argsort(-1)[..., :9].int()
    selected[0, :20, 4:] = -1
    selected[1, 3] = -1  # one query that selects nothing
    allowed = torch.zeros(2, 70, 71, dtype=torch.bool)
    allowed.scatter_(2, torch.where(selected < 0, 70, selected).long(), True)
    got = attend_selected(q, rows, heads, selected)
    expected = by_loops(q, rows, heads, allowed[..., :70])
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)  # it sums in fp32
    assert (got[1, 3] == 0).all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_rows_that_do_not_count_may_hold_anything(value: float) -> None:
    q, rows, heads = problem(5, 12)
    spoilt = rows.clone()
    spoilt[:, [0, 7]] = value
    selected = torch.tensor([1, 3, -1, 11]).expand(2, 5, 4)
    got = attend_selected(q, spoilt, heads, selected)
    assert torch.equal(got, attend_selected(q, rows, heads, selected))
    absorbed = heads.absorb(q)
    counts = torch.ones(2, 5, 12, dtype=torch.bool)
    counts[:, :, [0, 7]] = False
    parts, expected = (
        partial_attention(absorbed, x[:, :, 0].unsqueeze(1).expand(-1, 5, -1, -1), counts, heads)
        for x in (spoilt, rows)
    )
    assert torch.equal(parts[0], expected[0])
    assert torch.equal(parts[1], expected[1])
    seen = attend_selected(q, spoilt, heads, selected.clamp(min=0))
    assert not seen.isfinite().all()


def test_parts_are_merged_into_the_whole() -> None:
    q, rows, heads = problem(5, 40)
    absorbed = heads.absorb(q)
    counts = torch.rand(2, 5, 40, generator=torch.Generator().manual_seed(1)) < 0.5
    counts[0, 2] = False  # nothing counts for this query, anywhere
    parts = []
    for first, last in ((0, 13), (13, 13), (13, 21), (21, 40)):
        some = rows[:, first:last, 0].unsqueeze(1).expand(-1, 5, -1, -1)
        parts.append(partial_attention(absorbed, some, counts[..., first:last], heads))
    attended, totals = (torch.stack(values) for values in zip(*parts, strict=True))
    merged = heads.values(merge_partials(attended, totals).double())
    expected = by_loops(q, rows, heads, counts)
    torch.testing.assert_close(merged, expected, rtol=1e-4, atol=1e-5)
    assert (merged[0, 2] == 0).all()
    wrong = heads.values(attended.mean(0).double())
    assert not torch.allclose(wrong, expected, rtol=1e-2)


@pytest.mark.parametrize("form", ["expanded", "absorbed"])
def test_what_does_not_belong_together_is_not_stretched(form: str) -> None:
    q, rows, heads = problem(rows=3, keys=5)
    assert attend_latent(q, rows, heads, form=form).shape == (2, 3, 3, VALUE)  # type: ignore[arg-type]
    wrong: list[tuple[object, object, object, str]] = [
        (q[:, :, :1], rows, heads, "attend_latent: q is"),
        (q[..., :-1], rows, heads, "attend_latent: q is"),
        (q[:1], rows, heads, "attend_latent: q is"),
        (q, rows[:1], heads, "attend_latent: q is"),
        (q, rows.expand(-1, -1, 3, -1), heads, "latents have one head"),
        (q, rows[:, :, 0], heads, "latents have one head"),
        (q.float(), rows, heads, "give all one dtype"),
        (None, rows, heads, "q=None must be a tensor"),
        (q, rows, "heads", "heads='heads' must be LatentHeads"),
    ]
    for x, cached, given, message in wrong:
        with pytest.raises(ValueError, match=message):
            attend_latent(x, cached, given, form=form)  # type: ignore[arg-type]


def test_a_mask_is_no_selection() -> None:
    q, rows, heads = problem(rows=3, keys=5)
    selected = torch.zeros(2, 3, 4, dtype=torch.int64)
    for wrong in (selected.bool(), selected.double(), selected[:, :1], selected[:1], selected[0]):
        with pytest.raises(ValueError, match="attend_selected: selected is"):
            attend_selected(q, rows, heads, wrong)


def test_an_unknown_form_is_refused() -> None:
    q, rows, heads = problem(rows=3, keys=5)
    with pytest.raises(ValueError, match="form='absorb' must be"):
        attend_latent(q, rows, heads, form="absorb")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"up": torch.ones(5, 4)}, "up must have shape"),
        ({"up": None}, "up=None must be a tensor"),
        ({"nope_dim": 5}, "nope_dim=5 must be"),
        ({"nope_dim": 2.0}, "nope_dim=2.0 must be"),
        ({"scale": None}, "scale=None must be"),
        ({"scale": float("nan")}, "scale=nan must be"),
    ],
)
def test_what_are_no_heads(wrong: dict[str, Any], message: str) -> None:
    usual = {"up": torch.ones(2, 5, 4), "nope_dim": 2, "scale": 1.0}
    with pytest.raises(ValueError, match=f"LatentHeads: {message}"):
        LatentHeads(**{**usual, **wrong})


def test_scores_of_an_indexer_are_not_stretched() -> None:
    q, weights, keys = torch.ones(2, 3, 4, 8), torch.ones(2, 3, 4), torch.ones(2, 5, 1, 8)
    assert index_scores(q, weights, keys, 1.0).shape == (2, 3, 5)
    for wrong in (
        (q, weights[:, :1], keys),
        (q, weights[..., :1], keys),
        (q, weights, keys[:1]),
        (q, weights, keys[..., :1]),
        (q, weights, keys.expand(-1, -1, 2, -1)),
        (q, weights, keys[:, :, 0]),
    ):
        with pytest.raises(ValueError, match="index_scores: q"):
            index_scores(*wrong, 1.0)
