"""Importing the package touches no GPU and no NVML, and leaves a process that can still fork."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Stands in for pynvml before torch, which imports it too, can get hold of the real one.
RECORDER = """
import sys, types
called = []
class Recorder(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        called.append(name)
        raise AttributeError(name)
sys.modules["pynvml"] = Recorder("pynvml")
import torch
called.clear()
def mapped():
    with open("/proc/self/maps") as maps:
        paths = {line.split()[-1] for line in maps if ".so" in line}
    return {path.rsplit("/", 1)[-1] for path in paths}
before = mapped()
"""

# A step between two ranks would need a peer; one rank runs the same code up to the transport.
STEP = """
import torch
import ulysses_ops
with ulysses_ops.UlyssesCommunicator(device="cpu") as comm:
    x = torch.arange(24.0).view(1, 3, 4, 2)
    q = ulysses_ops.scatter(x, comm)
    out = ulysses_ops.ulysses_attention(q, q, q, comm)
    assert torch.equal(q, x) and out.shape == x.shape
"""


def run(script: str, **env: str) -> str:
    """Run a script in a process of its own; return what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_asks_nothing_of_cuda_or_nvml() -> None:
    script = f"""{RECORDER}
import ulysses_ops, ulysses_ops.graphs
assert not torch.cuda.is_initialized()
assert called == [], called
new = mapped() - before
print(*sorted(name for name in new if "cuda" in name or "nvidia" in name or "nvml" in name))
"""
    assert run(script) in ("", "_C_cuda.so")


@pytest.mark.parametrize(
    ("touch", "expected"),
    [
        (
            "import pynvml\ntry:\n    pynvml.nvmlInit()\nexcept AttributeError:\n    pass",
            "nvmlInit",
        ),
        ("from ulysses_ops.topology import probe\nprobe(torch.device('cuda:0'))", "nvml"),
    ],
)
def test_the_check_sees_nvml_being_asked(touch: str, expected: str) -> None:
    assert expected in run(f"{RECORDER}\n{touch}\nprint(*called)")


@pytest.mark.parametrize("visible", ["", "-1"])
def test_works_where_no_gpu_is_visible(visible: str) -> None:
    script = f"{STEP}\nprint(comm.transport, torch.cuda.is_initialized())"
    assert run(script, CUDA_VISIBLE_DEVICES=visible) == "local False"


def test_works_where_nvml_cannot_be_imported() -> None:
    script = f"import sys\nsys.modules['pynvml'] = None\n{STEP}\nprint(comm.transport)"
    assert run(script) == "local"


def test_import_then_fork() -> None:
    """The child uses what the parent imported; CUDA too, where there is a GPU."""
    body = STEP.replace("\n", "\n    ")
    script = f"""
import os, sys
import torch, ulysses_ops
child = os.fork()
if child == 0:
    {body}
    if torch.cuda.is_available():
        assert torch.ones(2, device="cuda").sum().item() == 2
    print("child", comm.transport)
    sys.stdout.flush()
    os._exit(0)
_, status = os.waitpid(child, 0)
print("status", os.waitstatus_to_exitcode(status))
"""
    assert run(script).splitlines() == ["child local", "status 0"]


def test_the_compiled_libraries_are_loaded_or_the_reason_is_told() -> None:
    from ulysses_ops import NATIVE

    assert NATIVE.plan == (NATIVE.plan_reason == "")
    assert NATIVE.cuda == (NATIVE.cuda_reason == "")
    assert NATIVE.kernels == (NATIVE.kernels_reason == "")
    assert NATIVE.projection == (NATIVE.projection_reason == "")
    assert NATIVE.plan, NATIVE.plan_reason
