"""What a process holds that a leak would make more of: files, threads, GPU memory."""

from __future__ import annotations

import gc
import threading
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch

MEMORY_SLACK = 32 << 20  # bytes that CUDA itself may keep


@dataclass(frozen=True)
class Held:
    """What there is at one moment.

    Attributes:
        files: What each open file is: a path, or its kind.
        threads: Threads that Python knows.
        gpu_bytes: What is in use on the device, by whomever.
    """

    files: tuple[str, ...]
    threads: int
    gpu_bytes: int

    def leaks(self, before: Held, excused: Counter[str] | None = None) -> list[str]:
        """What there is more of than before, as words; empty when nothing is.

        Args:
            before: What there was.
            excused: Files that may be there besides, how many of each name.
        """
        leaks = []
        more = Counter(self.files) - Counter(before.files)
        count = len(self.files) - len(before.files) - (more & (excused or Counter())).total()
        if count > 0:
            leaks.append(f"{count} open files ({', '.join(sorted(more.elements()))})")
        if self.threads > before.threads:
            leaks.append(f"{self.threads - before.threads} threads")
        if self.gpu_bytes > before.gpu_bytes + MEMORY_SLACK:
            leaks.append(f"{self.gpu_bytes - before.gpu_bytes} bytes of the GPU")
        return leaks


def read_held(device: torch.device, *, others_too: bool = False) -> Held:
    """What this process holds now, garbage and cached memory given back first.

    Args:
        device: Where the process works.
        others_too: Others come and go on the device meanwhile: its memory says nothing, and is 0.
    """
    gc.collect()
    gpu_bytes = 0
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    if device.type == "cuda" and not others_too:
        free, total = torch.cuda.mem_get_info(device)
        gpu_bytes = total - free
    files = tuple(filter(None, map(_name_of, Path("/proc/self/fd").iterdir())))
    return Held(files, threading.active_count(), gpu_bytes)


def _name_of(descriptor: Path) -> str:
    """Empty where it is closed by now: the one that lists them is."""
    try:
        target = str(descriptor.readlink())
    except OSError:
        return ""
    return target.partition(":[")[0]  # sockets and pipes have numbers
