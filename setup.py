"""The one part of the build that pyproject.toml cannot say: a C kernel that is allowed to fail to build."""

import os
import sys

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext


class ThreadsIfPossible(build_ext):
    """Build with OpenMP, else without, else not at all: gradrein then runs on torch operations."""

    def build_extension(self, ext: Extension) -> None:
        """Try with OpenMP first."""
        if sys.platform != "win32":
            ext.extra_compile_args = ["-O3", "-std=gnu11", "-fno-math-errno", "-pthread"]
            ext.extra_link_args = ["-pthread"]
            try:
                ext.extra_compile_args.append("-fopenmp")
                ext.extra_link_args.append("-fopenmp")
                return super().build_extension(ext)
            except Exception:  # a compiler without it, or none: the second try says so, and is optional
                ext.extra_compile_args.remove("-fopenmp")
                ext.extra_link_args.remove("-fopenmp")
        return super().build_extension(ext)


KERNELS = Extension(
    "gradrein._kernels._cpu",
    ["src/gradrein/_kernels/cpu.c"],
    define_macros=[("Py_LIMITED_API", "0x030A0000")],
    py_limited_api=True,
    optional=True,
)
# GRADREIN_PURE=1 builds the wheel for machines that have no other: it runs on torch operations.
IS_PURE = os.environ.get("GRADREIN_PURE") == "1"

setup(
    ext_modules=[] if IS_PURE else [KERNELS],
    cmdclass={"build_ext": ThreadsIfPossible},
    options={} if IS_PURE else {"bdist_wheel": {"py_limited_api": "cp310"}},
)
