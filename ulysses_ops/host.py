"""Facts that the operating system tells about this process: where it runs, and behind what."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path

from .asking import attempt, read
from .facts import Container, Fact, Process, Reading

BOOT_ID_PATH = Path("/proc/sys/kernel/random/boot_id")
PID_NAMESPACE_PATH = Path("/proc/self/ns/pid")
PTRACE_SCOPE_PATH = Path("/proc/sys/kernel/yama/ptrace_scope")
STATUS_PATH = Path("/proc/self/status")
CPU_INFO_PATH = Path("/proc/cpuinfo")
PRODUCT_PATH = Path("/sys/class/dmi/id/product_name")
SHARED_MEMORY_PATH = Path("/dev/shm")  # noqa: S108  only looked at
CONTAINER_SIGNS = {"docker": Path("/.dockerenv"), "podman": Path("/run/.containerenv")}
TEMPORARY = "/tmp"  # noqa: S108  where programs meet if TMPDIR is not set
MPS_DIRECTORY = "/tmp/nvidia-mps"  # noqa: S108  CUDA's default; only looked at

CAP_SYS_PTRACE = 19
HEAD_BYTES = 4096  # of cpuinfo: the first processor says it, and a big host has hundreds


def process() -> Process:
    """Which process this is, and in which running kernel."""
    hostname, _ = attempt(socket.gethostname)
    return Process(
        hostname=hostname or "?",
        boot_id=read(str(BOOT_ID_PATH), lambda: BOOT_ID_PATH.read_text().strip()),
        pid_namespace=read(str(PID_NAMESPACE_PATH), lambda: str(PID_NAMESPACE_PATH.readlink())),
        pid=os.getpid(),
    )


def mps(environ: Mapping[str, str]) -> Fact:
    """Would CUDA reach an MPS daemon from here? It looks for one even if no variable is set.

    A pipe left behind by a dead daemon also counts: that errs on the safe side.
    """
    place = Path(environ.get("CUDA_MPS_PIPE_DIRECTORY") or MPS_DIRECTORY)
    remedy = "CUDA_MPS_PIPE_DIRECTORY=/dev/null keeps CUDA away from MPS"
    names, why = attempt(lambda: sorted(entry.name for entry in place.iterdir()))
    if names is None and not why.startswith(("FileNotFoundError", "NotADirectoryError")):
        return Fact("unknown", "mps", f"MPS directory {place} cannot be read ({why}); {remedy}")
    if names and "control" in names:
        return Fact("yes", "mps", f"MPS has a control pipe in {place}; {remedy}")
    if names:
        return Fact("unknown", "mps", f"MPS may run: {place} holds {names[0]}; {remedy}")
    if "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" in environ:
        reason = (
            f"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE is set, but {place} holds no MPS pipe; unset it"
        )
        return Fact("unknown", "mps", reason)
    return Fact("no", "mps")


def container(environ: Mapping[str, str]) -> Container:
    """What may keep this process apart from others of the host."""
    temporary = Path(environ.get("TMPDIR") or TEMPORARY)
    return Container(
        runtime=_runtime(environ),
        ptrace_scope=read(str(PTRACE_SCOPE_PATH), lambda: int(PTRACE_SCOPE_PATH.read_text())),
        can_ptrace=_can_ptrace(),
        temporary=read("stat", lambda: _place(temporary)),
        shared_memory_bytes=read("statvfs", _shared_memory_bytes),
        virtualisation=read(str(CPU_INFO_PATH), _virtualisation),
    )


def _runtime(environ: Mapping[str, str]) -> Reading:
    for name, sign in CONTAINER_SIGNS.items():
        if attempt(sign.exists)[0]:
            return Reading(name, str(sign))
    if "KUBERNETES_SERVICE_HOST" in environ:
        return Reading("kubernetes", "environment")
    if environ.get("container"):
        return Reading(environ["container"], "environment")
    return Reading("none", "probe", "no sign of a container was found")


def _can_ptrace() -> Fact:
    def ask() -> bool:
        (line,) = [x for x in STATUS_PATH.read_text().splitlines() if x.startswith("CapEff:")]
        return bool(int(line.split()[1], 16) >> CAP_SYS_PTRACE & 1)

    able, why = attempt(ask)
    if able is None:
        return Fact("unknown", str(STATUS_PATH), f"capabilities cannot be read: {why}")
    return Fact("yes" if able else "no", str(STATUS_PATH), "" if able else "no CAP_SYS_PTRACE")


def _place(folder: Path) -> str:
    status = folder.stat()
    return f"{folder} (device {status.st_dev}, inode {status.st_ino})"


def _shared_memory_bytes() -> int:
    status = os.statvfs(SHARED_MEMORY_PATH)
    return status.f_blocks * status.f_frsize


def _virtualisation() -> str:
    with CPU_INFO_PATH.open() as file:
        lines = file.read(HEAD_BYTES).splitlines()
    flags = [line.split() for line in lines if line.startswith("flags")]
    if not flags:
        raise LookupError("this processor does not tell whether a hypervisor runs it")
    if "hypervisor" not in flags[0]:
        return "none"
    product, _ = attempt(lambda: PRODUCT_PATH.read_text().strip())
    return f"hypervisor ({product})" if product else "hypervisor"
