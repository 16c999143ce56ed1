"""The few calls of the CUDA driver that measurements make themselves: memory operations, and nodes.

Through the library that torch has loaded already, found again by its name.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable, Sequence
from ctypes import byref, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

import torch

from ulysses_ops.errors import UlyssesError

LIBRARY = "libcuda.so.1"
WAIT_64, WRITE_64 = 4, 5  # CUstreamBatchMemOpType; a wait with flag 1 is for equality
EQUAL = 1
# CUgraphNodeType
NODE_KINDS = {0: "kernel", 1: "copy", 2: "fill", 5: "empty", 12: "batch"}


class _MemOp(ctypes.Structure):
    """CUstreamBatchMemOpParams of a write or a wait: six 64-bit words."""

    _fields_ = (
        ("operation", c_uint),
        ("address", c_uint64),
        ("value", c_uint64),
        ("flags", c_uint),
        ("rest", c_uint64 * 2),
    )


def driver_function(name: str) -> Callable[..., None]:
    """A function of the driver that raises ``UlyssesError`` where it gives an error.

    Raises:
        OSError: there is no driver.
        AttributeError: it has no such function.
    """
    function = getattr(ctypes.CDLL(LIBRARY), name)
    function.restype = c_int

    def call_checked(*arguments: Any) -> None:
        status = function(*arguments)
        if status != 0:
            message = f"{name} gave {status}"
            raise UlyssesError(message)

    return call_checked


def call(name: str, *arguments: Any) -> None:
    """Call the driver once; raises what :func:`driver_function` and the call raise."""
    driver_function(name)(*arguments)


def write(address: int, value: int) -> _MemOp:
    """A write of 64 bits, behind all earlier work of the stream."""
    return _MemOp(WRITE_64, address, value, 0)


def await_equal(address: int, value: int) -> _MemOp:
    """A wait until 64 bits have a value."""
    return _MemOp(WAIT_64, address, value, EQUAL)


def batch(operations: Sequence[_MemOp]) -> Callable[[], None]:
    """What enqueues the operations, in one batch, on the current stream; can be captured."""
    given = (_MemOp * len(operations))(*operations)

    def run() -> None:
        stream = c_void_p(torch.cuda.current_stream().cuda_stream)
        call("cuStreamBatchMemOp_v2", stream, c_uint(len(given)), given, c_uint(0))

    return run


def captured_nodes() -> dict[str, int]:
    """Nodes by kind that the capture of the current stream holds so far.

    Raises:
        UlyssesError: nothing is captured, or the driver does not tell.
    """
    status, graph, count = c_int(), c_void_p(), c_size_t()
    stream = c_void_p(torch.cuda.current_stream().cuda_stream)
    call("cuStreamGetCaptureInfo_v3", stream, byref(status), None, byref(graph), None, None, None)
    if not graph.value:
        message = "nodes: the current stream is not captured; ask inside a capture"
        raise UlyssesError(message)
    call("cuGraphGetNodes", graph, None, byref(count))
    nodes = (c_void_p * count.value)()
    if count.value:
        call("cuGraphGetNodes", graph, nodes, byref(count))
    kind = c_int()
    found: Counter[str] = Counter()
    for node in nodes:
        call("cuGraphNodeGetType", c_void_p(node), byref(kind))
        found[NODE_KINDS.get(kind.value, f"type {kind.value}")] += 1
    return dict(found)


def nodes_if_captured() -> dict[str, int]:
    """:func:`captured_nodes`; nothing outside a capture, or where the driver does not tell.

    For steps whose times are wanted whether or not their nodes can be counted.
    """
    if not torch.cuda.is_current_stream_capturing():
        return {}
    try:
        return captured_nodes()
    except (OSError, AttributeError, UlyssesError):
        return {}
