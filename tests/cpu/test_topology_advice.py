"""What to do is said for each "no" and each "could not tell"."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pynvml
import pytest
from fake_nvml import NVLINK, READ, WRITE, FakeNvml, machine
from machine_library import MACHINES, h100_x8, seen

from ulysses_ops.facts import Reading, Topology
from ulysses_ops.nvml import P2P_STATUS_NAMES
from ulysses_ops.tools.topology_advice import ADVICE, ANYHOW
from ulysses_ops.tools.topology_verdict import judge

FUNCTIONS = [name for name in vars(FakeNvml) if name.startswith("nvml")]
CODES = sorted(name for name in vars(pynvml) if name.startswith("NVML_ERROR_"))


def two(**nvml: Any) -> Topology:
    cards = machine(2)
    return seen(FakeNvml(cards, **nvml), cards)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_whatever_nvml_fails_at_something_can_be_done(function: str) -> None:
    for code in CODES:
        failure = pynvml.NVMLError(getattr(pynvml, code))
        verdict = judge(two(failures={function: failure}))
        assert bool(verdict.advice) >= (verdict.word != "eligible"), code
        assert ANYHOW not in verdict.advice, code


@pytest.mark.parametrize("kind", [READ, WRITE, NVLINK])
@pytest.mark.parametrize("status", [*range(1, len(P2P_STATUS_NAMES)), 77])
def test_every_p2p_status_has_its_advice(kind: int, status: int) -> None:
    verdict = judge(two(status={(0, 1, kind): status}))
    assert verdict.word == (
        "unknown" if status >= pynvml.NVML_P2P_STATUS_UNKNOWN else "not eligible"
    )
    assert verdict.advice
    assert ANYHOW not in verdict.advice


def hidden_by(value: str | None) -> str:
    environ: Mapping[str, str] = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
    cards = machine(4)
    return " ".join(judge(seen(FakeNvml(cards), cards, [], environ=environ)).advice)


@pytest.mark.parametrize("value", ["", "-1", "9", "GPU-0"])
def test_gpus_that_a_variable_hides_are_counted(value: str) -> None:
    assert f"CUDA_VISIBLE_DEVICES={value!r} hides 4 of the 4 GPUs that NVML lists" in hidden_by(
        value
    )
    assert "CUDA does not show 4 of the 4 GPUs" in hidden_by(None)


def test_more_ranks_than_gpus_are_told_what_is_there() -> None:
    assert judge(h100_x8(), 9).advice == (
        "ask for 8 ranks or fewer, or use a machine with more GPUs",
    )
    some = judge(MACHINES["display-card-first"](), 3)
    assert some.advice[0].startswith("CUDA_VISIBLE_DEVICES='1,2' hides 2 of the 4 GPUs")
    assert judge(h100_x8(), 8).advice == ()  # control


def test_mig_is_switched_off_by_numbers_of_nvml() -> None:
    cards = machine(3)
    topology = seen(FakeNvml(cards, mig={1: 1, 2: 1}), cards, [2, 1])
    assert judge(topology).advice[0].endswith("nvidia-smi -i 1,2 -mig 0")


def test_a_machine_without_a_fault_is_given_no_advice() -> None:
    assert judge(two()).advice == ()
    assert len({do for _, do in ADVICE}) == len(ADVICE)


def test_what_no_pattern_knows_is_left_to_nccl() -> None:
    topology = two()
    spaces = Reading(None, "test", "no /proc")
    odd = replace(topology, process=replace(topology.process, boot_id=spaces))
    assert judge(odd).advice[0].startswith("let the ranks read /proc")
    mps = replace(topology, mps=replace(topology.mps, answer="yes", reason="MPS, in a new way"))
    assert judge(mps).advice == (ANYHOW,)
