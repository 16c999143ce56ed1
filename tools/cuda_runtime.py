"""The few calls of the CUDA runtime that measurements make themselves.

``Tensor.copy_`` chooses between a kernel and a copy by rules of its own, and passes through host
memory where there is no peer access. Where the copy engine is what is measured, it is asked
directly: through the runtime that torch has loaded already, found again by its name.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ulysses_ops.errors import UlyssesError

MEMCPY_DEFAULT = 4  # cudaMemcpyDefault: the runtime reads the direction off the addresses
ALREADY_ENABLED = 704  # cudaErrorPeerAccessAlreadyEnabled


def _runtime() -> ctypes.CDLL:
    major = (torch.version.cuda or "").partition(".")[0]
    return ctypes.CDLL(f"libcudart.so.{major}")


def _function(name: str, *arguments: Any) -> Callable[..., int]:
    function = getattr(_runtime(), name)
    function.argtypes = arguments
    function.restype = ctypes.c_int
    return function  # type: ignore[no-any-return]  # ctypes does not know its functions' types


def memcpy_async() -> Callable[..., int]:
    """``cudaMemcpyAsync(target, source, bytes, kind, stream)``."""
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    return _function("cudaMemcpyAsync", pointer, pointer, size, ctypes.c_int, pointer)


def memcpy_2d_async() -> Callable[..., int]:
    """``cudaMemcpy2DAsync(target, pitch, source, pitch, row bytes, rows, kind, stream)``."""
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    kind = ctypes.c_int
    return _function("cudaMemcpy2DAsync", pointer, size, pointer, size, size, size, kind, pointer)


class RowCopy:
    """``cudaMemcpy2DAsync`` of rows of bytes, the call that carries an exchange."""

    def __init__(self) -> None:
        """Look the call up.

        Raises:
            OSError: there is no CUDA runtime.
        """
        self._copy = memcpy_2d_async()

    def __call__(self, target: Tensor, source: Tensor) -> None:
        """Enqueue a copy on the current stream of the source's device.

        Args:
            target: ``uint8``, (rows, row bytes), bytes of a row side by side.
            source: The same, on the device that sends.

        Raises:
            UlyssesError: the runtime refuses.
        """
        rows, row_bytes = source.shape
        with torch.cuda.device(source.device):
            stream = torch.cuda.current_stream().cuda_stream
            status = self._copy(
                target.data_ptr(),
                target.stride(0),
                source.data_ptr(),
                source.stride(0),
                row_bytes,
                rows,
                MEMCPY_DEFAULT,
                stream,
            )
        if status != 0:
            message = f"copy of {rows} rows of {row_bytes} bytes: cudaMemcpy2DAsync gave {status}"
            raise UlyssesError(message)


def enable_peer_access(source: torch.device, target: torch.device) -> None:
    """Let ``source`` reach the memory of ``target``; otherwise copies would go by way of the host.

    Raises:
        UlyssesError: the runtime refuses.
    """
    enable = _function("cudaDeviceEnablePeerAccess", ctypes.c_int, ctypes.c_uint)
    last_error = _function("cudaGetLastError")
    with torch.cuda.device(source):
        torch.cuda.current_stream().synchronize()  # makes the context
        status = enable(target.index, 0)
        last_error()  # what was enabled already is no error to leave behind
    if status not in (0, ALREADY_ENABLED):
        message = f"{source} -> {target}: cudaDeviceEnablePeerAccess gave {status}"
        raise UlyssesError(message)
