"""`bridle --version`."""

import argparse
import platform
from typing import Any

import torch

from .._kernels import kernel_status
from .._torch import CHECKED


class ShowVersion(argparse.Action):
    """Print the versions of bridle, torch and Python, and how clipping runs on the CPU; then exit."""

    def __init__(self, option_strings: list[str], dest: str, **options: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, **options)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        """Print and exit."""
        print(versions())
        parser.exit()


def versions() -> str:
    """Return what is in use, one thing a line."""
    from .. import __version__  # set after this module is imported

    release = torch.__version__.partition("+")[0]
    checked = "" if release in CHECKED else f" (tested with {', '.join(CHECKED)})"
    return "\n".join(
        (
            f"bridle {__version__}",
            f"torch {torch.__version__}{checked}",
            f"Python {platform.python_version()}",
            f"clipping on the CPU: {kernel_status()}",
        )
    )
