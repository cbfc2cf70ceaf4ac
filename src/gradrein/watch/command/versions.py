"""`gradrein --version`."""

import platform

import torch

from ..._kernels import kernel_status
from ..._torch import CHECKED


def versions() -> str:
    """Return what is in use, one thing a line."""
    from ... import __version__  # set after this module is imported

    release = torch.__version__.partition("+")[0]
    checked = "" if release in CHECKED else f" (tested with {', '.join(CHECKED)})"
    return "\n".join(
        (
            f"gradrein {__version__}",
            f"torch {torch.__version__}{checked}",
            f"Python {platform.python_version()}",
            f"clipping on the CPU: {kernel_status()}",
        )
    )
