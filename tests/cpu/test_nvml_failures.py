"""NVML fails at any call, with any code: the verdict is never better than what is known."""

from __future__ import annotations

import pynvml
import pytest
from fake_nvml import FakeCuda, FakeNvml, machine, rank_topology

from ulysses_ops.eligibility import Decision, Request, decide
from ulysses_ops.facts import Topology

FUNCTIONS = [name for name in vars(FakeNvml) if name.startswith("nvml")]
CODES = sorted(name for name in vars(pynvml) if name.startswith("NVML_ERROR_"))
# Without what these tell, no group may use the copy engines.
NEEDED = {
    "nvmlInit",
    "nvmlDeviceGetCount",
    "nvmlDeviceGetHandleByIndex",
    "nvmlDeviceGetUUID",
    "nvmlDeviceGetMigMode",
    "nvmlDeviceGetP2PStatus",
}


def judged(nvml: FakeNvml) -> tuple[Decision, list[Topology]]:
    """Rank 0 has the NVML given, rank 1 a good one."""
    gpus = machine(2)
    cuda = FakeCuda(gpus, [0, 1])
    ranks = [
        rank_topology(nvml, cuda, 0, rank=0, every_device=True),
        rank_topology(FakeNvml(gpus), cuda, 1, rank=1),
    ]
    return decide(ranks, Request(backends=("nccl",))), ranks


@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_function_with_every_code(function: str) -> None:
    for code in CODES:
        failure = pynvml.NVMLError(getattr(pynvml, code))
        nvml = FakeNvml(machine(2), failures={function: failure})
        decision, ranks = judged(nvml)
        # A GPU without MIG mode says so by this code.
        harmless = function == "nvmlDeviceGetMigMode" and code == "NVML_ERROR_NOT_SUPPORTED"
        expected = "nccl" if function in NEEDED and not harmless else "ce"
        assert decision.transport == expected, code
        if expected == "nccl":
            assert any("rank 0" in reason for reason in decision.reasons), code
        assert nvml.open == (function == "nvmlShutdown"), code
        assert Topology.from_json(ranks[0].to_json()) == ranks[0]


@pytest.mark.parametrize("code", ["GPU_IS_LOST", "NOT_SUPPORTED", "INVALID_ARGUMENT", "UNKNOWN"])
def test_every_single_call(code: str) -> None:
    """The n-th call fails, for each n: nothing raises, init and shutdown stay balanced."""
    good = FakeNvml(machine(2))
    judged(good)
    failure = pynvml.NVMLError(getattr(pynvml, f"NVML_ERROR_{code}"))
    verdicts = set()
    for number in range(1, good.calls):  # the last is the shutdown
        nvml = FakeNvml(machine(2), failures={number: failure})
        decision, _ = judged(nvml)
        verdicts.add(decision.transport)
        assert nvml.calls >= number
        assert nvml.open == 0, number
    assert verdicts == {"ce", "nccl"}


def test_calls_that_raise_something_else() -> None:
    for function in FUNCTIONS:
        nvml = FakeNvml(machine(2), failures={function: AttributeError("no such function")})
        decision, _ = judged(nvml)
        assert decision.transport == ("nccl" if function in NEEDED else "ce"), function
