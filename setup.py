"""Runs CMake and names the wheel; everything about the build itself is in CMakeLists.txt."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

ROOT = Path(__file__).resolve().parent
BUILD_DIR = ROOT / "build" / "cmake"


def find_program(name: str) -> str:
    """Find a build program beside the running Python or on PATH."""
    search_path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])
    program = shutil.which(name, path=search_path)
    if program is None:
        message = f"the build needs {name}, which is not installed: pip install {name}"
        raise FileNotFoundError(message)
    return program


class CMakeBuild(build_ext):
    """Builds every library by one run of CMake."""

    def run(self) -> None:
        """Configure and build; in a development build, the C++ tests too."""
        package_dir = ROOT if self.inplace else Path(self.build_lib).resolve()
        cmake = find_program("cmake")
        configure = [
            cmake,
            *("-S", str(ROOT), "-B", str(BUILD_DIR), "-G", "Ninja"),
            f"-DCMAKE_MAKE_PROGRAM={find_program('ninja')}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-DULYSSES_OUTPUT_DIR={package_dir / 'ulysses_ops'}",
            f"-DBUILD_TESTING={'ON' if self.inplace else 'OFF'}",
        ]
        try:
            subprocess.run(configure, check=True)
            subprocess.run([cmake, "--build", str(BUILD_DIR)], check=True)
        except subprocess.CalledProcessError as error:
            message = f"CMake failed with exit status {error.returncode}; its output is above"
            raise CompileError(message) from error

    def get_ext_filename(self, fullname: str) -> str:
        """Name the library without a Python version: it is no Python module."""
        return fullname.replace(".", "/") + ".so"


class PlatformWheel(bdist_wheel):
    """A wheel that depends on the platform and on no Python version or interface."""

    def get_tag(self) -> tuple[str, str, str]:
        """Keep the platform of the tag alone."""
        _, _, platform = super().get_tag()
        return "py3", "none", platform


setup(
    ext_modules=[
        Extension("ulysses_ops._C", sources=[]),
        Extension("ulysses_ops._C_cuda", sources=[], optional=True),
        Extension("ulysses_ops._C_kernels", sources=[], optional=True),
        Extension("ulysses_ops._C_projection", sources=[], optional=True),
    ],
    cmdclass={"build_ext": CMakeBuild, "bdist_wheel": PlatformWheel},
)
