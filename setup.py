"""The one part of the build that pyproject.toml cannot say: a C kernel that is allowed to fail to build."""

import sys

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext


class OptionalOpenMP(build_ext):
    """Build with threads, else without, else not at all: bridle then runs on torch operations."""

    def build_extension(self, ext: Extension) -> None:
        """Try with OpenMP first."""
        if sys.platform != "win32":
            ext.extra_compile_args = ["-O3", "-std=gnu11", "-fno-math-errno", "-fopenmp"]
            ext.extra_link_args = ["-fopenmp"]
        try:
            super().build_extension(ext)
        except Exception:  # no OpenMP in this compiler (or no compiler: the second try says so and is optional)
            ext.extra_compile_args = [a for a in ext.extra_compile_args if a != "-fopenmp"]
            ext.extra_link_args = []
            super().build_extension(ext)


setup(
    ext_modules=[
        Extension(
            "bridle._native._kernels",
            ["src/bridle/_native/kernels.c"],
            define_macros=[("Py_LIMITED_API", "0x030A0000")],
            py_limited_api=True,
            optional=True,
        )
    ],
    cmdclass={"build_ext": OptionalOpenMP},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
