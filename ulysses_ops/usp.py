"""More ranks than one host has: Ulysses inside a host, a ring of hosts around it (USP).

Rank ``(i, j)`` of a mesh ("ring", "ulysses") holds a shard of the sequence. Ulysses trades it
inside row ``i``, on the copy engines where the ranks are of one host; then each column ``j`` holds
the same heads, and keys and values go round it.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .agreement import Agreement, group_store, join
from .attention import ulysses_attention
from .communicator import UlyssesCommunicator
from .errors import TopologyError
from .host import process
from .ring import KernelWithLse, RingAttention

RING, ULYSSES = "ring", "ulysses"


class UspAttention:
    """Attention between the ranks of a mesh ("ring", "ulysses"); a context manager.

    ``out = gather(ring(scatter(q), scatter(k), scatter(v)))``: what :func:`ulysses_attention` is on
    one host, with :class:`ulysses_ops.ring.RingAttention` as its kernel.

    Collective: every rank of the mesh constructs it with the same arguments.

    Attributes:
        comm: The communicator of this rank's row.
        ring: The ring of this rank's column.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        *,
        kernel: KernelWithLse | None = None,
        timeout_s: float = 60.0,
        **communicator: Any,
    ) -> None:
        """Meet the other ranks of the row, then those of the column.

        Args:
            mesh: Two dimensions, named "ring" and "ulysses"; :func:`host_mesh` makes one.
            kernel: Attention that returns its log-sum-exp; see :class:`RingAttention`.
            timeout_s: How long a meeting, and an exchange on copy engines, waits, in seconds.
            communicator: Further options of :class:`ulysses_ops.UlyssesCommunicator`.

        Raises:
            ValueError: the mesh has other dimensions, or an argument is wrong.
            TopologyError: what was insisted on is not eligible.
            AgreementError: a rank did not come within ``timeout_s``.
        """
        names = mesh.mesh_dim_names or ()
        if sorted(names) != [RING, ULYSSES]:
            message = (
                f"UspAttention: the mesh has dimensions {list(names)} and must have 'ring' and "
                f"'ulysses'; make it by host_mesh(), or name them in init_device_mesh"
            )
            raise ValueError(message)
        self.comm = UlyssesCommunicator(mesh[ULYSSES], timeout_s=timeout_s, **communicator)
        try:
            self.ring = RingAttention(mesh[RING], kernel=kernel, timeout_s=timeout_s)
        except BaseException:
            self.comm.close()
            raise

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        head_splits: Sequence[int] | None = None,
        copy_out: bool = True,
    ) -> Tensor:
        """Attend over the rows of all ranks of the mesh.

        Args:
            q: ``(B, S_local, H, D)``; every rank holds as many rows.
            k: ``(B, S_local, H_kv, D)``.
            v: As ``k``.
            head_splits: As in :func:`ulysses_ops.ulysses_attention`.
            copy_out: Likewise.

        Returns:
            ``(B, S_local, H, D)``, ready on the current stream.

        Raises:
            ValueError: gradients are wanted; shapes, dtypes or devices are wrong or differ.
            UlyssesError: closed, or a capture needs what was not met before.

        Collective: every rank of the mesh calls it with the same shapes, in the same order.

        Source: USP, arXiv:2405.07719.
        """
        if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
            message = (
                "UspAttention: q, k or v requires grad, and a ring has no gradient; call it under "
                "torch.no_grad()"
            )
            raise ValueError(message)
        return ulysses_attention(
            q, k, v, self.comm, attention=self.ring, head_splits=head_splits, copy_out=copy_out
        )

    def close(self) -> None:
        """Close the communicator. Local and idempotent."""
        self.comm.close()

    def __enter__(self) -> UspAttention:
        """Return itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close."""
        self.close()


def host_mesh(device_type: str, *, timeout_s: float = 60.0) -> DeviceMesh:
    """All ranks as a mesh ("ring", "ulysses") with a row for each host.

    Hosts are told apart as eligibility does it, by the boot id of the running kernel, so containers
    of one host are one host.

    Args:
        device_type: ``"cuda"`` or ``"cpu"``.
        timeout_s: How long the meeting waits for the slowest rank, in seconds.

    Raises:
        TopologyError: a rank cannot tell its host, or hosts have different numbers of ranks; the
            same text on every rank.
        AgreementError: a rank did not come within ``timeout_s``.

    Collective over the default group, which has to be initialised.
    """
    group = dist.group.WORLD
    if group is None:
        message = "host_mesh: torch.distributed is not initialised; call init_process_group first"
        raise ValueError(message)
    rank, ranks = group.rank(), group.size()
    store = group_store(group)
    session = join(store, f"ulysses/{group.group_name}/hosts", rank, ranks, timeout_s)
    here = process()
    record = {"boot_id": here.boot_id.value, "hostname": here.hostname}
    records = Agreement(store, session, rank, ranks, timeout_s).exchange("host_mesh", record)
    rows: dict[str, list[int]] = {}
    for peer, told in enumerate(records):
        if told["boot_id"] is None:
            message = (
                f"host_mesh: rank {peer} on {told['hostname']} cannot read its boot id; build the "
                f"mesh by init_device_mesh, with a row for each host"
            )
            raise TopologyError(message)
        rows.setdefault(told["boot_id"], []).append(peer)
    if len({len(row) for row in rows.values()}) > 1:
        message = (
            f"host_mesh: hosts have {[len(row) for row in rows.values()]} ranks; start as many on "
            f"each"
        )
        raise TopologyError(message)
    return DeviceMesh(device_type, list(rows.values()), mesh_dim_names=(RING, ULYSSES))
