"""The all-to-all of bytes under transports ``nccl`` and ``gloo``; on gloo it has a time limit.

A process group waits as long as it was told to when it was made, half an hour as a rule. A rank
that waits for a peer under gloo waits no longer than the communicator says, and learns whom to
blame; NCCL has time-outs of its own.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from .agreement import find_disagreement
from .communicator import UlyssesCommunicator
from .errors import UlyssesError

NAME_BYTES = 400
SLICE = timedelta(seconds=0.25)
GRACE_S = 0.5  # in which the group's own time-out says more
FAILED = "!"  # no exchange's name begins with it


def all_to_all(
    comm: UlyssesCommunicator,
    received: Tensor,
    sent: Tensor,
    received_sizes: Sequence[int],
    sent_sizes: Sequence[int],
) -> None:
    """Trade bytes: ``sent_sizes[p]`` of them go to rank ``p``. Collective.

    Raises:
        PeerTimeoutError: under gloo, a peer did not come within ``comm.timeout_s``, is gone, or
            left the communicator by an exception.
    """
    assert comm.group is not None
    if comm.transport != "gloo":
        dist.all_to_all_single(
            received, sent, list(received_sizes), list(sent_sizes), group=comm.group
        )
        return
    options = dist.AllToAllOptions()
    options.timeout = timedelta(seconds=comm.timeout_s)
    parted = ""
    try:
        work = comm.group.alltoall_base(
            received, sent, list(received_sizes), list(sent_sizes), options
        )
        # The group's own time-out does not come where its threads are gone, as after a fork, or
        # while other work is in the way.
        deadline = time.monotonic() + comm.timeout_s + GRACE_S
        while not (is_late := time.monotonic() > deadline) and not _is_over(work):
            if parted := comm.agreement.parted("exchanges", comm.agreement.exchanges):
                break
    except RuntimeError as error:
        # Without gloo's file and line, and its guesses.
        first = str(error).splitlines()[0].rpartition("] ")[2].partition(". ")[0]
        comm.give_up("complete", _late(comm, first))
    if is_late:
        comm.give_up("complete", _late(comm, "the process group did not end it itself"))
    if parted:
        comm.give_up(
            "complete", f"it waits for {parted}, and its process group is of no use any more"
        )
    comm.agreement.exchanges += 1


def _late(comm: UlyssesCommunicator, why: str) -> str:
    return (
        f"an exchange under gloo did not end within {comm.timeout_s:g} s, or a peer is gone, "
        f"and its process group is of no use any more ({why})"
    )


def _is_over(work: dist.Work) -> bool:
    """Wait a little: in one long wait a process would not hear of Ctrl-C before its end."""
    try:
        work.wait(SLICE)
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()  # it may have ended well just now
    return True


def compare(comm: UlyssesCommunicator, name: str, failure: str) -> None:
    """Tell what this rank is about to exchange, or why it cannot, and hear it of all. Collective.

    On the CPU that costs little beside gloo.

    Raises:
        UlyssesError: some rank cannot, or the exchanges differ; the same text on every rank.
        PeerTimeoutError: as :func:`all_to_all`.
    """
    text = shortened(f"{FAILED}{failure}" if failure else name).ljust(NAME_BYTES)
    sent = torch.frombuffer(bytearray(text * comm.world_size), dtype=torch.uint8)
    received = torch.frombuffer(bytearray(sent.numel()), dtype=torch.uint8)
    sizes = [NAME_BYTES] * comm.world_size
    all_to_all(comm, received, sent, sizes, sizes)
    told = [
        bytes(entry.tolist()).decode(errors="replace").strip() for entry in received.split(sizes)
    ]
    failures = [
        f"rank {rank}: {said.removeprefix(FAILED)}"
        for rank, said in enumerate(told)
        if said.startswith(FAILED)
    ]
    if failures:
        message = f"complete: nothing was exchanged, it failed on {'; '.join(failures)}"
        raise UlyssesError(message)
    differing = find_disagreement(told)
    if differing is not None:
        message = (
            f"complete: ranks are in different exchanges: {differing.describe()}; every rank must "
            f"make the same calls in the same order"
        )
        raise UlyssesError(message)


def shortened(name: str) -> bytes:
    """A name that fits; what is cut off still tells names apart, by its hash."""
    whole = name.encode()
    if len(whole) <= NAME_BYTES:
        return whole
    rest = hashlib.blake2b(whole, digest_size=8).hexdigest().encode()
    return whole[: NAME_BYTES - len(rest)] + rest
