"""ATen operations without a public name, and multi-tensor ones: one call for many tensors of one device and dtype."""

from collections.abc import Sequence

import torch
from torch import Tensor

_DEVICES = frozenset({"cpu", "cuda", "xpu", "mtia", torch._C._get_privateuse1_backend_name()})


def has_foreach(device: torch.device) -> bool:
    """Return whether torch has multi-tensor operations on this device."""
    return device.type in _DEVICES


def foreach_norm(tensors: list[Tensor], p: float, dtype: torch.dtype | None = None) -> Sequence[Tensor]:
    """Return the p-norm of each tensor, accumulated in `dtype`."""
    return torch._foreach_norm(tensors, p, dtype=dtype)


def foreach_mul_(tensors: list[Tensor], by: Tensor | list[Tensor]) -> None:
    """Multiply each tensor by one 0-dim tensor, or by its own."""
    torch._foreach_mul_(tensors, by)


def foreach_copy(tensors: list[Tensor]) -> Sequence[Tensor]:
    """Return a copy of each tensor."""
    return torch._foreach_mul(tensors, 1.0)


def foreach_clamp_(tensors: list[Tensor], limit: float) -> None:
    """Limit every element to `[-limit, limit]`."""
    torch._foreach_clamp_min_(tensors, -limit)
    torch._foreach_clamp_max_(tensors, limit)


def foreach_copy_(tensors: list[Tensor], values: list[Tensor]) -> None:
    """Copy values into tensors, of another dtype too."""
    torch._foreach_copy_(tensors, values)


def foreach_scale_half_(tensors: list[Tensor], by: Tensor) -> None:
    """Multiply tensors of a half type by a 0-dim float32 tensor, rounded once: as `torch.amp.GradScaler` unscales."""
    ignored = torch.empty(1, dtype=torch.float32, device=by.device)  # written where a value is not finite
    torch._amp_foreach_non_finite_check_and_unscale_(tensors, ignored, by)


_SCALES_HALF = frozenset({"cuda", "xpu"})


def can_scale_half(device: torch.device) -> bool:
    """Return whether torch has `foreach_scale_half_` on this device."""
    return device.type in _SCALES_HALF


def flatten(tensors: list[Tensor]) -> Tensor:
    """Return the elements of strided tensors end to end; of a single one a view, where it can be."""
    return tensors[0].reshape(-1) if len(tensors) == 1 else torch._C._nn.flatten_dense_tensors(tensors)


def unflatten(flat: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    """Return views of a vector in the shapes of tensors, one after the other."""
    return [*torch._C._nn.unflatten_dense_tensors(flat, tensors)]
