"""What can be done about each "no" and each "could not tell"."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from ulysses_ops.facts import Topology

# What a reason or a note matches -> what to do. Reasons that name their remedy are not here.
ADVICE = (
    (
        r"Error 802|not yet initialized|fabric state is (not started|in progress)",
        (
            "start NVIDIA's fabric manager on the host, in the version of the driver "
            "(systemctl status nvidia-fabricmanager), and try again"
        ),
    ),
    (
        r"Shared Library Not Found|LibraryNotFound",
        "install the NVIDIA driver, or start the container with access to the GPUs",
    ),
    (
        r"NVML (does not start|cannot be read): NVMLError_(?!LibraryNotFound)|DriverNotLoaded",
        "make nvidia-smi work first: load the NVIDIA kernel module, or mend what it complains of",
    ),
    (
        r"LibRmVersionMismatch",
        "the driver was updated under its loaded kernel module: reload the module, or reboot",
    ),
    (r"NoPermission", "give this user access to /dev/nvidia*, or the container its devices"),
    (
        r"GpuIsLost|GPU is lost|fallen off",
        "a GPU fell off the bus: look for Xid 79 in the kernel log, then reset the GPU or reboot",
    ),
    (
        r"NVML device \d+ cannot be read",
        "look at nvidia-smi -q and at Xid lines in the kernel log for the GPU that cannot be read",
    ),
    (r"NVML not importable", "pip install nvidia-ml-py"),
    (
        r"NVML (does not start|cannot be read): AttributeError",
        "another package has the name pynvml: remove it, then pip install nvidia-ml-py",
    ),
    (
        r"library _C_cuda not loaded",
        "build ulysses_ops where nvcc 13 is installed, for a torch of CUDA 13",
    ),
    (
        r"MIG mode cannot be read|^MIG: unknown",
        "see whether nvidia-smi -q -d MIG can tell, and bring the driver up to date",
    ),
    (
        r"P2P nvlink status is (GPU_)?NOT_SUPPORTED",
        "no NVLink joins these GPUs: use a group that is joined, or leave it to NCCL",
    ),
    (
        r"P2P (read|write) status is (GPU_)?NOT_SUPPORTED",
        "these GPUs or this driver have no peer access: use other GPUs, or leave it to NCCL",
    ),
    (
        r"CHIPSET_NOT_SUPPORTED|IOH_TOPOLOGY_NOT_SUPPORTED",
        "the board's bridges do not carry peer traffic between these GPUs: choose others",
    ),
    (
        r"DISABLED_BY_REGKEY",
        (
            "a parameter of the kernel module switches peer access off: see NVreg_RegistryDwords "
            "in /proc/driver/nvidia/params"
        ),
    ),
    (
        r"P2P \w+ status cannot be read: NVMLError_NotSupported",
        "this driver does not tell about pairs of GPUs: leave it to NCCL",
    ),
    (
        r"P2P \w+ (status is (UNKNOWN|unknown)|status cannot be read|is unknown)",
        (
            "compare with nvidia-smi topo -p2p n (also w, r) and bring the driver up to date; "
            "until it tells, leave it to NCCL"
        ),
    ),
    (
        r"CUDA refuses peer access|[Pp]eer access (cannot be asked|is unknown)",
        "compare with nvidia-smi topo -p2p w; look at ACS, the IOMMU and the container's devices",
    ),
    (
        r"failed data check",
        (
            "peer access is advertised, yet data does not arrive: switch off ACS on PCIe bridges "
            "or the IOMMU; until then pass transport='nccl', with NCCL_P2P_DISABLE=1"
        ),
    ),
    (
        r"is not among the \d+ GPUs that NVML lists|does not list this pair",
        (
            "let NVML see in this container what CUDA sees: pass all GPUs, restrict with "
            "CUDA_VISIBLE_DEVICES"
        ),
    ),
    (
        r"contradict each other|from several GPUs|MIG slice of it|listed just once|GPU identified",
        "CUDA and NVML describe different GPUs: compare nvidia-smi -L with torch, on one driver",
    ),
    (
        r"no 64-bit stream memory operations|stream memory operations(:| cannot)",
        "use a driver of CUDA 12 or later on bare Linux",
    ),
    (r"virtualisation is vgpu", "vGPUs reach each other only where the host has enabled it"),
    (
        r"(boot id|PID namespace) unknown",
        "let the ranks read /proc/sys/kernel/random/boot_id and /proc/self/ns/pid",
    ),
    (r"measuring failed|not measured", "mend what measuring says, then measure again"),
)
ANYHOW = "leave it to NCCL, which transport=None does by itself"


def advise(topology: Topology, count: int, said: Sequence[str], *, eligible: bool) -> list[str]:
    """Return what to do.

    Args:
        topology: What is known of the machine.
        count: Ranks that were asked about.
        said: Reasons and notes.
        eligible: Whether the answer is yes; then only what notes ask for is left to do.
    """
    states = []
    if not eligible:
        for gpu in topology.gpus:
            states += [f"fabric state is {gpu.fabric.value}"]
            states += [f"virtualisation is {gpu.virtualisation.value}"]
    texts = [*said, *states]
    found = [] if eligible else list(_by_device(topology, count))
    found += [do for pattern, do in ADVICE if any(re.search(pattern, text) for text in texts)]
    return found or ([] if eligible else [ANYHOW])


def _by_device(topology: Topology, count: int) -> Iterator[str]:
    """What numbers say: which GPUs this process has, and which it could have."""
    shown = len(topology.devices)
    slices = {device.uuid for device in topology.devices}
    mig = [gpu for gpu in topology.gpus if gpu.mig.answer == "yes" and gpu.uuid in slices]
    if mig:
        numbers = ",".join(str(gpu.nvml_index) for gpu in mig)
        yield f"switch MIG off on the idle GPU, as root: nvidia-smi -i {numbers} -mig 0"
    prohibited = [gpu.nvml_index for gpu in topology.gpus if gpu.compute_mode.value == "prohibited"]
    if prohibited:
        numbers = ",".join(map(str, prohibited))
        yield f"allow processes on the GPU, as root: nvidia-smi -i {numbers} -c DEFAULT"
    if not shown and topology.torch_cuda_version is None:
        yield "this torch is built without CUDA: install a torch for CUDA 13"
    elif shown < max(count, 2) and "cannot be asked" not in topology.identity.reason:
        yield from _more_devices(topology, count)


def _more_devices(topology: Topology, count: int) -> Iterator[str]:
    hidden = [gpu for gpu in topology.gpus if gpu.cuda_ordinal is None]
    listed = f"{len(hidden)} of the {len(topology.gpus)} GPUs that NVML lists"
    if hidden and topology.visible_devices is not None:
        yield (
            f"CUDA_VISIBLE_DEVICES={topology.visible_devices!r} hides {listed}: unset it, or name "
            f"them in it"
        )
    elif hidden:
        yield f"CUDA does not show {listed}: compare nvidia-smi -L, and the container's devices"
    elif not topology.gpus and topology.nvml.answer == "no" and not topology.notes:
        yield "use a machine with NVIDIA GPUs, or start the container with them (--gpus all)"
    elif len(topology.devices) == 1 and count <= 1:
        yield "nothing is to be done: run one rank, or use a machine with more GPUs for several"
    elif topology.devices:
        yield f"ask for {len(topology.devices)} ranks or fewer, or use a machine with more GPUs"
