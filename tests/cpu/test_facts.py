"""Topologies as frozen values that travel as JSON."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch
from fake_nvml import NOT_LOADED, FakeCuda, FakeNvml, full_mesh, islands, machine, rank_topology

from ulysses_ops.facts import Topology
from ulysses_ops.topology import probe


def test_json_round_trip_is_exact_and_moderate_in_size() -> None:
    for seen in (*full_mesh(8), probe(torch.device("cpu"), environ={})):
        text = seen.to_json()
        assert Topology.from_json(text) == seen
        assert Topology.from_json(text).to_json() == text
        assert len(text) < 40_000
    gpus = machine(8)
    bad = rank_topology(
        FakeNvml(gpus, islands(8, [[0, 1]])), FakeCuda(gpus, [5, 2]), 0, native=NOT_LOADED
    )
    assert Topology.from_json(bad.to_json()) == bad


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (lambda d: d.pop("mps"), "topology: "),
        (lambda d: d.update(extra=1), "topology: "),
        (lambda d: d["mps"].update(answer="maybe"), "topology.mps.answer"),
        (lambda d: d.update(gpus={}), "topology.gpus"),
        (lambda d: d["gpus"][0].update(nvml_index=True), "topology.gpus.nvml_index"),
        (lambda d: d["process"]["boot_id"].update(value=1.5), "topology.process.boot_id.value"),
        (lambda d: d["pairs"][0].update(peer_access="yes"), "topology.pairs.peer_access"),
    ],
)
def test_json_of_another_shape_is_refused(change: Any, where: str) -> None:
    record = json.loads(full_mesh(2)[0].to_json())
    change(record)
    with pytest.raises(ValueError, match=f"^{where}"):
        Topology.from_json(json.dumps(record))


def test_facts_are_frozen() -> None:
    seen = full_mesh(1)[0]
    with pytest.raises(FrozenInstanceError):
        seen.mps.answer = "no"  # type: ignore[misc]
