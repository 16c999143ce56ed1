"""Communicators by the names that operator schemas carry, and by their groups."""

from __future__ import annotations

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from .arguments import group_of
from .communicator import BY_NAME, UlyssesCommunicator
from .kinds import check_kind, check_readable, check_sizes, check_tensors


def find_communicator(name: str, world_size: int, op: str) -> UlyssesCommunicator:
    """The open communicator that an operator's ``group_name`` means.

    Raises:
        ValueError: there is none, or it has another number of ranks.
        UlyssesError: it is closed.
    """
    found = BY_NAME.get(name)
    if found is None:
        message = f"{op}: no communicator is named {name!r}; construct a UlyssesCommunicator"
        raise ValueError(message)
    found.check_open(op)
    if found.world_size != world_size:
        message = (
            f"{op}: world_size={world_size}, but communicator {name!r} has {found.world_size} "
            f"ranks; pass comm.world_size"
        )
        raise ValueError(message)
    return found


def check_communicator(op: str, comm: object) -> None:
    """Refuse what is no communicator, and the name of one.

    Raises:
        ValueError: it is none.
    """
    check_kind(op, "comm", comm, UlyssesCommunicator, "a UlyssesCommunicator")


def shared_communicator(
    group: ProcessGroup | DeviceMesh | UlyssesCommunicator | None,
) -> UlyssesCommunicator:
    """The open communicator over these ranks that bears the group's name, or a new one.

    For code that is handed a group once a layer. Who gets a new one has to keep it.

    Raises:
        ValueError: this process is not in the group.
        AgreementError: a rank did not come in time.

    Collective where there is none yet.
    """
    if isinstance(group, UlyssesCommunicator):
        return group
    return open_communicator(group) or UlyssesCommunicator(group)


def open_communicator(group: ProcessGroup | DeviceMesh | None) -> UlyssesCommunicator | None:
    """The open communicator over these ranks that bears the group's name; local."""
    ranks = group_of(group)
    found = BY_NAME.get("ulysses" if ranks is None else ranks.group_name)
    if found is None or found.closed or found.group is not ranks or not found.is_current():
        return None
    return found


def check_call(
    op: str, x: object, comm: object, sizes: object, heads: object = None, starts: object = None
) -> None:
    """Refuse what is of another kind in a sentence, and not in a schema's words.

    Args:
        op: ``scatter``, ``gather`` or ``all_gather``.
        x: A tensor.
        comm: A communicator.
        sizes: ``seq_splits``.
        heads: ``head_splits``.
        starts: ``head_starts``, of gather ``seq_starts``.

    Raises:
        ValueError: one of them is of another kind.
    """
    check_communicator(op, comm)
    check_tensors(op, x=x)
    check_readable(op, x)  # type: ignore[arg-type]
    check_sizes(op, "seq_splits", sizes)
    check_sizes(op, "head_splits", heads)
    check_sizes(op, "seq_starts" if op == "gather" else "head_starts", starts)
