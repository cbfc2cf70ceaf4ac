"""The C kernels, if they were built and this torch can be read; `kernels` is None otherwise.

`BRIDLE_NATIVE=0` in the environment switches them off: everything then runs on torch operations.
"""

import os
from types import ModuleType

import torch

__all__ = ["kernels", "partition", "usable"]


def _load() -> ModuleType | None:
    if os.environ.get("BRIDLE_NATIVE") == "0":
        return None
    # DLPack's exchange table: a public C layout, on torch.Tensor since 2.10. Checked on torch 2.13.0 and 2.15.0.
    table = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if table is None:
        return None
    try:
        from . import _kernels  # type: ignore[attr-defined]  # only there when a compiler was
    except ImportError:
        return None
    module: ModuleType = _kernels
    return module if module.connect(torch.Tensor, table) else None


kernels: ModuleType | None = _load()


def usable(foreach: bool | None) -> ModuleType | None:
    """The kernels, unless the plain loop was asked for or a graph is being compiled (which they would break)."""
    return None if foreach is False or torch.compiler.is_compiling() else kernels


def partition(tensors: list[torch.Tensor], foreach: bool | None) -> tuple[list[int], list[int]]:
    """Indices of the tensors the kernels take, and of those left to torch."""
    module = usable(foreach)
    taken = [i for i, t in enumerate(tensors) if module is not None and module.is_dense(t)]
    rest = sorted(set(range(len(tensors))) - set(taken))
    return taken, rest
