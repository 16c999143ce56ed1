"""Whether the NVLinks of a GPU save power at this moment, by NVML.

Links that carry nothing for a while go to a low-power state by themselves. Where power limits the
clock, a GPU whose links are awake computes more slowly: ``docs/design/schedule.md``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ulysses_ops.asking import attempt
from ulysses_ops.nvml import import_nvml

UNIT_US = {0: 100, 1: 50}  # of the idle time, by the number that NVML gives the unit


@dataclass(frozen=True)
class LinkPower:
    """The NVLinks of one GPU.

    Attributes:
        awake: The part of them that is not in its low-power state, 0 to 1.
        sleep_after_us: Idle time after which a link goes there; ``None`` where NVML does not say.
    """

    awake: float
    sleep_after_us: int | None


def read_link_power(uuid: str, nvml: Any = None) -> LinkPower | None:
    """Ask NVML, which has to be up. Never raises.

    Args:
        uuid: Of the GPU, with its prefix ``GPU-``.
        nvml: Stands in for ``pynvml``.

    Returns:
        The state, or ``None`` where the GPU has no link that tells.
    """
    if nvml is None:
        nvml, _ = attempt(import_nvml)
    found, _ = attempt(lambda: _read(nvml, nvml.nvmlDeviceGetHandleByUUID(uuid)))
    return found


def _read(nvml: Any, handle: Any) -> LinkPower | None:
    state = nvml.NVML_FI_DEV_NVLINK_GET_POWER_STATE
    states = _answers(nvml, handle, [(state, link) for link in range(nvml.NVML_NVLINK_MAX_LINKS)])
    if not states:
        return None
    threshold = nvml.NVML_FI_DEV_NVLINK_GET_POWER_THRESHOLD
    unit = nvml.NVML_FI_DEV_NVLINK_GET_POWER_THRESHOLD_UNITS
    idle, units = (_answers(nvml, handle, [(field, 0)]) for field in (threshold, unit))
    is_told = bool(idle and units) and units[0] in UNIT_US
    awake = states.count(nvml.NVML_NVLINK_POWER_STATE_HIGH_SPEED) / len(states)
    return LinkPower(awake, idle[0] * UNIT_US[units[0]] if is_told else None)


def _answers(nvml: Any, handle: Any, fields: list[tuple[int, int]]) -> list[int]:
    """What NVML answers at all, of these fields."""
    answers = nvml.nvmlDeviceGetFieldValues(handle, fields)
    return [int(answer.value.uiVal) for answer in answers if answer.nvmlReturn == 0]
