"""The probe, the data check and the rates on real GPUs, one process driving all of them."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor

from ulysses_ops.nvml import NVLINK_VERSIONS
from ulysses_ops.tools.cuda_runtime import RowCopy, enable_peer_access
from ulysses_ops.tools.pair_bandwidth import MIB, Form, PeerTimer, measure_pairs
from ulysses_ops.tools.pair_check import check_pairs
from ulysses_ops.tools.topology_verdict import judge
from ulysses_ops.topology import probe


def devices() -> list[torch.device]:
    return [torch.device("cuda", ordinal) for ordinal in range(torch.cuda.device_count())]


@pytest.mark.two_gpus
def test_the_probe_knows_this_machine_and_is_quick() -> None:
    probe(torch.device("cuda", 0))  # CUDA and NVML are up
    start = time.perf_counter()
    topology = probe(torch.device("cuda", 0), every_device=True)
    took_ms = (time.perf_counter() - start) * 1e3
    assert len(topology.devices) == torch.cuda.device_count()
    assert all(device.identity.answer == "yes" for device in topology.devices)
    assert topology.multicast.answer != "unknown"
    for gpu in topology.gpus:
        capability = torch.cuda.get_device_capability(gpu.cuda_ordinal)
        assert gpu.compute_capability.value == "{}.{}".format(*capability)
        assert gpu.nvlinks.value is not None, gpu.nvlinks.reason
        assert gpu.nvlinks.value == sum(bundle.count for bundle in gpu.links)
        if gpu.nvlinks.value:
            assert gpu.nvlink_version.value in NVLINK_VERSIONS[1:], gpu.nvlink_version
            assert gpu.nvlink_mbps.value is not None, gpu.nvlink_mbps.reason
    assert judge(topology).word == "eligible", judge(topology).reasons
    assert took_ms < 150


@pytest.mark.two_gpus
def test_data_arrives_on_every_pair() -> None:
    assert check_pairs(devices(), RowCopy(), enable_peer_access) == []


@pytest.mark.two_gpus
def test_a_copy_that_is_dropped_is_seen() -> None:
    copy = RowCopy()

    def drops_one_way(target: Tensor, source: Tensor) -> None:
        if source.device.index != 1:
            copy(target, source)

    failures = check_pairs(devices()[:2], drops_one_way, enable_peer_access)
    assert [(failure.source, failure.target) for failure in failures] == [(1, 0)]


@pytest.mark.two_gpus
@pytest.mark.parametrize("form", [Form(1, 64 * MIB), Form(MIB // 4, 256)], ids=["flat", "rows"])
def test_rates_are_those_of_a_link(form: Form) -> None:
    timer = PeerTimer(devices()[:2], form.total_bytes)
    rates, unmeasured = measure_pairs(
        devices()[:2], enable_peer_access, timer.time_copies, forms=[form]
    )
    assert unmeasured == []
    assert {(r.source, r.target, r.both_ways) for r in rates} == {
        (0, 1, False), (1, 0, False), (0, 1, True), (1, 0, True)
    }  # fmt: skip
    for rate in rates:
        assert 5 < rate.gbs < 2000, rate  # faster than by way of the host, slower than memory
