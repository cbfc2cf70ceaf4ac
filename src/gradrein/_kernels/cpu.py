"""The C kernels, through the DLPack table that `torch.Tensor` carries: no torch headers, one build for every torch."""

import os
from typing import Protocol, cast

import torch
from torch import Tensor


class Extension(Protocol):
    """What `cpu.c` offers. None and False mean: not tensors these kernels take, and nothing was done."""

    def norm(
        self, tensors: list[Tensor], p: float, threads: int, each: Tensor | None = None
    ) -> tuple[float, bool] | None:
        """Return the norm of all, and whether any is float64.

        That of each goes into `each`, a float64 vector.
        """

    def scale(self, tensors: list[Tensor], by: float | Tensor, threads: int) -> bool:
        """Multiply in place by one number, or each tensor by its entry of a float64 vector."""

    def clamp(self, tensors: list[Tensor], limit: float, threads: int) -> bool:
        """Limit every element to `[-limit, limit]` in place."""

    def follow(self, vectors: list[Tensor], share: float, threads: int) -> tuple[float, ...] | None:
        """Let an average take a share of the displacement from it, and return the products of that."""

    def is_dense(self, tensor: Tensor) -> bool:
        """Return whether the kernels take this tensor."""


class CpuBackend:
    """Real tensors of the CPU that fill a block of memory without gaps or overlaps."""

    def __init__(self, extension: Extension) -> None:
        self.extension = extension
        self.takes = extension.is_dense

    def takes_factor(self, factor: float | Tensor) -> bool:
        """Return whether this is a number, or a vector that C can read."""
        return isinstance(factor, float) or (
            type(factor) is Tensor
            and factor.dim() == 1
            and factor.device.type == "cpu"
            and factor.dtype == torch.float64
        )

    def norms(self, tensors: list[Tensor], p: float) -> Tensor | None:
        """Return the p-norm of each tensor, in float64."""
        each = torch.empty(len(tensors), dtype=torch.float64, device="cpu")
        return each if self.extension.norm(tensors, p, torch.get_num_threads(), each) is not None else None

    def total_norm(self, tensors: list[Tensor], p: float) -> tuple[float, bool] | None:
        """Return the p-norm of all, and whether any is float64."""
        return self.extension.norm(tensors, p, torch.get_num_threads())

    def scale_(self, tensors: list[Tensor], by: float | Tensor) -> bool:
        """Multiply in place by one number, or each tensor by its entry of a float64 vector."""
        return self._wrote(tensors, self.extension.scale(tensors, by, torch.get_num_threads()))

    def clamp_(self, tensors: list[Tensor], limit: float | Tensor) -> bool:
        """Limit every element to `[-limit, limit]` in place."""
        return self._wrote(tensors, self.extension.clamp(tensors, float(limit), torch.get_num_threads()))

    def follow_(self, place: Tensor, grad: Tensor, average: Tensor, share: float) -> tuple[float, ...] | None:
        """Let the average take a share of the displacement from it; return products, for vectors of float32."""
        return self.extension.follow([place, grad, average], share, torch.get_num_threads())

    def _wrote(self, tensors: list[Tensor], done: bool) -> bool:
        """Bump the version counters, as any in-place operation would."""
        if done:
            try:
                torch.autograd.graph.increment_version(tensors)
            except RuntimeError:  # inference tensors have no version counter
                torch.autograd.graph.increment_version([t for t in tensors if not t.is_inference()])
        return done


def exchange_table() -> object | None:
    """Return DLPack's exchange table, a public C layout that `torch.Tensor` carries since 2.10; None before."""
    # 2.13 has the first name; the first torch to have a table called it by the second.
    names = ("__dlpack_c_exchange_api__", "__c_dlpack_exchange_api__")
    return next((table for name in names if (table := getattr(Tensor, name, None)) is not None), None)


def why_unused() -> str | None:
    """Return why the kernels cannot be used; None where they can."""
    if os.environ.get("GRADREIN_NATIVE") == "0":
        return "GRADREIN_NATIVE=0 is set"
    try:
        from . import _cpu  # type: ignore[attr-defined]  # only there when a compiler was
    except ImportError as error:
        return f"not built for this machine ({error})"
    table = exchange_table()
    if table is None:
        return f"torch {torch.__version__} has no DLPack exchange table"
    try:
        connected = _cpu.connect(Tensor, torch.nn.Parameter, table)
    except ValueError:  # not the capsule that DLPack describes
        connected = False
    return None if connected else f"the DLPack exchange table of torch {torch.__version__} is of an unknown version"


def load() -> CpuBackend | None:
    """Return the backend, or None where it cannot be used."""
    if why_unused() is not None:
        return None
    from . import _cpu  # type: ignore[attr-defined]

    return CpuBackend(cast("Extension", _cpu))
