"""Power and clocks of a step that is run over and over, with a GPU that is told what to say."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
from recorded import a_row
from test_result_tables import cells, recorded

from ulysses_ops.tools import power as module
from ulysses_ops.tools.block_table import block_table, power_table
from ulysses_ops.tools.link_power import LinkPower, read_link_power
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
    cuda = SimpleNamespace(
        Event=gpu.event,
        power_draw=gpu.power_draw,
        clock_rate=gpu.clock_rate,
        get_device_properties=lambda device: SimpleNamespace(uuid="1234"),
    )
    monkeypatch.setattr(module, "torch", SimpleNamespace(cuda=cuda))
    links = iter([None, LinkPower(1.0, 50_000), *[LinkPower(0.5, 50_000)] * 1000])
    monkeypatch.setattr(module, "read_link_power", lambda uuid: next(links))
    context: Any = SimpleNamespace(
        device="cuda",
        line_up=lambda what: None,
        finish=lambda what, event: None,
        gather=lambda mine: json.loads(
            json.dumps([mine, ((mine[0][0], 450.0, mine[0][2]), [(0.5, 50_000)])])
        ),
    )
    power = measure_power(context, gpu.run, STEP_US, "a step")
    assert SECONDS * 1e6 <= gpu.now_us < (SECONDS + CHUNK_S) * 1e6
    assert power == Power(STEP_US, 550.0, 1500.0, links_awake=0.5, links_sleep_after_us=50_000)
    assert power.cycles == STEP_US * 1500


def test_cycles_tell_a_slower_clock_from_a_wait() -> None:
    found = {"compute": (1000.0, 1500.0), "ours": (1030.0, 1456.0), "naive": (1100.0, 1500.0)}
    rows = [
        a_row(op=POWER, details={"variant": name, POWER: vars(Power(us, 700.0, mhz))})
        for name, (us, mhz) in found.items()
    ]
    table = power_table(recorded(rows))
    assert [(line[1], line[2], line[6], line[8]) for line in cells(table)] == [
        ("compute", "unknown", "", ""),
        ("ours, V first", "unknown", "+3.0 %", "-0.0 %"),
        ("NCCL", "unknown", "+10.0 %", "+10.0 %"),
    ]
    assert block_table(recorded(rows)) == ""


class Links:
    """Stands in for ``pynvml``: a GPU of four links, of which some save power."""

    def __init__(self, states: list[int], idle: int | None = 500, unit: int = 0) -> None:
        self.told: dict[tuple[int, int], int] = {
            (pynvml.NVML_FI_DEV_NVLINK_GET_POWER_STATE, link): state
            for link, state in enumerate(states)
        }
        if idle is not None:
            self.told[pynvml.NVML_FI_DEV_NVLINK_GET_POWER_THRESHOLD, 0] = idle
            self.told[pynvml.NVML_FI_DEV_NVLINK_GET_POWER_THRESHOLD_UNITS, 0] = unit

    def __getattr__(self, name: str) -> int:
        value: int = getattr(pynvml, name)
        return value

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        if uuid != "GPU-1":
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return uuid

    def nvmlDeviceGetFieldValues(self, handle: str, fields: list[tuple[int, int]]) -> list[Any]:  # noqa: N802
        return [
            SimpleNamespace(
                nvmlReturn=0 if field in self.told else pynvml.NVML_ERROR_NOT_SUPPORTED,
                value=SimpleNamespace(uiVal=self.told.get(field, 0)),
            )
            for field in fields
        ]


def test_links_that_save_power_are_told_from_those_that_are_awake() -> None:
    assert read_link_power("GPU-1", Links([0, 1, 1, 1])) == LinkPower(0.25, 50_000)
    assert read_link_power("GPU-1", Links([0, 0, 0, 0], unit=1)) == LinkPower(1.0, 25_000)


def test_what_nvml_does_not_say_of_links_is_unknown() -> None:
    assert read_link_power("GPU-1", Links([1, 1], idle=None)) == LinkPower(0.0, None)
    assert read_link_power("GPU-1", Links([1], unit=7)) == LinkPower(0.0, None)
    assert read_link_power("GPU-1", Links([])) is None
    assert read_link_power("GPU-2", Links([0])) is None
