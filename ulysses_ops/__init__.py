"""Compiled, graph-safe operators for Ulysses sequence parallelism."""

from ulysses_ops._native import NATIVE
from ulysses_ops.attention import reserve_attention, sdpa, ulysses_attention
from ulysses_ops.communicator import UlyssesCommunicator
from ulysses_ops.errors import AgreementError, PeerTimeoutError, TopologyError, UlyssesError
from ulysses_ops.exchange import Exchange
from ulysses_ops.joint import JointSequence
from ulysses_ops.joint_attention import ulysses_joint_attention
from ulysses_ops.layer import UlyssesAttention
from ulysses_ops.norm_rope import qk_norm_rope, qk_norm_rope_into
from ulysses_ops.ops import all_gather, gather, scatter
from ulysses_ops.part_norm_rope import NormRope
from ulysses_ops.plan import even_splits
from ulysses_ops.qkv_projection import project_qkv_into
from ulysses_ops.schedule import PEERS_FIRST, PLAIN, Schedule
from ulysses_ops.values_first import AttentionWindows
from ulysses_ops.window_spec import WindowSpec
from ulysses_ops.windows import Window, reserve

__version__ = "0.1.0"

__all__ = [
    "NATIVE",
    "PEERS_FIRST",
    "PLAIN",
    "AgreementError",
    "AttentionWindows",
    "Exchange",
    "JointSequence",
    "NormRope",
    "PeerTimeoutError",
    "Schedule",
    "TopologyError",
    "UlyssesAttention",
    "UlyssesCommunicator",
    "UlyssesError",
    "Window",
    "WindowSpec",
    "all_gather",
    "even_splits",
    "gather",
    "project_qkv_into",
    "qk_norm_rope",
    "qk_norm_rope_into",
    "reserve",
    "reserve_attention",
    "scatter",
    "sdpa",
    "ulysses_attention",
    "ulysses_joint_attention",
]
