"""The one part of the build that pyproject.toml cannot say: a C kernel that is allowed to fail to build."""

import sys

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "bridle._native._kernels",
            ["src/bridle/_native/kernels.c"],
            define_macros=[("Py_LIMITED_API", "0x030A0000")],
            extra_compile_args=[] if sys.platform == "win32" else ["-O3", "-std=gnu11", "-fno-math-errno", "-pthread"],
            extra_link_args=[] if sys.platform == "win32" else ["-pthread"],
            py_limited_api=True,
            optional=True,  # no compiler: bridle installs all the same and runs on torch operations
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
