"""NVLinks of a GPU: how many, where they lead, what they are and what they carry."""

from __future__ import annotations

from dataclasses import replace

import pynvml
import pytest
from fake_nvml import DOWN, SWITCH, FakeCuda, FakeGpu, FakeNvml, machine, rank_topology

from ulysses_ops.facts import Gpu, LinkBundle
from ulysses_ops.nvml import NOMINAL_MBPS, NVLINK_VERSIONS


def only_gpu(card: FakeGpu, **options: object) -> Gpu:
    nvml = FakeNvml([card], **options)  # type: ignore[arg-type]
    (gpu,) = rank_topology(nvml, FakeCuda([card], [0]), 0).gpus
    return gpu


def test_links_are_counted_by_where_they_lead() -> None:
    cards = [replace(gpu, links=(DOWN, 1, 1, SWITCH, DOWN, 2)) for gpu in machine(3)]
    seen = rank_topology(FakeNvml(cards), FakeCuda(cards, [0, 1, 2]), 0)
    assert seen.gpus[0].nvlinks.value == 4
    assert seen.gpus[0].nvlink_version.value == "4.0"  # of the first link that is up
    assert seen.gpus[0].links == (
        LinkBundle("gpu", "00000000:11:00.0", 2),
        LinkBundle("gpu", "00000000:12:00.0", 1),
        LinkBundle("switch", None, 1),
    )
    assert [seen.direct_links(gpu.uuid) for gpu in seen.gpus] == [0, 2, 1]


@pytest.mark.parametrize(
    ("links", "count", "reason"), [((), 0, "has no NVLink"), ((DOWN,) * 4, 0, "")]
)
def test_no_link_is_an_answer(links: tuple[int, ...], count: int, reason: str) -> None:
    cards = [replace(gpu, links=links) for gpu in machine(1)]
    (gpu,) = rank_topology(FakeNvml(cards), FakeCuda(cards, [0]), 0).gpus
    assert (gpu.nvlinks.value, reason in gpu.nvlinks.reason) == (count, True)
    assert (gpu.links, gpu.nvlink_version.reason) == ((), "no NVLink is up")


@pytest.mark.parametrize(
    ("number", "version"),
    [
        (1, "1.0"), (2, "2.0"), (3, "2.2"), (4, "3.0"), (5, "3.1"), (6, "4.0"), (7, "5.0"),
        (8, "6.0"), (0, "unknown (0)"), (9, "unknown (9)"), (255, "unknown (255)"),
    ],
)  # fmt: skip
def test_a_version_is_what_people_call_it(number: int, version: str) -> None:
    """NVML numbers versions in the order in which they came, and an H200 says 6."""
    assert only_gpu(replace(machine(1)[0], link_version=number)).nvlink_version.value == version


def test_versions_are_those_of_nvml() -> None:
    named = {
        value: name.removeprefix("NVML_NVLINK_VERSION_").replace("_", ".")
        for name, value in vars(pynvml).items()
        if name.startswith("NVML_NVLINK_VERSION_") and value
    }
    assert named
    assert all(NVLINK_VERSIONS[value] == name for value, name in named.items())
    assert set(NOMINAL_MBPS) <= set(NVLINK_VERSIONS)


@pytest.mark.parametrize(
    ("common", "own", "number", "found", "source"),
    [
        (26562, 1, 6, 26562, "nvml"),
        (None, 26562, 6, 26562, "nvml"),
        (0, 26562, 6, 26562, "nvml"),
        (None, None, 6, 25000, "nominal rate of NVLink 4.0"),
        (None, 0, 7, 50000, "nominal rate of NVLink 5.0"),
        (None, None, 8, None, "nvml"),  # nothing is made up
        (None, None, 9, None, "nvml"),
    ],
)
def test_the_rate_of_a_link_falls_back(
    common: int | None, own: int | None, number: int, found: int | None, source: str
) -> None:
    links = (DOWN, SWITCH, SWITCH)  # the first that is up is the one to ask
    card = replace(
        machine(1)[0], links=links, link_mbps=common, one_link_mbps=own, link_version=number
    )
    rate = only_gpu(card).nvlink_mbps
    assert (rate.value, rate.source) == (found, source)
    assert bool(rate.reason) == (found is None)


def test_the_rate_falls_back_where_fields_cannot_be_read_at_all() -> None:
    failure = pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
    gpu = only_gpu(machine(1)[0], failures={"nvmlDeviceGetFieldValues": failure})
    assert gpu.nvlink_mbps.value == 25000
    unknown = only_gpu(
        machine(1)[0],
        failures={"nvmlDeviceGetFieldValues": failure, "nvmlDeviceGetNvLinkVersion": failure},
    )
    assert (unknown.nvlink_mbps.value, unknown.nvlink_version.value) == (None, None)
    assert unknown.nvlinks.value == 18
