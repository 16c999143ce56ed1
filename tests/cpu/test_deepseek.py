"""Mixed sharding against the attention of DeepSeek-V3 and V3.2 as ``transformers`` has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from rank_pool import RankPool
from torch import Tensor

from ulysses_ops import UlyssesCommunicator, all_gather, even_splits
from ulysses_ops.indexer import index_scores, select_rows
from ulysses_ops.latent import LatentHeads, attend_latent, attend_selected
from ulysses_ops.mixed_attention import mixed_attention

pytest.importorskip("transformers.models.deepseek_v32", reason="needs transformers")

Ranks = Callable[[int], RankPool]
HEADS, CHOSEN = 4, 6


def oracle(version: str) -> tuple[Any, Any]:
    """A small attention module, and the module of code that it comes from."""
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3 import modeling_deepseek_v3
    from transformers.models.deepseek_v32 import DeepseekV32Config, modeling_deepseek_v32

    sizes = {
        "hidden_size": 48,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "kv_lora_rank": 16,
        "q_lora_rank": 24,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "qk_nope_head_dim": 10,
        "attn_implementation": "eager",
    }
    torch.manual_seed(7)
    if version == "v3":
        v3 = DeepseekV3Config(**sizes)
        return modeling_deepseek_v3.DeepseekV3Attention(v3, 0).eval(), modeling_deepseek_v3
    # So many heads that no score is zero: of equal ones the model chooses either.
    index = {"index_topk": CHOSEN, "index_head_dim": 16, "index_n_heads": 16}
    v32 = DeepseekV32Config(**sizes, **index)
    return modeling_deepseek_v32.DeepseekV32Attention(v32, 0).eval(), modeling_deepseek_v32


def turns(rows: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of all rows, ``(1, S, rope)``, as the model's rotary embedding makes."""
    angles = torch.arange(rows)[:, None] * 10000.0 ** (-torch.arange(0, 8, 2) / 8)
    both = torch.cat([angles, angles], dim=-1)[None]
    return both.cos(), both.sin()


def sharded(
    module: Any, code: Any, x: Tensor, comm: UlyssesCommunicator, splits: tuple[int, ...]
) -> Tensor:
    """The module's attention on this rank's rows."""
    rank, total = comm.rank, sum(splits)
    first, rows = sum(splits[:rank]), splits[rank]
    cos, sin = (t[:, first : first + rows] for t in turns(total))
    shares = even_splits(HEADS, comm.world_size)
    up = module.kv_b_proj.weight.view(HEADS, -1, module.kv_lora_rank)
    heads = LatentHeads(
        up.split(list(shares))[rank], module.qk_nope_head_dim, float(module.scaling)
    )
    q_latent = module.q_a_layernorm(module.q_a_proj(x))
    compressed = module.kv_a_proj_with_mqa(x)
    allowed = torch.ones(total, total, dtype=torch.bool).tril()

    def rotated(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        turned = code.apply_rotary_pos_emb_interleave(
            q.transpose(1, 2), k.unsqueeze(1), cos, sin, unsqueeze_dim=1
        )
        return turned[0].transpose(1, 2), turned[1].transpose(1, 2)

    def queries() -> Tensor:
        q = module.q_b_proj(q_latent).view(*x.shape[:2], HEADS, module.qk_head_dim)
        still, turning = q.split([module.qk_nope_head_dim, module.qk_rope_head_dim], dim=-1)
        return torch.cat([still, rotated(turning, compressed[..., -8:])[0]], dim=-1)

    def latents() -> Tensor:
        latent = module.kv_a_layernorm(compressed[..., : module.kv_lora_rank]).unsqueeze(2)
        turning = compressed[..., module.kv_lora_rank :]
        return torch.cat([latent, rotated(turning.unsqueeze(2), turning)[1]], dim=-1)

    def choose() -> Tensor:
        indexer = module.indexer
        q = indexer.wq_b(q_latent).view(*x.shape[:2], indexer.n_heads, indexer.head_dim)
        k = indexer.k_norm(indexer.wk(x)).unsqueeze(2)
        q_turned, k_turned = code.apply_rotary_pos_emb(
            q[..., :8], k[..., :8], cos, sin, unsqueeze_dim=2
        )
        keys = all_gather(torch.cat([k_turned, k[..., 8:]], dim=-1), comm, seq_splits=splits)
        weights = indexer.weights_proj(x) * indexer.n_heads**-0.5
        q = torch.cat([q_turned, q[..., 8:]], dim=-1)
        scores = index_scores(q, weights, keys, indexer.softmax_scale)
        scores = scores.masked_fill(~allowed[first : first + rows], -torch.inf)
        return select_rows(scores, min(CHOSEN, total), comm, seq_splits=splits)

    def attend(q: Tensor, rows: Tensor, *chosen: Tensor) -> Tensor:
        if chosen:
            return attend_selected(q, rows, heads, chosen[0])
        return attend_latent(q, rows, heads, mask=allowed)

    attended = mixed_attention(
        queries,
        [latents],
        comm,
        attend=attend,
        value_dim=module.v_head_dim,
        beside=[choose] if hasattr(module, "indexer") else [],
        seq_splits=splits,
        head_splits=shares,
    )
    out: Tensor = module.o_proj(attended.flatten(2))
    return out


def equal_to_the_model(rank: int, world_size: int, version: str, splits: tuple[int, ...]) -> None:
    module, code = oracle(version)
    total = sum(splits)
    x = torch.randn(2, total, 48, generator=torch.Generator().manual_seed(3))
    refused = torch.full((total, total), torch.finfo(torch.float32).min).triu(1)[None, None]
    own = x.split(list(splits), dim=1)[rank]
    with torch.no_grad(), UlyssesCommunicator(timeout_s=20) as comm:
        expected = module(x, turns(total), refused.expand(2, -1, -1, -1))[0]
        expected = expected.split(list(splits), dim=1)[rank]
        got = sharded(module, code, own, comm, splits)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
        module.kv_b_proj.weight.data.mul_(1.5)  # another model is told apart
        other = sharded(module, code, own, comm, splits)
        assert own.numel() == 0 or not torch.allclose(other, expected, rtol=1e-2)


@pytest.mark.parametrize("version", ["v3", "v32"])
@pytest.mark.parametrize("splits", [(9, 9), (11, 6), (5, 5, 5, 5), (1, 0, 12, 4)])
def test_equal_to_the_model(ranks: Ranks, version: str, splits: tuple[int, ...]) -> None:
    ranks(len(splits)).run(equal_to_the_model, version, splits, timeout_s=120)
