"""Power and clocks of a step that is run over and over, with a GPU that is told what to say."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from recorded import a_row
from test_result_tables import cells, recorded

from ulysses_ops.tools import power as module
from ulysses_ops.tools.block_table import block_table, power_table
from ulysses_ops.tools.power import CHUNK_S, POWER, SECONDS, Power, measure_power

STEP_US = 10_000.0


class Gpu:
    """Stands in for ``torch.cuda``: its clock falls as long as something runs."""

    def __init__(self) -> None:
        self.now_us = 0.0
        self.clock_mhz = 2000

    def run(self) -> None:
        self.now_us += STEP_US

    def event(self, **_: Any) -> Any:
        at = SimpleNamespace(us=None)
        at.record = lambda: setattr(at, "us", self.now_us)
        at.elapsed_time = lambda other: (other.us - at.us) / 1e3
        return at

    def power_draw(self, device: object) -> int:
        return 650_000

    def clock_rate(self, device: object) -> int:
        self.clock_mhz = max(self.clock_mhz - 100, 1500)
        return self.clock_mhz


def test_power_is_of_the_time_in_which_clocks_have_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu()
    cuda = SimpleNamespace(Event=gpu.event, power_draw=gpu.power_draw, clock_rate=gpu.clock_rate)
    monkeypatch.setattr(module, "torch", SimpleNamespace(cuda=cuda))
    context: Any = SimpleNamespace(
        device="cuda",
        line_up=lambda what: None,
        finish=lambda what, event: None,
        gather=lambda mine: [mine, (mine[0], 450.0, mine[2])],
    )
    power = measure_power(context, gpu.run, STEP_US, "a step")
    assert SECONDS * 1e6 <= gpu.now_us < (SECONDS + CHUNK_S) * 1e6
    assert power == Power(STEP_US, 550.0, 1500.0)
    assert power.cycles == STEP_US * 1500


def test_cycles_tell_a_slower_clock_from_a_wait() -> None:
    found = {"compute": (1000.0, 1500.0), "ours": (1030.0, 1456.0), "naive": (1100.0, 1500.0)}
    rows = [
        a_row(op=POWER, details={"variant": name, POWER: vars(Power(us, 700.0, mhz))})
        for name, (us, mhz) in found.items()
    ]
    table = power_table(recorded(rows))
    assert [(line[1], line[5], line[7]) for line in cells(table)] == [
        ("compute", "", ""),
        ("ours", "+3.0 %", "-0.0 %"),
        ("NCCL", "+10.0 %", "+10.0 %"),
    ]
    assert block_table(recorded(rows)) == ""
