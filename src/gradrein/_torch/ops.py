"""ATen operations without a public name, and multi-tensor ones: one call for many tensors of one device and dtype."""

from collections.abc import Sequence

import torch
from torch import Tensor

upsample_bilinear2d_aa_backward = torch.ops.aten._upsample_bilinear2d_aa_backward
upsample_bicubic2d_aa_backward = torch.ops.aten._upsample_bicubic2d_aa_backward
cdist_backward = torch.ops.aten._cdist_backward


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


def foreach_clamp_(tensors: list[Tensor], limit: float) -> None:
    """Limit every element to `[-limit, limit]`."""
    torch._foreach_clamp_min_(tensors, -limit)
    torch._foreach_clamp_max_(tensors, limit)
