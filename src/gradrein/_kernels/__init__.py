"""Norm, scale and clamp over many tensors: a native backend per device, torch operations for everything else.

A kernel for another device is one file beside `cpu.py` and one entry of `BACKENDS`.
"""

from typing import Protocol

import torch
from torch import Tensor

from .._torch.modes import fakes_values, runs_many_ranks
from . import cpu


class Backend(Protocol):
    """Native kernels for the tensors of one kind of device.

    None and False mean that some tensor is not one the backend takes; then nothing was done.
    """

    def takes(self, tensor: Tensor) -> bool:
        """Return whether the kernels take this tensor."""

    def takes_factor(self, factor: float | Tensor) -> bool:
        """Return whether the kernels take this factor of `scale_` or limit of `clamp_`."""

    def norms(self, tensors: list[Tensor], p: float) -> Tensor | None:
        """Return the p-norm of each tensor as a vector on their device, in the accumulation dtype."""

    def total_norm(self, tensors: list[Tensor], p: float) -> tuple[float, bool] | None:
        """Return the p-norm of all, and whether any is float64.

        None where a number would have to be waited for.
        """

    def scale_(self, tensors: list[Tensor], by: float | Tensor) -> bool:
        """Multiply in place by one number, or each tensor by its entry of a vector."""

    def clamp_(self, tensors: list[Tensor], limit: float | Tensor) -> bool:
        """Limit every element to `[-limit, limit]` in place."""

    def follow_(self, place: Tensor, grad: Tensor, average: Tensor, share: float) -> tuple[float, ...] | None:
        """Let the average of parameters, a vector, take a share of the displacement d from it, in place.

        Return d·d, d·p, p·p, d·g and p·g, p being the parameters and g the gradients.
        """


BACKENDS: dict[str, Backend | None] = {"cpu": cpu.load()}
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
    return f"torch operations: {cpu.why_unused() or 'switched off in this process'}"


def native(tensors: list[Tensor], foreach: bool | None, factor: float | Tensor = 1.0) -> Backend | None:
    """Return the backend of the first tensor's device.

    None where it has none, the factor is not one it takes, the plain loop was asked for (`foreach=False`), a graph is
    being compiled or tensors are fake.
    """
    if foreach is False or not tensors or torch.compiler.is_compiling() or fakes_values(tensors):
        return None
    if runs_many_ranks():
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
