"""Which GPU of NVML is a device of CUDA? What contradicts itself identifies nothing."""

from __future__ import annotations

from dataclasses import replace

import pynvml
import pytest
from fake_nvml import FakeCuda, FakeNvml, machine, rank_topology

from ulysses_ops.eligibility import Request, decide


@pytest.mark.parametrize(
    ("visible", "numbers"),
    [
        ([2, 3], [None, None, 0, 1]),  # CUDA_VISIBLE_DEVICES=2,3
        ([3, 1], [None, 1, None, 0]),  # CUDA_VISIBLE_DEVICES=3,1
        ([1, 2, 3, 0], [3, 0, 1, 2]),  # FASTEST_FIRST, with a display card as NVML 0
    ],
)
def test_devices_are_matched_by_uuid(visible: list[int], numbers: list[int | None]) -> None:
    gpus = machine(4)
    for ordinal, index in enumerate(visible):
        seen = rank_topology(FakeNvml(gpus), FakeCuda(gpus, visible), ordinal)
        assert seen.device_uuid == f"GPU-{gpus[index].uuid}"
        assert seen.gpu is not None
        assert (seen.gpu.nvml_index, seen.gpu.cuda_ordinal) == (index, ordinal)
        assert [gpu.cuda_ordinal for gpu in seen.gpus] == numbers
        assert seen.identity.source == "uuid"
    assert visible != list(range(len(visible)))  # control: a match by index would be seen


def test_without_a_uuid_the_pci_id_decides() -> None:
    gpus = machine(4)
    seen = rank_topology(FakeNvml(gpus), FakeCuda(gpus, [3, 1], hide_uuid=True), 0)
    assert (seen.device_uuid, seen.identity.source) == (f"GPU-{gpus[3].uuid}", "pci")


def test_uuid_and_pci_id_that_disagree_identify_nothing() -> None:
    gpus = machine(2)
    crossed = [replace(gpus[0], bus=gpus[1].bus), replace(gpus[1], bus=gpus[0].bus)]
    seen = rank_topology(FakeNvml(gpus), FakeCuda(crossed, [0, 1]), 0)
    assert seen.identity.answer == "unknown"
    assert "has its UUID and PCI id from several GPUs of NVML" in seen.identity.reason


def test_a_gpu_that_nvml_does_not_list_is_not_identified() -> None:
    gpus = machine(3)
    seen = rank_topology(FakeNvml(gpus[:2]), FakeCuda(gpus, [2]), 0)
    assert seen.identity.answer == "unknown"
    assert "is not among the 2 GPUs that NVML lists" in seen.identity.reason
    assert seen.gpu is None


def test_a_mig_slice_is_found_by_its_gpu() -> None:
    gpus = machine(1)
    slices = [replace(gpus[0], uuid=machine(9)[8].uuid)]
    seen = rank_topology(FakeNvml(gpus, mig={0: 1}), FakeCuda(slices, [0]), 0)
    assert (seen.identity.answer, seen.identity.source) == ("yes", "pci")
    assert seen.gpu is not None
    assert (seen.gpu.mig.answer, seen.gpu.mig.reason) == ("yes", "MIG is enabled on this GPU")


@pytest.mark.parametrize("mig", [0, None], ids=["off", "unknown"])
def test_another_uuid_at_the_same_pci_id_is_no_slice_without_mig(mig: int | None) -> None:
    gpus = machine(2)
    strange = [replace(gpus[0], uuid=machine(9)[8].uuid), gpus[1]]
    failure = pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN)
    nvml = FakeNvml(gpus, failures={} if mig == 0 else {("nvmlDeviceGetMigMode", 0): failure})
    cuda = FakeCuda(strange, [0, 1])
    ranks = [rank_topology(nvml, cuda, rank, rank=rank) for rank in range(2)]
    assert (ranks[0].identity.answer, ranks[1].identity.answer) == ("unknown", "yes")
    assert "is not known to be a MIG slice of it" in ranks[0].identity.reason
    decision = decide(ranks, Request(backends=("nccl",)))
    assert (decision.transport, decision.certain) == ("nccl", False)
    good = [rank_topology(nvml, FakeCuda(gpus, [0, 1]), rank, rank=rank) for rank in range(2)]
    assert good[0].identity.answer == "yes"  # control: with the UUID of NVML


def test_the_same_uuid_at_another_pci_id_identifies_nothing() -> None:
    gpus = machine(2)
    moved = [replace(gpus[0], bus=0x77), gpus[1]]
    seen = rank_topology(FakeNvml(gpus), FakeCuda(moved, [0, 1]), 0)
    assert seen.identity.answer == "unknown"
    assert "the two contradict each other" in seen.identity.reason


def test_without_a_pci_id_the_uuid_decides() -> None:
    gpus = machine(2)
    failures = {"nvmlDeviceGetPciInfo": pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN)}
    seen = rank_topology(FakeNvml(gpus, failures=failures), FakeCuda(gpus, [0, 1]), 1)
    assert (seen.identity.answer, seen.identity.source) == ("yes", "uuid")


@pytest.mark.parametrize("same", ["uuid", "bus"])
def test_a_gpu_that_nvml_lists_twice_identifies_nothing(same: str) -> None:
    gpus = machine(2)
    twins = [gpus[0], replace(gpus[1], **{same: getattr(gpus[0], same)})]
    seen = rank_topology(FakeNvml(twins), FakeCuda(gpus, [0, 1]), 0)
    assert seen.identity.answer == "unknown"
    assert "from several GPUs of NVML" in seen.identity.reason
