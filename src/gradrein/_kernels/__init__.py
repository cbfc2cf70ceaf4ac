"""Norm, scale and clamp over many tensors: a native backend per device, torch operations for everything else.

The C kernels are reached through the DLPack table that `torch.Tensor` carries: no torch headers, one build for every
torch. A kernel for another device is a class with the methods of `CpuBackend`, and one entry of `BACKENDS`.
"""

import os
from typing import Any

import torch
from torch import Tensor

from .._torch.modes import fake_mode


class CpuBackend:
    """Real tensors of the CPU that fill a block of memory without gaps or overlaps.

    None and False mean that some tensor is not one that `cpu.c` takes; then nothing was done.
    """

    def __init__(self, extension: Any) -> None:
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
        measured: tuple[float, bool] | None = self.extension.norm(tensors, p, torch.get_num_threads())
        return measured

    def scale_(self, tensors: list[Tensor], by: float | Tensor) -> bool:
        """Multiply in place by one number, or each tensor by its entry of a float64 vector."""
        return _wrote(tensors, self.extension.scale(tensors, by, torch.get_num_threads()))

    def clamp_(self, tensors: list[Tensor], limit: float | Tensor) -> bool:
        """Limit every element to `[-limit, limit]` in place."""
        return _wrote(tensors, self.extension.clamp(tensors, float(limit), torch.get_num_threads()))

    def follow_(self, place: Tensor, grad: Tensor, average: Tensor, share: float) -> tuple[float, ...] | None:
        """Let the average of parameters, a vector, take a share of the displacement d from it, in place.

        Return d·d, d·p, p·p, d·g and p·g, p being the parameters and g the gradients; None unless all are float32.
        """
        products: tuple[float, ...] | None = self.extension.follow(
            [place, grad, average], share, torch.get_num_threads()
        )
        return products


def _wrote(tensors: list[Tensor], done: bool) -> bool:
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

    return CpuBackend(_cpu)


BACKENDS: dict[str, CpuBackend | None] = {"cpu": load()}
"""By device type. `GRADREIN_NATIVE=0` in the environment switches native backends off."""


def kernel_status() -> str:
    """Return whether clipping on the CPU uses the C kernel or torch operations, and in the latter case why.

    Both give the same results. `gradrein --version` prints this too.

    Examples:
        >>> import gradrein
        >>> gradrein.kernel_status().partition(":")[0] in ("C kernel", "torch operations")
        True

    See Also:
        [`gradrein.clip_`][], [`gradrein.compile`][]
    """
    if BACKENDS["cpu"] is not None:
        return "C kernel"
    return f"torch operations: {why_unused() or 'switched off in this process'}"


def native(tensors: list[Tensor], foreach: bool | None, factor: float | Tensor = 1.0) -> CpuBackend | None:
    """Return the backend of the first tensor's device.

    None where it has none, the factor is not one it takes, the plain loop was asked for (`foreach=False`), a graph is
    being compiled or every result is fake. Fake tensors are none that a backend takes.
    """
    if foreach is False or not tensors or torch.compiler.is_compiling() or fake_mode() is not None:
        return None
    backend = BACKENDS.get(tensors[0].device.type)
    takes = backend is not None and (isinstance(factor, float) or backend.takes_factor(factor))
    return backend if takes else None


def partition(tensors: list[Tensor], foreach: bool | None, factor: float | Tensor = 1.0) -> tuple[list[int], list[int]]:
    """Return the indices of tensors that one native backend takes, and of those left to torch."""
    supported = [t for t in tensors if BACKENDS.get(t.device.type) is not None]
    backend = native(supported[:1], foreach, factor)
    taken = [i for i, t in enumerate(tensors) if backend is not None and backend.takes(t)]
    return taken, sorted(set(range(len(tensors))) - set(taken))
