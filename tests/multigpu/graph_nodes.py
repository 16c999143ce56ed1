"""What a captured graph consists of, read through the driver."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_int, c_size_t, c_uint, c_uint64, c_void_p

KERNEL, MEMCPY, BATCH_MEM_OP = 0, 1, 12  # CUgraphNodeType
WAIT_32 = 1  # CUstreamBatchMemOpType


class _MemOp(ctypes.Structure):
    """CUstreamBatchMemOpParams: six 64-bit words whatever the operation."""

    _fields_ = (
        ("operation", c_uint),
        ("address", c_uint64),
        ("value", c_uint64),
        ("rest", c_uint64 * 3),
    )


class _BatchParams(ctypes.Structure):
    """CUDA_BATCH_MEM_OP_NODE_PARAMS."""

    _fields_ = (
        ("context", c_void_p),
        ("count", c_uint),
        ("operations", ctypes.POINTER(_MemOp)),
        ("flags", c_uint),
    )


def _call(name: str, *args: object) -> None:
    status = getattr(ctypes.CDLL("libcuda.so.1"), name)(*args)
    assert status == 0, f"{name} gave {status}"


def _kinds(node: int) -> list[str]:
    kind = c_int()
    _call("cuGraphNodeGetType", c_void_p(node), byref(kind))
    if kind.value in (KERNEL, MEMCPY):
        return ["copy" if kind.value == MEMCPY else "kernel"]
    if kind.value != BATCH_MEM_OP:
        return [f"node type {kind.value}"]
    params = _BatchParams()
    _call("cuGraphBatchMemOpNodeGetParams", c_void_p(node), byref(params))
    return [
        "wait" if op.operation == WAIT_32 else "signal" if op.value else "reset"
        for op in params.operations[: params.count]
    ]


def graph_paths(graph: int) -> list[list[str]]:
    """Every path from a root to a leaf: copies, kernels and single memory operations, in order."""
    count = c_size_t()
    _call("cuGraphGetNodes", c_void_p(graph), None, byref(count))
    nodes = (c_void_p * count.value)()
    _call("cuGraphGetNodes", c_void_p(graph), nodes, byref(count))
    num_edges = c_size_t()
    _call("cuGraphGetEdges_v2", c_void_p(graph), None, None, None, byref(num_edges))
    sources = (c_void_p * num_edges.value)()
    targets = (c_void_p * num_edges.value)()
    data = (c_uint64 * num_edges.value)()
    _call("cuGraphGetEdges_v2", c_void_p(graph), sources, targets, data, byref(num_edges))
    successors: dict[int, list[int]] = {}
    for source, target in zip(sources, targets, strict=True):
        successors.setdefault(source or 0, []).append(target or 0)

    def walk(node: int) -> list[list[str]]:
        rest = [path for target in successors.get(node, []) for path in walk(target)]
        return [_kinds(node) + path for path in rest] or [_kinds(node)]

    inner = {target or 0 for target in targets}
    return [path for node in nodes if node not in inner for path in walk(node or 0)]
