"""Before a capture: ranks compare what they were given, and each exchange before it is issued.

Exchanges that differ never complete on copy engines, since each waits for the tag of its own, and
the communicator is of no use after that. Here every rank hears of it before the exchange that
differs is issued; what an :class:`Exchange` sent before it is in flight all the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ulysses_ops.agreement import find_disagreement
from ulysses_ops.communicator import UlyssesCommunicator
from ulysses_ops.errors import AgreementError, UlyssesError
from ulysses_ops.graphs.signature import Signature

TOPIC = "capture_step"


class _DifferenceError(UlyssesError):
    """Every rank has heard of it."""


def compare_inputs(comm: UlyssesCommunicator, signature: Signature, warmup: int) -> None:
    """Raise unless the ranks were given inputs of the same kind. Collective.

    Raises:
        UlyssesError: they were not; the same text on every rank.
    """
    _compare(comm, "inputs", f"{signature.kind()}, warmup={warmup}")


@contextmanager
def lined_up(comm: UlyssesCommunicator) -> Iterator[None]:
    """Inside, ranks meet before each exchange of an eager step, and behind the last one.

    Sends of compiled code into windows are not seen; its functional exchanges are.

    Raises:
        UlyssesError: ranks are about to issue different exchanges, or one has ended or failed
            before the others; where the step itself does not raise, the same text on every rank.
    """

    def announce(key: str) -> None:
        _compare(comm, "exchanges", key)

    comm.announce = announce
    try:
        yield
    except (AgreementError, _DifferenceError):
        raise  # the others have it too
    except Exception as error:
        comm.announce = None
        first = f"{type(error).__name__}: {error}".splitlines()[0]
        try:
            _compare(comm, "exchanges", f"none, its step failed ({first})")
        except UlyssesError as difference:
            raise error from difference
        raise
    else:
        _compare(comm, "exchanges", "none, its step is over")
    finally:
        comm.announce = None


def _compare(comm: UlyssesCommunicator, what: str, mine: str) -> None:
    records = comm.agreement.exchange(TOPIC, {what: mine})
    differing = find_disagreement([str(record.get(what)) for record in records])
    if differing is not None:
        message = (
            f"{TOPIC}: the ranks are about to use different {what}: {differing.describe()}; every "
            f"rank must give the same step inputs of the same kind"
        )
        raise _DifferenceError(message)
