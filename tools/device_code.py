"""Kernels of the measurements themselves, compiled when they are needed by the runtime compiler.

Nothing of the library is compiled so. The compiler comes with torch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref, c_char_p, c_size_t, c_uint, c_void_p
from pathlib import Path
from typing import Any

import torch

from ulysses_ops.errors import UlyssesError
from ulysses_ops.tools.cuda_driver import call, driver_function


def compile_cubin(source: str, arch: str) -> bytes:
    """Machine code of CUDA C++.

    Args:
        source: Kernels with C linkage.
        arch: Such as ``"sm_90"``.

    Raises:
        OSError: there is no runtime compiler.
        UlyssesError: the compiler refuses.
    """
    compiler = _compiler()
    program = c_void_p()
    text = source.encode()
    _checked(compiler, "nvrtcCreateProgram", byref(program), text, b"kernel.cu", 0, None, None)
    try:
        options = (c_char_p * 1)(f"--gpu-architecture={arch}".encode())
        if compiler.nvrtcCompileProgram(program, 1, options) != 0:
            message = f"device code for {arch}: {_log(compiler, program)}"
            raise UlyssesError(message)
        size = c_size_t()
        _checked(compiler, "nvrtcGetCUBINSize", program, byref(size))
        cubin = ctypes.create_string_buffer(size.value)
        _checked(compiler, "nvrtcGetCUBIN", program, cubin)
    finally:
        compiler.nvrtcDestroyProgram(byref(program))
    return cubin.raw


def _compiler() -> ctypes.CDLL:
    """The runtime compiler that torch uses.

    Torch's own library of it is loaded first: it knows where the compiler lies, and where the
    compiler finds its parts.
    """
    ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libcaffe2_nvrtc.so"))
    major = (torch.version.cuda or "").partition(".")[0]
    return ctypes.CDLL(f"libnvrtc.so.{major}")


def _checked(compiler: ctypes.CDLL, name: str, *arguments: Any) -> None:
    status = getattr(compiler, name)(*arguments)
    if status != 0:
        message = f"{name} gave {status}"
        raise UlyssesError(message)


def _log(compiler: ctypes.CDLL, program: c_void_p) -> str:
    size = c_size_t()
    compiler.nvrtcGetProgramLogSize(program, byref(size))
    log = ctypes.create_string_buffer(max(size.value, 1))
    compiler.nvrtcGetProgramLog(program, log)
    return log.value.decode().strip()


class DeviceKernel:
    """One kernel on the current device; its module stays loaded as long as the process lives."""

    def __init__(self, source: str, name: str) -> None:
        """Compile and load.

        Raises:
            OSError: there is no runtime compiler, or no driver.
            UlyssesError: the compiler or the driver refuses.
        """
        major, minor = torch.cuda.get_device_capability()
        torch.cuda.current_stream().synchronize()  # makes the context
        code = compile_cubin(source, f"sm_{major}{minor}")
        module, self._function = c_void_p(), c_void_p()
        call("cuModuleLoadData", byref(module), code)
        call("cuModuleGetFunction", byref(self._function), module, name.encode())
        self._launch = driver_function("cuLaunchKernel")

    def launch(self, threads: int, arguments: Sequence[Any]) -> None:
        """Enqueue one block on the current stream; can be captured.

        Args:
            threads: Of the block.
            arguments: Values of ctypes, each as wide as the kernel's.
        """
        given = (c_void_p * len(arguments))(*(ctypes.addressof(value) for value in arguments))
        stream = c_void_p(torch.cuda.current_stream().cuda_stream)
        one, none = c_uint(1), c_uint(0)
        shape = (one, one, one, c_uint(threads), one, one, none)
        self._launch(self._function, *shape, stream, given, None)
