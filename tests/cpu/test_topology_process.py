"""The probe: what it learns about the process, and what it never touches."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_nvml import LOADED, NO_MPS, NOT_LOADED, FakeNvml, full_mesh, machine

from ulysses_ops import host
from ulysses_ops.eligibility import Request, decide
from ulysses_ops.facts import Reading
from ulysses_ops.topology import probe


class Untouchable:
    """Records every access, and refuses it."""

    def __init__(self) -> None:
        self.touched: list[str] = []

    def __getattr__(self, name: str) -> Any:
        self.touched.append(name)
        raise AssertionError(f"{name} was asked for")


@pytest.mark.parametrize(("native", "answer"), [(LOADED, "yes"), (NOT_LOADED, "no")])
def test_the_compiled_library_is_a_fact(native: Any, answer: str) -> None:
    library = probe(torch.device("cpu"), native=native, environ={}).library
    reason = "" if answer == "yes" else "library _C_cuda not loaded: not built"
    assert (library.answer, library.reason) == (answer, reason)


@pytest.mark.parametrize(
    ("files", "environ", "answer"),
    [
        (None, {}, "no"),
        ([], {}, "no"),
        (["control", "log"], {}, "yes"),
        (["log"], {}, "unknown"),
        (None, {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "50"}, "unknown"),
    ],
)
def test_mps(
    tmp_path: Path, files: list[str] | None, environ: Mapping[str, str], answer: str
) -> None:
    place = tmp_path / "mps"
    if files is not None:
        place.mkdir()
        for name in files:
            (place / name).touch()
    given = {"CUDA_MPS_PIPE_DIRECTORY": str(place), **environ}
    fact = probe(None, nvml=FakeNvml([]), environ=given).mps
    assert fact.answer == answer
    assert (str(place) in fact.reason) == (answer != "no")


def test_mps_is_looked_for_where_cuda_would_with_no_variable_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "control").touch()
    monkeypatch.setattr(host, "MPS_DIRECTORY", str(tmp_path))
    assert probe(None, nvml=FakeNvml([]), environ={}).mps.answer == "yes"
    assert probe(None, nvml=FakeNvml([]), environ=NO_MPS).mps.answer == "no"


def test_what_the_system_does_not_tell_is_none_with_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").touch()
    monkeypatch.setattr(host, "BOOT_ID_PATH", tmp_path / "empty")
    monkeypatch.setattr(host, "PID_NAMESPACE_PATH", tmp_path / "missing")
    process = probe(torch.device("cpu"), environ={}).process
    assert (process.boot_id.value, process.boot_id.reason) == (None, "empty")
    assert process.pid_namespace.value is None
    assert "FileNotFoundError" in process.pid_namespace.reason


def test_environment_is_recorded() -> None:
    environ = {"CUDA_VISIBLE_DEVICES": "3,1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    seen = probe(torch.device("cpu"), environ=environ)
    assert (seen.visible_devices, seen.max_connections) == ("3,1", "1")


def test_a_cpu_device_touches_no_gpu() -> None:
    nvml, cuda = Untouchable(), Untouchable()

    def facts(ordinal: int) -> list[int]:
        raise AssertionError(f"device {ordinal} was asked")

    seen = probe(torch.device("cpu"), nvml=nvml, cuda=cuda, device_facts=facts, environ=NO_MPS)
    assert (nvml.touched, cuda.touched) == ([], [])
    assert (seen.device, seen.device_type, seen.gpus) == ("cpu", "cpu", ())
    assert seen.nvml.reason == "GPUs were not asked for (device cpu)"
    probe(torch.device("cuda", 0), nvml=nvml, cuda=cuda, environ=NO_MPS)
    assert nvml.touched  # control: the recorder works
    assert cuda.touched


def test_without_a_device_nvml_alone_is_asked() -> None:
    cuda = Untouchable()
    seen = probe(None, nvml=FakeNvml(machine(2)), cuda=cuda, environ=NO_MPS)
    assert (cuda.touched, seen.device, seen.device_type) == ([], "", "")
    assert (len(seen.gpus), len(seen.pairs), seen.device_uuid) == (2, 2, None)


def test_import_and_cpu_probe_start_neither_cuda_nor_nvml() -> None:
    code = """
import sys, torch
touched = []
class Trap(type(sys)):
    def __getattr__(self, name):
        if name.startswith("nvml"):
            touched.append(name)
        raise AttributeError(name)
trap = Trap("pynvml")
trap.__file__ = "trap.py"
sys.modules["pynvml"] = trap  # torch has imported the real one for itself
from ulysses_ops import eligibility, topology
seen = topology.probe(torch.device("cpu"))
eligibility.decide([seen, seen], eligibility.Request())
assert touched == [], f"NVML was used: {touched}"
assert not torch.cuda.is_initialized(), "CUDA was initialised"
topology.probe(None)
assert "nvmlInit" in touched, "control: the trap is blind"
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("files", "environ", "runtime"),
    [
        ((), {}, "none"),
        (("docker",), {}, "docker"),
        (("podman",), {}, "podman"),
        ((), {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "kubernetes"),
        ((), {"container": "lxc"}, "lxc"),
    ],
)
def test_containers_are_recognised(
    files: tuple[str, ...],
    environ: Mapping[str, str],
    runtime: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    signs = {name: tmp_path / name for name in ("docker", "podman")}
    monkeypatch.setattr(host, "CONTAINER_SIGNS", signs)
    for name in files:
        signs[name].touch()
    assert host.container(environ).runtime.value == runtime


def test_limits_of_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scope").write_text("2\n")
    (tmp_path / "status").write_text("Name:\tx\nCapEff:\t0000000000080000\n")
    (tmp_path / "cpus").write_text("processor: 0\nflags\t\t: fpu hypervisor sse\n")
    (tmp_path / "product").write_text("KVM\n")
    monkeypatch.setattr(host, "PTRACE_SCOPE_PATH", tmp_path / "scope")
    monkeypatch.setattr(host, "STATUS_PATH", tmp_path / "status")
    monkeypatch.setattr(host, "CPU_INFO_PATH", tmp_path / "cpus")
    monkeypatch.setattr(host, "PRODUCT_PATH", tmp_path / "product")
    seen = host.container({"TMPDIR": str(tmp_path)})
    assert (seen.ptrace_scope.value, seen.can_ptrace.answer) == (2, "yes")
    assert seen.virtualisation.value == "hypervisor (KVM)"
    assert str(seen.temporary.value).startswith(f"{tmp_path} (device ")
    (tmp_path / "status").write_text("CapEff:\t0000000000000000\n")
    (tmp_path / "cpus").write_text("flags: fpu\n")
    again = host.container({"TMPDIR": str(tmp_path / "gone")})
    assert (again.can_ptrace.answer, again.virtualisation.value) == ("no", "none")
    assert (again.temporary.value, "FileNotFound" in again.temporary.reason) == (None, True)


def test_temporary_folders_that_differ_are_a_warning_and_no_verdict() -> None:
    ranks = full_mesh(2)
    elsewhere = Reading("/scratch (device 9, inode 9)", "stat")
    ranks[1] = replace(ranks[1], container=replace(ranks[1].container, temporary=elsewhere))
    decision = decide(ranks, Request(backends=("nccl",)))
    assert decision.transport == "ce"
    assert "rank 1 have /scratch (device 9, inode 9)" in decision.warnings[0]
