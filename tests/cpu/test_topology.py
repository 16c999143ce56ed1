"""The probe: what it learns from NVML and CUDA, and what it calls unknown."""

from __future__ import annotations

import inspect
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pynvml
import pytest
import torch
from fake_nvml import (
    NO_MPS,
    NVLINK,
    READ,
    WRITE,
    FakeCuda,
    FakeGpu,
    FakeNvml,
    machine,
    rank_topology,
)

from ulysses_ops import host, nvml
from ulysses_ops.facts import Fact, LinkBundle, Pair, Topology
from ulysses_ops.nvml import MIG_DISABLED, P2P_STATUS_NAMES
from ulysses_ops.topology import probe


def nvml_error(code: int) -> Exception:
    error = pynvml.NVMLError(code)
    assert isinstance(error, Exception)
    return error


def pair_of(seen: Topology, source: FakeGpu, target: FakeGpu) -> Pair:
    wanted = (f"GPU-{source.uuid}", f"GPU-{target.uuid}")
    (pair,) = [p for p in seen.pairs if (p.source_uuid, p.target_uuid) == wanted]
    return pair


def test_a_good_machine_is_known() -> None:
    gpus = machine(2)
    nvml = FakeNvml(gpus)
    seen = rank_topology(nvml, FakeCuda(gpus, [0, 1]), 1)
    assert (seen.device, seen.device_uuid) == ("cuda:1", f"GPU-{gpus[1].uuid}")
    assert seen.gpu is not None
    assert (seen.gpu.pci_bus_id, seen.gpu.nvml_index) == ("00000000:11:00.0", 1)
    assert [f.answer for f in (seen.nvml, seen.identity, seen.library)] == ["yes"] * 3
    assert (seen.gpu.mig.answer, seen.mps.answer) == ("no", "no")
    assert seen.stream_memory_64bit.answer == seen.flush_remote_writes.answer == "yes"
    assert seen.async_engines.value == 3
    assert (seen.driver_version.value, seen.cuda_driver_version.value) == ("580.00", 13000)
    assert len(seen.pairs) == 2
    for pair in seen.pairs:
        facts = (pair.read, pair.write, pair.nvlink, pair.peer_access)
        assert [fact.answer for fact in facts if fact is not None] == ["yes"] * 4
    assert seen.process.boot_id.value == host.BOOT_ID_PATH.read_text().strip()
    assert str(seen.process.pid_namespace.value).startswith("pid:[")
    assert (nvml.started, nvml.open) == (1, 0)


def test_the_fake_is_shaped_like_the_installed_nvml() -> None:
    for name, function in inspect.getmembers(FakeNvml, inspect.isfunction):
        if name.startswith("nvml"):
            real = list(inspect.signature(getattr(pynvml, name)).parameters)
            assert len(inspect.signature(function).parameters) == len(real) + 1, name
    for value, name in enumerate(P2P_STATUS_NAMES):
        assert getattr(pynvml, f"NVML_P2P_STATUS_{name}") == value
    assert pynvml.NVML_DEVICE_MIG_DISABLE == MIG_DISABLED


@pytest.mark.parametrize("read_index", [(0,), 0], ids=["tuple", "int"])
def test_read_status_survives_the_tuple_constant(read_index: Any) -> None:
    gpus = machine(2)
    nvml = FakeNvml(
        gpus, {(0, 1, READ): pynvml.NVML_P2P_STATUS_DISABLED_BY_REGKEY}, {}, {}, 0, 0, read_index
    )
    with pytest.raises(pynvml.NVMLError if read_index == 0 else TypeError):
        nvml.nvmlDeviceGetP2PStatus(0, 1, read_index)  # control: the tuple itself is refused
    seen = rank_topology(nvml, FakeCuda(gpus, [0, 1]), 0)
    read = pair_of(seen, gpus[0], gpus[1]).read
    assert (read.answer, read.reason) == ("no", "P2P read status is DISABLED_BY_REGKEY")
    assert pair_of(seen, gpus[1], gpus[0]).read.answer == "yes"


@pytest.mark.parametrize("kind", [READ, WRITE, NVLINK])
@pytest.mark.parametrize(("status", "answer"), [(0, "yes"), (1, "no"), (5, "no"), (6, "unknown")])
def test_pair_status_is_directed_and_by_kind(kind: int, status: int, answer: str) -> None:
    gpus = machine(3)
    seen = rank_topology(FakeNvml(gpus, {(0, 2, kind): status}), FakeCuda(gpus, [0, 1, 2]), 0)
    answers = {
        (p.source_uuid, p.target_uuid, k): fact.answer
        for p in seen.pairs
        for k, fact in ((READ, p.read), (WRITE, p.write), (NVLINK, p.nvlink))
    }
    assert answers.pop((f"GPU-{gpus[0].uuid}", f"GPU-{gpus[2].uuid}", kind)) == answer
    assert set(answers.values()) == {"yes"}


def test_a_status_of_the_future_is_unknown() -> None:
    gpus = machine(2)
    seen = rank_topology(FakeNvml(gpus, {(0, 1, WRITE): 77}), FakeCuda(gpus, [0, 1]), 0)
    write = pair_of(seen, gpus[0], gpus[1]).write
    assert (write.answer, write.reason) == ("unknown", "P2P write status is unknown (77)")


@pytest.mark.parametrize(
    ("code", "answer"),
    [(pynvml.NVML_ERROR_NOT_SUPPORTED, "no"), (pynvml.NVML_ERROR_FUNCTION_NOT_FOUND, "unknown")],
)
def test_a_gpu_without_mig_mode_is_not_a_question_without_answer(code: int, answer: str) -> None:
    nvml = FakeNvml(machine(1), failures={"nvmlDeviceGetMigMode": nvml_error(code)})
    (gpu,) = probe(None, nvml=nvml, environ=NO_MPS).gpus
    assert gpu.mig.answer == answer


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, "NVML Shared Library Not Found"),
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "Driver Not Loaded"),
        (pynvml.NVML_ERROR_NO_PERMISSION, "Insufficient Permissions"),
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "version mismatch"),
    ],
)
def test_nvml_that_does_not_start_is_unknown_with_the_reason(code: int, text: str) -> None:
    gpus = machine(2)
    nvml = FakeNvml(gpus, failures={"nvmlInit": nvml_error(code)})
    seen = rank_topology(nvml, FakeCuda(gpus, [0, 1]), 0)
    assert seen.nvml.answer == seen.identity.answer == "unknown"
    assert text in seen.nvml.reason
    assert (seen.gpus, seen.pairs, nvml.open) == ((), (), 0)
    assert seen.device_uuid == f"GPU-{gpus[0].uuid}"  # CUDA still tells it, so sharing shows


def test_nvml_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    seen = rank_topology(None, FakeCuda(machine(1), [0]), 0)
    assert seen.nvml.answer == "unknown"
    assert seen.nvml.reason.startswith("NVML not importable: ModuleNotFoundError")


def test_another_package_by_the_name_of_pynvml() -> None:
    seen = rank_topology(object(), FakeCuda(machine(1), [0]), 0)
    assert seen.nvml.reason.startswith("NVML does not start: AttributeError")


FUNCTIONS = [name for name in vars(FakeNvml) if name.startswith("nvml")]
CODES = ["NOT_SUPPORTED", "GPU_IS_LOST", "UNKNOWN", "NO_PERMISSION"]


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("code", CODES)
def test_every_call_may_fail(function: str, code: str) -> None:
    gpus = machine(2)
    failure = nvml_error(getattr(pynvml, f"NVML_ERROR_{code}"))
    nvml = FakeNvml(gpus, failures={function: failure})
    seen = rank_topology(nvml, FakeCuda(gpus, [0, 1]), 0)
    assert nvml.started == (function != "nvmlInit")
    assert nvml.open == (function == "nvmlShutdown")
    assert Topology.from_json(seen.to_json()) == seen
    if function == "nvmlDeviceGetP2PStatus":
        for pair in seen.pairs:
            assert {f.answer for f in (pair.read, pair.write, pair.nvlink)} == {"unknown"}
            assert type(failure).__name__ in pair.write.reason


def test_a_lost_gpu_does_not_hide_the_others() -> None:
    gpus = machine(3)
    lost = {("nvmlDeviceGetHandleByIndex", 1): nvml_error(pynvml.NVML_ERROR_GPU_IS_LOST)}
    seen = rank_topology(FakeNvml(gpus, failures=lost), FakeCuda(gpus, [0, 2]), 1)
    assert [gpu.nvml_index for gpu in seen.gpus] == [0, 2]
    assert seen.notes == ("NVML device 1 cannot be read: NVMLError_GpuIsLost: GPU is lost",)
    assert seen.device_uuid == f"GPU-{gpus[2].uuid}"


def test_zero_devices() -> None:
    nvml = FakeNvml([])
    seen = rank_topology(nvml, FakeCuda([], []), 0)
    assert (seen.nvml.answer, seen.nvml.reason) == ("no", "NVML lists no readable GPU")
    assert (seen.identity.answer, seen.device_uuid, nvml.open) == ("unknown", None, 0)
    assert "not among the 0 visible" in seen.identity.reason


@pytest.mark.parametrize("call", ["device_count", "get_device_properties"])
def test_cuda_that_cannot_be_asked(call: str) -> None:
    gpus = machine(1)
    cuda = FakeCuda(gpus, [0], failures={call: RuntimeError("Error 802:\n  not yet initialized")})
    seen = rank_topology(FakeNvml(gpus), cuda, 0)
    reason = "CUDA cannot be asked: RuntimeError: Error 802: not yet initialized"
    assert (seen.identity.answer, seen.identity.reason) == ("unknown", reason)
    assert seen.stream_memory_64bit.answer == "unknown"
    assert (seen.device, len(seen.gpus)) == ("cuda:0", 1)


def test_a_device_without_index_is_the_current_one() -> None:
    gpus = machine(2)
    cuda = FakeCuda(gpus, [0, 1], current=1)
    seen = probe(torch.device("cuda"), nvml=FakeNvml(gpus), cuda=cuda, environ=NO_MPS)
    assert (seen.device, seen.device_uuid) == ("cuda:1", f"GPU-{gpus[1].uuid}")


def test_peer_access_is_asked_for_visible_gpus_only() -> None:
    gpus = machine(3)
    cuda = FakeCuda(gpus, [2, 0], refused=frozenset({(2, 0)}))
    seen = rank_topology(FakeNvml(gpus), cuda, 0)
    refused = Fact("no", "cuda", "CUDA refuses peer access")
    assert pair_of(seen, gpus[2], gpus[0]).peer_access == refused
    assert pair_of(seen, gpus[0], gpus[2]).peer_access == Fact("yes", "cuda")
    assert pair_of(seen, gpus[0], gpus[1]).peer_access is None
    broken = FakeCuda(gpus, [2, 0], failures={"can_device_access_peer": RuntimeError("lost")})
    asked = pair_of(rank_topology(FakeNvml(gpus), broken, 0), gpus[2], gpus[0]).peer_access
    assert asked is not None
    assert (asked.answer, "RuntimeError: lost" in asked.reason) == ("unknown", True)


@pytest.mark.parametrize(
    ("values", "answers"),
    [([0, 1, 3], ("no", "yes")), ([1, 0, 3], ("yes", "no")), ([1], None), ([-1, 0, 3], None)],
)
def test_stream_memory_facts(values: list[int], answers: tuple[str, str] | None) -> None:
    gpus = machine(1)
    seen = rank_topology(FakeNvml(gpus), FakeCuda(gpus, [0]), 0, facts=lambda _: values)
    found = (seen.stream_memory_64bit.answer, seen.flush_remote_writes.answer)
    assert found == (answers or ("unknown", "unknown"))
    assert (seen.async_engines.value is None) == (answers is None)


def test_the_op_for_stream_memory_facts_gets_the_ordinal_and_may_be_missing() -> None:
    gpus = machine(2)
    asked: list[int] = []

    def facts(ordinal: int) -> list[int]:
        asked.append(ordinal)
        raise AttributeError("no attribute '_cuda_device_facts'")

    seen = rank_topology(FakeNvml(gpus), FakeCuda(gpus, [1, 0]), 1, facts=facts)
    assert asked == [1]
    assert seen.stream_memory_64bit.answer == seen.flush_remote_writes.answer == "unknown"
    assert "_cuda_device_facts" in seen.stream_memory_64bit.reason


# ---- facts without weight ------------------------------------------------------------------------


def test_facts_of_a_gpu() -> None:
    cards = [
        replace(gpu, numa_node=i, cpus=(48 * i, 48 * i + 47), compute_mode=3 * i, persistence=i)
        for i, gpu in enumerate(machine(2))
    ]
    seen = rank_topology(FakeNvml(cards), FakeCuda(cards, [0, 1]), 0)
    first, second = seen.gpus
    assert (first.compute_capability.value, first.memory_bytes.value) == ("9.0", 141 << 30)
    assert (first.numa_node.value, second.numa_node.value) == (0, 1)
    assert (first.cpu_affinity.value, second.cpu_affinity.value) == ("0-47", "48-95")
    assert (first.compute_mode.value, second.compute_mode.value) == ("default", "exclusive process")
    assert (first.persistence.answer, second.persistence.answer) == ("no", "yes")
    assert (first.virtualisation.value, first.fabric.value) == ("none", "completed")
    assert (first.nvlinks.value, first.nvlink_version.value) == (18, "4.0")
    assert first.nvlink_mbps.value == 26562
    assert first.links == (LinkBundle("switch", None, 18),)
    assert (first.has_switch, seen.multicast.answer) == (True, "yes")


@pytest.mark.parametrize(
    ("fabric", "text"),
    [
        ((0, 0), "not supported"),
        ((1, 0), "not started"),
        ((2, 0), "in progress"),
        ((3, 9), "completed, status 9"),
        ((9, 0), "unknown (9)"),
    ],
)
def test_fabric_state_is_read_by_reference(fabric: tuple[int, int], text: str) -> None:
    cards = [replace(gpu, fabric=fabric) for gpu in machine(1)]
    (gpu,) = rank_topology(FakeNvml(cards), FakeCuda(cards, [0]), 0).gpus
    assert gpu.fabric.value == text


def test_the_numa_node_comes_from_the_bus_where_nvml_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvml, "PCI_DEVICES_PATH", tmp_path)
    for name, node in (("0000:10:00.0", 1), ("0000:11:00.0", -1)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "numa_node").write_text(f"{node}\n")
    failures = {"nvmlDeviceGetNumaNodeId": nvml_error(pynvml.NVML_ERROR_NOT_SUPPORTED)}
    gpus = machine(3)
    seen = rank_topology(FakeNvml(gpus, failures=failures), FakeCuda(gpus, [0]), 0)
    assert [gpu.numa_node.value for gpu in seen.gpus] == [1, None, None]
    assert seen.gpus[0].numa_node.source.endswith("0000:10:00.0/numa_node")
    assert "no node is named" in seen.gpus[1].numa_node.reason
    assert "NotSupported" in seen.gpus[2].numa_node.reason


def test_numbers_of_the_future_are_not_names() -> None:
    cards = [replace(gpu, compute_mode=7, virtualisation=9) for gpu in machine(2)]
    seen = rank_topology(FakeNvml(cards, ancestor=35), FakeCuda(cards, [0, 1]), 0)
    assert seen.gpus[0].compute_mode.value == "unknown (7)"
    assert seen.gpus[0].virtualisation.value == "unknown (9)"
    assert seen.pairs[0].ancestor.value == "unknown (35)"


def test_nvml_can_be_kept_up_and_stays_balanced() -> None:
    gpus = machine(1)
    fake = FakeNvml(gpus)
    with nvml.started(fake):
        assert fake.open == 1
        rank_topology(fake, FakeCuda(gpus, [0]), 0)
        assert (fake.open, fake.started) == (1, 2)
    assert fake.open == 0
    broken = FakeNvml(gpus, failures={"nvmlInit": nvml_error(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)})
    with nvml.started(broken), nvml.started(object()):
        assert broken.open == 0
    assert broken.open == 0


def test_ancestor_and_atomics_of_a_pair() -> None:
    gpus = machine(2)
    fake = FakeNvml(gpus, {(0, 1, 3): pynvml.NVML_P2P_STATUS_NOT_SUPPORTED}, ancestor=30)
    seen = rank_topology(fake, FakeCuda(gpus, [0, 1]), 0)
    pair = pair_of(seen, gpus[0], gpus[1])
    assert (pair.ancestor.value, pair.atomics.answer) == ("hostbridge", "no")
    assert pair_of(seen, gpus[1], gpus[0]).atomics.answer == "yes"


def test_every_device_is_what_its_rank_would_know() -> None:
    gpus = machine(3)
    cuda = FakeCuda(gpus, [2, 0])
    seen = rank_topology(FakeNvml(gpus), cuda, 0, every_device=True, facts=lambda i: [1, i, 3 + i])
    ranks = seen.as_ranks()
    assert [rank.device for rank in ranks] == ["cuda:0", "cuda:1"]
    for ordinal, rank in enumerate(ranks):
        alone = rank_topology(FakeNvml(gpus), cuda, ordinal, facts=lambda i: [1, i, 3 + i])
        as_one = replace(rank, process=alone.process, devices=())
        assert as_one == alone
    assert len({rank.process.pid for rank in ranks}) == 2
    assert rank_topology(FakeNvml(gpus), cuda, 0).as_ranks() == ()


def test_a_survey_of_eight_gpus_asks_little() -> None:
    """Every call costs microseconds; hundreds of them stay far below 150 ms."""
    nvml_of_eight = FakeNvml(machine(8))
    rank_topology(nvml_of_eight, FakeCuda(machine(8), list(range(8))), 0)
    assert nvml_of_eight.calls < 8 * 60 + 56 * 4 + 28 + 20
    assert nvml_of_eight.calls > 8 * 18  # control: it counts
