"""Faults by steps on copy engines, a GPU a rank: one moment of each step for each fault.

All moments: ``python -m ulysses_ops.tools.fault_matrix``.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ulysses_ops.tools.fault_cell import find_moments
from ulysses_ops.tools.fault_cycle import STEPS, Setting
from ulysses_ops.tools.fault_matrix import chosen_faults, run_matrix
from ulysses_ops.tools.faults import FAULTS, Moment, possible_faults
from ulysses_ops.tools.launch import Launch

LIMIT_S = 3.0


@pytest.fixture(scope="module")
def setting() -> Setting:
    return Setting(Launch(2, "cuda", torch.cuda.device_count()), LIMIT_S, parallel=6)


@pytest.fixture(scope="module")
def moments(setting: Setting) -> list[Moment]:
    return find_moments(setting)


def test_every_step_has_moments(moments: list[Moment]) -> None:
    assert [moment.step for moment in moments if moment.kind == "entry"] == list(STEPS)
    assert {"signal", "mapping"} <= {moment.kind for moment in moments}
    replays = [moment for moment in moments if moment.name == "replay_tensors"]
    assert {moment.step for moment in replays} == {"capture", "replay"}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_no_fault_hangs_leaks_or_gives_wrong_data(
    setting: Setting, moments: list[Moment], fault: str
) -> None:
    faults = [
        chosen
        for chosen in chosen_faults(possible_faults(moments), one_moment=True)
        if chosen.name == fault
    ]
    cells = run_matrix(setting, faults)
    assert cells
    for cell in cells:
        assert cell.is_good, f"{cell}\n{cell.told}"
        if fault in ("late", "stopped"):
            assert cell.outcome == "right", f"{cell}\n{cell.told}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "step"),
    [("killed", "exchange"), ("too late", "capture"), ("dropped write", "replay")],
)
def test_gpu_memory_is_given_back(
    setting: Setting, moments: list[Moment], fault: str, step: str
) -> None:
    """One cell at a time: memory of a GPU is nobody's in particular."""
    alone = replace(setting, parallel=1)
    (chosen,) = (
        found
        for found in chosen_faults(possible_faults(moments), one_moment=True)
        if (found.name, found.moment.step) == (fault, step)
    )
    (cell,) = run_matrix(alone, [chosen])
    assert cell.is_good, f"{cell}\n{cell.told}"
