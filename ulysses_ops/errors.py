"""What this package raises beside ``ValueError``, which is for arguments."""


class UlyssesError(RuntimeError):
    """A state in which the call cannot be served; the base of every error of this package."""


class AgreementError(UlyssesError):
    """Ranks of a group asked for different things, or one of them did not answer in time."""


class TopologyError(UlyssesError):
    """The hardware, or what is known of it, does not allow what was asked for."""


class PeerTimeoutError(UlyssesError):
    """A peer did not signal in time, or gave up; the communicator is of no use any more."""
