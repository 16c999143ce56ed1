"""Machines of many kinds: what the probe learns there, what is said of them, and what never is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
from fake_nvml import FakeNvml, machine
from hypothesis import given, settings
from hypothesis import strategies as st
from machine_library import FOLDER, MACHINES, h200_x2, printed, seen, written

from ulysses_ops.eligibility import Request, decide
from ulysses_ops.facts import Fact, Topology
from ulysses_ops.tools.topology_advice import ANYHOW
from ulysses_ops.tools.topology_verdict import Verdict, judge

VERDICTS = {
    "laptop-without-gpu": (2, "NVML does not start: NVMLError_LibraryNotFound"),
    "one-gpu": (1, "one GPU: there is no peer"),
    "h200-x2": (0, "2 ranks on 2 GPUs"),
    "h100-x8": (0, "8 ranks on 8 GPUs"),
    "a100-x8": (0, "8 ranks on 8 GPUs"),
    "a100-pcie-x4-bridges": (1, "P2P nvlink status is NOT_SUPPORTED: 8 of the directed pairs"),
    "l40s-x4": (1, "P2P nvlink status is NOT_SUPPORTED: 12 of the directed pairs"),
    "rtx4090-x2": (1, "P2P nvlink status is GPU_NOT_SUPPORTED"),
    "mig-slices": (1, "ranks 0, 1: MIG is enabled on this GPU"),
    "gh200-x2-not-supported": (2, "P2P nvlink status cannot be read: NVMLError_NotSupported"),
    "gb10": (1, "one GPU: there is no peer"),
    "vgpu-x2": (1, "ranks 0, 1: device has no 64-bit stream memory operations"),
    "jetson": (1, "one GPU: there is no peer"),
    "h100-x8-one-lost": (0, "7 ranks on 7 GPUs"),
    "pcie-x8-asymmetric": (1, "P2P write status is CHIPSET_NOT_SUPPORTED: 1 of the directed"),
    "fabric-not-started": (2, "CUDA cannot be asked: RuntimeError"),
    "display-card-first": (0, "2 ranks on 2 GPUs"),
    "zero-devices": (1, "CUDA shows this process no GPU"),
    "hidden-gpus": (1, "CUDA shows this process no GPU"),
    "one-of-two-visible": (1, "one GPU: there is no peer"),
    "cpu-only-torch": (1, "CUDA shows this process no GPU"),
    "p2p-status-unknown": (2, "P2P nvlink status is UNKNOWN"),
    "h100-x2-prohibited": (
        1,
        "rank 1: compute mode of NVML 1 is prohibited, and allows no process",
    ),
    "v100-x16-two-baseboards": (1, "P2P nvlink status is NOT_SUPPORTED"),
}


def load(name: str) -> Topology:
    return Topology.from_json((FOLDER / f"{name}.json").read_text())


@pytest.mark.parametrize("name", MACHINES)
def test_the_probe_and_the_page_are_as_recorded(name: str) -> None:
    topology = MACHINES[name]()
    assert written(topology) == (FOLDER / f"{name}.json").read_text()
    assert load(name) == topology
    assert printed(topology) == (FOLDER / f"{name}.txt").read_text()


@pytest.mark.parametrize("name", MACHINES)
def test_verdict(name: str) -> None:
    verdict = judge(load(name))
    status, line = VERDICTS[name]
    assert (verdict.exit_code, verdict.line[: len(line)]) == (status, line)
    assert bool(verdict.advice) >= (verdict.exit_code != 0)
    assert ANYHOW not in verdict.advice
    assert not any("<" in text for text in verdict.advice)  # what is to be typed is written out


def test_no_machine_is_without_a_record_and_no_record_without_a_machine() -> None:
    assert set(VERDICTS) == set(MACHINES) == {path.stem for path in FOLDER.glob("*.json")}
    assert {path.stem for path in FOLDER.glob("*.txt")} == set(MACHINES)


@pytest.mark.parametrize(
    ("name", "world_size", "status", "text"),
    [
        ("a100-pcie-x4-bridges", 2, 0, ""),
        ("a100-pcie-x4-bridges", 3, 1, ""),
        ("pcie-x8-asymmetric", 2, 1, "groups of 2: ranks 2, 3 (CUDA_VISIBLE_DEVICES=2,3) and"),
        ("h100-x8-one-lost", 8, 1, ""),
        ("h100-x8", 4, 0, ""),
        ("one-gpu", 1, 0, ""),
        ("laptop-without-gpu", 2, 2, ""),
    ],
)
def test_a_group_smaller_than_the_machine(
    name: str, world_size: int, status: int, text: str
) -> None:
    verdict = judge(load(name), world_size)
    assert (verdict.exit_code, verdict.world_size) == (status, world_size)
    assert any(line.startswith(text) for line in ("", *verdict.suggestions))


def test_suggestions_are_in_the_words_of_visible_devices_as_given() -> None:
    """CUDA 0 and 1 are what was given as 1 and 2."""
    topology = load("display-card-first")
    broken = replace(
        topology,
        pairs=tuple(replace(p, write=Fact("no", "nvml", "P2P off")) for p in topology.pairs),
    )
    assert judge(broken).suggestions == ()
    bridges = replace(load("a100-pcie-x4-bridges"), visible_devices="7,5,3,1")
    assert judge(bridges).suggestions[0] == (
        "largest eligible: ranks 0, 1 (CUDA_VISIBLE_DEVICES=7,5) or "
        "ranks 2, 3 (CUDA_VISIBLE_DEVICES=3,1)"
    )


def test_without_multicast_or_fabric_a_machine_is_eligible() -> None:
    cards = [replace(gpu, fabric=(0, 0)) for gpu in machine(2)]
    topology = seen(FakeNvml(cards), cards, facts=lambda _: [1, 1, 3, 0])
    assert topology.multicast.answer == "no"
    assert judge(topology).word == "eligible"


# ---- properties ----------------------------------------------------------------------------------


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where the facts of a topology are."""
    if isinstance(value, Fact):
        yield path
    elif isinstance(value, tuple):
        for index, item in enumerate(value):
            yield from paths(item, (*path, index))
    elif is_dataclass(value):
        for entry in fields(value):
            yield from paths(getattr(value, entry.name), (*path, entry.name))


def put(value: Any, path: tuple[Any, ...], answer: str) -> Any:
    """``value`` with the answer of the fact at ``path`` replaced."""
    if not path:
        return replace(value, answer=answer)
    head, *rest = path
    if isinstance(head, int):
        new = put(value[head], tuple(rest), answer)
        return (*value[:head], new, *value[head + 1 :])
    return replace(value, **{head: put(getattr(value, head), tuple(rest), answer)})


def worse(path: tuple[Any, ...]) -> str:
    """The answer that takes a capability away."""
    return "yes" if path[-1] in ("mig", "mps") else "no"


@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_less_never_makes_a_group_eligible(data: st.DataObject) -> None:
    topology = load(data.draw(st.sampled_from(sorted(MACHINES))))
    before = judge(topology)
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(list(paths(topology))))
        answer = data.draw(st.sampled_from([worse(path), "unknown"]))
        topology = put(topology, path, answer)
    if before.word != "eligible":
        assert judge(topology).word != "eligible"


def test_the_property_would_see_a_verdict_that_gains() -> None:
    topology = load("l40s-x4")
    for path in list(paths(topology)):
        if path[-1] == "nvlink":
            topology = put(topology, path, "yes")
    assert judge(topology).word == "eligible"  # what more would do, and less must not


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_order_of_ranks_changes_no_verdict(data: st.DataObject) -> None:
    topology = load(data.draw(st.sampled_from(sorted(MACHINES))))
    ranks = topology.as_ranks()
    order = data.draw(st.permutations(range(len(ranks))))
    if ranks:
        first = decide(ranks, Request(backends=("nccl",)))
        second = decide([ranks[i] for i in order], Request(backends=("nccl",)))
        assert (first.transport, first.certain) == (second.transport, second.certain)
        assert len(first.suggestions) == len(second.suggestions)


def test_unknown_answers_alone_are_never_a_certain_no() -> None:
    """Of a good machine, every fact in doubt leaves the verdict open or as it was."""
    good = h200_x2()
    for path in paths(good):
        assert judge(put(good, path, "unknown")).word in ("eligible", "unknown"), path
        assert judge(put(good, path, worse(path))).word in ("eligible", "not eligible"), path


def test_exit_codes() -> None:
    assert [Verdict(w, "", 2).exit_code for w in ("eligible", "not eligible", "unknown")] == [
        0,
        1,
        2,
    ]
