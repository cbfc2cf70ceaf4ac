"""The C kernels, if they were built and this torch can be read; `kernels` is None otherwise.

`BRIDLE_NATIVE=0` in the environment switches them off: everything then runs on torch operations.
"""

import os
from typing import Protocol, cast

import torch
from torch import Tensor

__all__ = ["Kernels", "kernels", "partition", "usable"]


class Kernels(Protocol):
    """What `kernels.c` offers. None and False mean: not tensors these kernels take, and nothing was done."""

    def norm(
        self, tensors: list[Tensor], p: float, threads: int, each: Tensor | None = None
    ) -> tuple[float, bool] | None:
        """The norm of all, and whether any is float64; that of each goes into `each`, a float64 vector."""

    def scale(self, tensors: list[Tensor], by: float | Tensor, threads: int) -> bool:
        """Multiply in place by one number, or each tensor by its entry of a float64 vector."""

    def clamp(self, tensors: list[Tensor], limit: float, threads: int) -> bool:
        """Limit every element to [-limit, limit] in place."""

    def is_dense(self, tensor: Tensor) -> bool:
        """Do the kernels take this tensor?"""


def _load() -> Kernels | None:
    if os.environ.get("BRIDLE_NATIVE") == "0":
        return None
    # DLPack's exchange table is a public C layout that torch.Tensor carries. Checked on torch 2.13.0 and 2.15.0.
    table = getattr(Tensor, "__dlpack_c_exchange_api__", None)
    try:
        from . import _kernels  # type: ignore[attr-defined]  # only there when a compiler was
    except ImportError:
        return None
    if table is None or not _kernels.connect(Tensor, torch.nn.Parameter, table):
        return None
    return cast("Kernels", _kernels)


kernels: Kernels | None = _load()


def usable(foreach: bool | None) -> Kernels | None:
    """The kernels, unless the plain loop was asked for or a graph is being compiled (which they would break)."""
    return None if foreach is False or torch.compiler.is_compiling() else kernels


def partition(tensors: list[Tensor], foreach: bool | None) -> tuple[list[int], list[int]]:
    """Indices of the tensors the kernels take, and of those left to torch."""
    module = usable(foreach)
    taken = [i for i, t in enumerate(tensors) if module is not None and module.is_dense(t)]
    rest = sorted(set(range(len(tensors))) - set(taken))
    return taken, rest
