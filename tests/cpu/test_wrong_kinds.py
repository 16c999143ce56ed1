"""Arguments of a wrong type: one sentence with call, value and remedy, before any rank waits."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rank_pool import RankPool
from torch import nn

import ulysses_ops as u
from ulysses_ops.constants import shipped_constants
from ulysses_ops.debug_exchange import debug_exchange
from ulysses_ops.graphs import GraphCache, capture_step
from ulysses_ops.indexer import select_rows
from ulysses_ops.kinds import shown
from ulysses_ops.mesh import build_mesh, order_ranks
from ulysses_ops.mixed_attention import mixed_attention
from ulysses_ops.parallelism import choose_parallelism
from ulysses_ops.sequence_cache import SequenceCache
from ulysses_ops.sequence_plan import data_parallel, plan_sequences
from ulysses_ops.topk import distributed_topk, top_rows
from ulysses_ops.weight_shards import WeightShards
from ulysses_ops.workload import ModelShape, Workload

X = torch.zeros(1, 4, 4, 8)
SHAPE = (1, 4, 4, 8)
Q = nn.Linear(8, 8)
F32 = torch.float32


def anything(value: object) -> Any:
    """What a checker of types would have found."""
    return value


@pytest.fixture(scope="module")
def comm() -> Iterator[u.UlyssesCommunicator]:
    with u.UlyssesCommunicator(device="cpu", name="kinds") as comm:
        yield comm


def layer(comm: Any, **wrong: Any) -> u.UlyssesAttention:
    return u.UlyssesAttention(comm, **{"q": Q, "k": Q, "v": Q, "out": Q, "num_heads": 2, **wrong})


def constructed(**wrong: Any) -> None:
    u.UlyssesCommunicator(**{"device": "cpu", "name": "wrong", **wrong})


def spec(**wrong: Any) -> u.WindowSpec:
    usual = {"name": "a", "direction": "scatter", "shape": SHAPE, "dtype": F32}
    return u.WindowSpec(**{**usual, **wrong})


Call = Callable[[u.UlyssesCommunicator], object]
CONSTRUCTED: dict[str, Call] = {
    "UlyssesCommunicator: name=3 must": lambda comm: constructed(name=3),
    "UlyssesCommunicator: name='' must": lambda comm: constructed(name=""),
    f"name='{'q' * 79}... must be no longer than": lambda comm: constructed(name="q" * 1025),
    "UlyssesCommunicator: dump_dir=3 must": lambda comm: constructed(dump_dir=3),
    "UlyssesCommunicator: timeout_s='3' must": lambda comm: constructed(timeout_s="3"),
    "UlyssesCommunicator: timeout_s=None must": lambda comm: constructed(timeout_s=None),
    "UlyssesCommunicator: timeout_s=True must": lambda comm: constructed(timeout_s=True),
    "UlyssesCommunicator: timeout_s=a value of type Tensor must": lambda comm: constructed(
        timeout_s=torch.ones(())
    ),
    "UlyssesCommunicator: group='g' must": lambda comm: constructed(group="g"),
    "device=3.5 must": lambda comm: constructed(device=3.5),
    "device='gpu' must": lambda comm: constructed(device="gpu"),
    "transport=3 must": lambda comm: constructed(transport=3),
    "mapping=a value of type list must": lambda comm: constructed(mapping=[]),
    "max_windows='3' must": lambda comm: constructed(max_windows="3"),
    "max_windows=True must": lambda comm: constructed(max_windows=True),
    "allow_shared_devices=a value of type object must": lambda comm: constructed(
        allow_shared_devices=object()
    ),
    "UlyssesCommunicator: timeout_s='1' must": lambda comm: comm.set_timeout(anything("1")),
}
CALLED: dict[str, Call] = {
    "reserve: specs=a value of type WindowSpec": lambda comm: u.reserve(comm, anything(spec())),
    "reserve: each of specs='w' must": lambda comm: u.reserve(comm, anything(["w"])),
    "reserve: specs=None must": lambda comm: u.reserve(comm, anything(None)),
    "reserve: comm='kinds' must": lambda comm: u.reserve(anything("kinds"), []),
    "WindowSpec: name=3 must": lambda comm: spec(name=3),
    "reserve: direction=3 must": lambda comm: u.reserve(comm, [spec(direction=3)]),
    "WindowSpec: shape=4 must": lambda comm: spec(shape=4),
    "WindowSpec: shape holds '1' and must": lambda comm: spec(shape=("1", 2, 3, 4)),
    "WindowSpec: dtype='f' must": lambda comm: spec(dtype="f"),
    "WindowSpec: channel=3 must": lambda comm: spec(channel=3),
    "WindowSpec: seq_splits holds '4' and must": lambda comm: spec(seq_splits=("4",)),
    "WindowSpec: head_splits=4 must": lambda comm: spec(head_splits=4),
    "scatter: comm='kinds' must": lambda comm: u.scatter(X, anything("kinds")),
    "gather: comm=None must": lambda comm: u.gather(X, anything(None)),
    "all_gather: comm=3 must": lambda comm: u.all_gather(X, anything(3)),
    "Exchange: comm='kinds' must": lambda comm: u.Exchange(anything("kinds")),
    "Exchange.send: x=a value of type list must": lambda comm: u.Exchange(comm).send(
        anything([1]), u.reserve(comm, [spec()])[0]
    ),
    "Exchange.send: window=a value of type Tensor must": lambda comm: u.Exchange(comm).send(
        X, anything(X)
    ),
    "Exchange.send: peer='0' must": lambda comm: u.Exchange(comm).send(
        X, u.reserve(comm, [spec()])[0], peer=anything("0")
    ),
    "ulysses_attention: k=None must": lambda comm: u.ulysses_attention(X, anything(None), X, comm),
    "ulysses_attention: comm='kinds' must": lambda comm: u.ulysses_attention(
        X, X, X, anything("kinds")
    ),
    "ulysses_attention: attention='sdpa' must": lambda comm: u.ulysses_attention(
        X, X, X, comm, attention=anything("sdpa")
    ),
    "ulysses_attention: windows=a value of type list must": lambda comm: u.ulysses_attention(
        X, X, X, comm, windows=anything([])
    ),
    "ulysses_attention: seq_splits=4 must": lambda comm: u.ulysses_attention(
        X, X, X, comm, seq_splits=anything(4)
    ),
    "ulysses_attention: head_splits holds 4.0 and must": lambda comm: u.ulysses_attention(
        X, X, X, comm, head_splits=anything([4.0])
    ),
    "reserve_attention: q_shape=3 must": lambda comm: u.reserve_attention(
        comm, anything(3), SHAPE, F32
    ),
    "ulysses_joint_attention: joint=3 must": lambda comm: u.ulysses_joint_attention(
        X, X, X, comm, joint=anything(3)
    ),
    "JointSequence: text_rows holds '1' and must": lambda comm: u.JointSequence(
        anything("1"), (2,)
    ),
    "even_splits: total='8' must": lambda comm: u.even_splits(anything("8"), 2),
    "capture_step: comm='kinds' must": lambda comm: capture_step(anything("kinds"), len, [X]),
    "capture_step: step=3 must": lambda comm: capture_step(comm, anything(3), [X]),
    "GraphCache: comm='kinds' must": lambda comm: GraphCache(anything("kinds"), len),
    "GraphCache: max_graphs='3' must": lambda comm: GraphCache(comm, len, max_graphs=anything("3")),
    "UlyssesAttention: comm='kinds' must": lambda comm: layer("kinds"),
    "UlyssesAttention: num_heads='2' must": lambda comm: layer(comm, num_heads="2"),
    "UlyssesAttention: out=3 must": lambda comm: layer(comm, out=3),
    "UlyssesAttention: pack_weights='yes' must": lambda comm: layer(comm, pack_weights="yes"),
    "UlyssesAttention: x=a value of type list must": lambda comm: layer(comm)([1]),
}

WORKLOAD = Workload(ModelShape(2, 64, 4, 2, 16, 128), shipped_constants())
PLAN = plan_sequences([3, 4], 2, WORKLOAD)


def planned(lengths: Any = (1, 2), world_size: Any = 2, work: Any = WORKLOAD, **more: Any) -> None:
    plan_sequences(lengths, world_size, work, **more)


def chosen(lengths: Any = (1, 2), num_gpus: Any = 2, work: Any = WORKLOAD, **more: Any) -> None:
    choose_parallelism(lengths, num_gpus, work, **{"memory_bytes": 1 << 30, **more})


def model(**wrong: Any) -> ModelShape:
    usual = {"layers": 2, "width": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "mlp_width": 128}
    return ModelShape(**{**usual, **wrong})


PLANNED: dict[str, Call] = {
    "plan_sequences: lengths=None must": lambda comm: planned(None),
    "plan_sequences: lengths=3 must": lambda comm: planned(3),
    "plan_sequences: lengths='12' must": lambda comm: planned("12"),
    "plan_sequences: lengths holds 1.5 and must": lambda comm: planned([1.5, 2]),
    "plan_sequences: lengths=a value of type Tensor must": lambda comm: planned(torch.ones(())),
    "plan_sequences: world_size='a' must": lambda comm: planned(world_size="a"),
    "plan_sequences: world_size=0 must": lambda comm: planned(world_size=0),
    "plan_sequences: world_size=-2 must": lambda comm: planned(world_size=-2),
    "plan_sequences: workload=None must": lambda comm: planned(work=None),
    "plan_sequences: sizes=[] must": lambda comm: planned(sizes=[]),
    "plan_sequences: sizes=2 must": lambda comm: planned(sizes=2),
    "plan_sequences: sizes holds '2' and must": lambda comm: planned(sizes=["2"]),
    "data_parallel: lengths=None must": lambda comm: data_parallel(anything(None), 2, WORKLOAD),
    "data_parallel: world_size=0 must": lambda comm: data_parallel([1], 0, WORKLOAD),
    "SequencePlan: group=-1 must": lambda comm: PLAN.seq_splits(-1),
    "SequencePlan: group=5 must": lambda comm: PLAN.cu_seqlens(5),
    "SequencePlan: group='a' must": lambda comm: PLAN.cu_seqlens(anything("a")),
    "SequencePlan: request=-1 must": lambda comm: PLAN.request_splits(-1),
    "choose_parallelism: lengths=None must": lambda comm: chosen(None),
    "choose_parallelism: num_gpus=0 must": lambda comm: chosen(num_gpus=0),
    "choose_parallelism: num_gpus='a' must": lambda comm: chosen(num_gpus="a"),
    "choose_parallelism: workload=3 must": lambda comm: chosen(work=3),
    "choose_parallelism: memory_bytes=nan must": lambda comm: chosen(memory_bytes=float("nan")),
    "choose_parallelism: connected=0 must": lambda comm: chosen(connected=0),
    "choose_parallelism: cached=1 must": lambda comm: chosen(cached=1),
    "ModelShape: layers='a' must": lambda comm: model(layers="a"),
    "ModelShape: heads=0 must": lambda comm: model(heads=0),
    "ModelShape: causal=None must": lambda comm: model(causal=None),
    "Workload: model='m' must": lambda comm: Workload(anything("m"), shipped_constants()),
    "Workload: constants=None must": lambda comm: Workload(model(), anything(None)),
}


def mixed(comm: Any, **wrong: Any) -> None:
    usual = {"q": X, "shared": [X], "comm": comm, "attend": lambda q, c: q, "value_dim": 8}
    mixed_attention(**{**usual, **wrong})


def cache(comm: Any, **wrong: Any) -> SequenceCache:
    usual = {"batch": 1, "capacity": 4, "heads": 2, "head_dim": 8, "dtype": F32}
    return SequenceCache(comm, **{**usual, **wrong})


for wrong_k in ("a", None, 2.0, True):
    CALLED[f"top_rows: k={wrong_k!r} must"] = partial(
        lambda k, comm: top_rows(X, k), anything(wrong_k)
    )
    CALLED[f"distributed_topk: k={wrong_k!r} must"] = partial(
        lambda k, comm: distributed_topk(X[0], k, comm), anything(wrong_k)
    )
for wrong_name, wrong_size in (("batch", -1), ("capacity", 2.0), ("heads", "2"), ("head_dim", 0)):
    CALLED[f"SequenceCache: {wrong_name}={wrong_size!r} must"] = partial(
        lambda wrong, comm: cache(comm, **wrong), {wrong_name: wrong_size}
    )
CALLED |= {
    "scatter: x=a value of type list must": lambda comm: u.scatter(anything([1]), comm),
    "gather: x=None must": lambda comm: u.gather(anything(None), comm),
    "all_gather: x=3 must": lambda comm: u.all_gather(anything(3), comm),
    "scatter: seq_splits holds 4.0 and must": lambda comm: u.scatter(
        X, comm, seq_splits=anything((4.0, 4.0))
    ),
    "gather: seq_splits='ab' must": lambda comm: u.gather(X, comm, seq_splits=anything("ab")),
    "gather: seq_starts='ab' must": lambda comm: u.gather(X, comm, seq_starts=anything("ab")),
    "scatter: head_starts=3 must": lambda comm: u.scatter(X, comm, head_starts=anything(3)),
    "all_gather: seq_splits=3 must": lambda comm: u.all_gather(X, comm, seq_splits=anything(3)),
    "debug_exchange: op='foo' must": lambda comm: debug_exchange(comm, X, op=anything("foo")),
    "debug_exchange: op=a value of type list must": lambda comm: debug_exchange(
        comm, X, op=anything([])
    ),
    "debug_exchange: x=a value of type list must": lambda comm: debug_exchange(comm, anything([1])),
    "debug_exchange: x must have shape": lambda comm: debug_exchange(comm, X[0], op="all_gather"),
    "debug_exchange: comm=None must": lambda comm: debug_exchange(anything(None), X),
    "debug_exchange: seq_splits='ab' must": lambda comm: debug_exchange(
        comm, X, seq_splits=anything("ab")
    ),
    "top_rows: k=a value of type list must": lambda comm: top_rows(X, anything([1])),
    "top_rows: scores=a value of type list must": lambda comm: top_rows(anything([1]), 1),
    "top_rows: scores must have shape": lambda comm: top_rows(torch.ones(()), 1),
    "distributed_topk: comm=None must": lambda comm: distributed_topk(X[0], 1, anything(None)),
    "distributed_topk: scores=3 must": lambda comm: distributed_topk(anything(3), 1, comm),
    "SequenceCache: dtype='float32' must": lambda comm: cache(comm, dtype="float32"),
    "SequenceCache: comm=None must": lambda comm: cache(None),
    "SequenceCache: name=3 must": lambda comm: cache(comm, name=3),
    "SequenceCache: x=a value of type list must": lambda comm: cache(comm).append(anything([1])),
    "SequenceCache: new rows are [3]": lambda comm: cache(comm).append_replicated(torch.ones(3)),
    "SequenceCache: rows=2.0 to place must": lambda comm: cache(comm).place(anything(2.0)),
    "SequenceCache: rows=True to place must": lambda comm: cache(comm).place(True),
    "SequenceCache: rows=-1 to place must": lambda comm: cache(comm).place(-1),
    "SequenceCache: seq_splits='ab' must": lambda comm: cache(comm).place(anything("ab")),
    "SequenceCache: length=0.0 must": lambda comm: cache(comm).truncate(anything(0.0)),
    "SequenceCache: heads='some' must": lambda comm: cache(comm).read(heads=anything("some")),
    "mixed_attention: attend=3 must": lambda comm: mixed(comm, attend=3),
    "mixed_attention: each of shared=3 must": lambda comm: mixed(comm, shared=[3]),
    "mixed_attention: shared=3 must": lambda comm: mixed(comm, shared=3),
    "mixed_attention: q=a value of type list must": lambda comm: mixed(comm, q=[X]),
    "mixed_attention: each of beside=3 must": lambda comm: mixed(comm, beside=[3]),
    "mixed_attention: value_dim='8' must": lambda comm: mixed(comm, value_dim="8"),
    "mixed_attention: comm=None must": lambda comm: mixed(None),
    "mixed_attention: name=3 must": lambda comm: mixed(comm, name=3),
    "mixed_attention: copy_out='no' must": lambda comm: mixed(comm, copy_out="no"),
    "SequenceCache: keep='last' must": lambda comm: cache(comm, keep="last"),
    "SequenceCache: placement=3 must": lambda comm: cache(comm).slots(anything(3)),
    "WeightShards: name=3 must": lambda comm: WeightShards(comm, [X[0, 0]], name=anything(3)),
    "select_rows: comm='kinds' must": lambda comm: select_rows(X[0], 1, anything("kinds")),
    "select_rows: scores must have shape": lambda comm: select_rows(X, 1, comm),
    "WindowSpec.all_gather: world_size='1' must": lambda comm: u.WindowSpec.all_gather(
        "a", SHAPE, F32, anything("1")
    ),
    "WindowSpec.all_gather: shape=None must": lambda comm: u.WindowSpec.all_gather(
        "a", anything(None), F32, 1
    ),
    "WindowSpec.all_gather: shape=[1, 4, 8] must": lambda comm: u.WindowSpec.all_gather(
        "a", anything((1, 4, 8)), F32, 1
    ),
    "order_ranks: topologies=None must": lambda comm: order_ranks(anything(None), 1, 1),
    "order_ranks: topologies=a value of type list must": lambda comm: order_ranks([], 1, 1),
    "order_ranks: each of topologies=3 must": lambda comm: order_ranks(anything([3]), 1, 1),
    "build_mesh: device_type='gpu' must": lambda comm: build_mesh((((0,),),), "gpu"),
    "build_mesh: order must": lambda comm: build_mesh(anything("abc"), "cpu"),
    "build_mesh: there is no process group": lambda comm: build_mesh((((0,),),), "cpu"),
    "scatter: x is torch.sparse_coo": lambda comm: u.scatter(X.to_sparse(), comm),
    "gather: x is nested": lambda comm: u.gather(
        torch.nested.nested_tensor([X], layout=torch.jagged), comm
    ),
    "all_gather: x is torch._mkldnn": lambda comm: u.all_gather(X.to_mkldnn(), comm),
    "debug_exchange: x is torch.sparse_coo": lambda comm: debug_exchange(comm, X.to_sparse()),
    "debug_exchange: x is on meta": lambda comm: debug_exchange(comm, X.to("meta")),
    "mixed_attention: source_1=None must": lambda comm: mixed(comm, shared=[lambda: None]),
}


def test_a_whole_number_may_be_one_of_numpy(comm: u.UlyssesCommunicator) -> None:
    rows = cache(comm)
    assert rows.place(anything(np.int64(3))).splits == (3,)
    assert rows.append(X[:, :1, :2], anything([np.int64(1)])).first == 3
    assert top_rows(X, anything(np.int64(2)))[0].shape == (1, 4, 4, 2)


@pytest.mark.parametrize("sentence", [*CONSTRUCTED, *CALLED, *PLANNED])
def test_what_is_of_a_wrong_type_is_refused(comm: u.UlyssesCommunicator, sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)) as refused:
        {**CONSTRUCTED, **CALLED, **PLANNED}[sentence](comm)
    assert len(str(refused.value).splitlines()) == 1


def test_a_folder_may_be_given_as_text(tmp_path: Path) -> None:
    with u.UlyssesCommunicator(device="cpu", name="dumps", dump_dir=str(tmp_path)) as comm:
        comm.check()


def test_long_values_are_cut() -> None:
    assert shown("a" * 1000) == f"'{'a' * 79}..."
    assert shown(X) == "a value of type Tensor"


def one_of_two(rank: int, world_size: int) -> list[str]:
    """Rank 1 alone is wrong: at construction both hear it, at a call it goes on by itself."""
    texts = []
    for wrong in ({"allow_shared_devices": "no"}, {"max_windows": None}):
        with pytest.raises(ValueError, match="UlyssesCommunicator: rank 1: ") as refused:
            constructed(**(wrong if rank else {}), timeout_s=20.0)
        texts.append(str(refused.value))
    with u.UlyssesCommunicator(device="cpu", timeout_s=20.0) as comm:
        if rank:
            with pytest.raises(ValueError, match="reserve: specs='w' must be a list"):
                u.reserve(comm, anything("w"))
        got = u.scatter(X + rank, comm)
        assert torch.equal(got, torch.cat([X[:, :, :2] + 0, X[:, :, :2] + 1], dim=1))
    return texts


def test_one_rank_that_is_wrong(ranks: Callable[[int], RankPool]) -> None:
    one, other = ranks(2).run(one_of_two, timeout_s=30)
    assert one == other
    assert "allow_shared_devices='no' must be True or False" in one[0]
    assert "max_windows=None must be a whole number" in one[1]
