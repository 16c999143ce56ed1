"""Compiled, graph-safe operators for Ulysses sequence parallelism."""

from ulysses_ops._native import NATIVE
from ulysses_ops.attention import (
    AttentionWindows,
    reserve_attention,
    sdpa,
    ulysses_attention,
)
from ulysses_ops.communicator import UlyssesCommunicator
from ulysses_ops.errors import AgreementError, TopologyError, UlyssesError
from ulysses_ops.exchange import Exchange
from ulysses_ops.layer import UlyssesAttention
from ulysses_ops.norm_rope import NormRope
from ulysses_ops.ops import gather, scatter
from ulysses_ops.schedule import PEERS_FIRST, PLAIN, Schedule
from ulysses_ops.windows import Window, WindowSpec, reserve

__version__ = "0.1.0"

__all__ = [
    "NATIVE",
    "PEERS_FIRST",
    "PLAIN",
    "AgreementError",
    "AttentionWindows",
    "Exchange",
    "NormRope",
    "Schedule",
    "TopologyError",
    "UlyssesAttention",
    "UlyssesCommunicator",
    "UlyssesError",
    "Window",
    "WindowSpec",
    "gather",
    "reserve",
    "reserve_attention",
    "scatter",
    "sdpa",
    "ulysses_attention",
]
