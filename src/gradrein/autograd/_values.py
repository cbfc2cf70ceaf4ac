"""The values of a tensor of any layout, and whether they are finite."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .._torch.dtensor import local_tensor

_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def plain_values(tensor: Tensor) -> Tensor | None:
    """Return the values a tensor stores as a plain tensor; None for subclasses and meta tensors."""
    if tensor.is_nested:
        tensor = torch.cat([part.flatten() for part in tensor.unbind()])
    if tensor.layout == torch.sparse_coo:
        tensor = tensor.coalesce().values()
    elif tensor.layout != torch.strided:
        tensor = tensor.values() if tensor.layout in _COMPRESSED else tensor.to_dense()
    return tensor if type(tensor) in (Tensor, torch.nn.Parameter) and not tensor.is_meta else None


def as_real(values: Tensor) -> Tensor:
    """Return complex values as pairs of real ones, real values as they are."""
    return torch.view_as_real(values.resolve_conj()) if values.is_complex() else values


def reduction_dtype(values: Tensor) -> torch.dtype | None:
    """Return float32 for half precision, whose sums would overflow; None to keep the dtype."""
    return torch.float32 if values.dtype in (torch.float16, torch.bfloat16) else None


def nonfinite_mask(tensor: Tensor) -> Tensor:
    """Return where this rank's values are NaN or infinite."""
    values = plain_values(local_tensor(tensor.detach()))
    return torch.zeros((), dtype=torch.bool) if values is None else ~torch.isfinite(values)


def all_finite(tensors: Sequence[Tensor]) -> bool:
    """Return whether all values are finite, with one read per value and one synchronisation per device.

    A sum is finite only if all its terms are, and takes a thirtieth of the time of `torch.isfinite` on CPU.
    The converse does not hold, since a sum may overflow: only then check each value.
    """
    by_device: dict[torch.device, list[Tensor]] = {}
    with torch.no_grad():
        for tensor in tensors:
            values = plain_values(local_tensor(tensor.detach()))
            if values is not None:
                by_device.setdefault(values.device, []).append(as_real(values))
        for there in by_device.values():
            sums = torch.stack([values.sum(dtype=reduction_dtype(values)).double() for values in there])
            if not torch.isfinite(sums).all() and not all(torch.isfinite(values).all() for values in there):
                return False
    return True
