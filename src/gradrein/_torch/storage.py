"""The memory of a tensor as it is stored."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def storage_of(tensor: Tensor) -> int:
    """Return a number that tells storages apart that are alive at one time, also those without memory."""
    number: int = tensor.untyped_storage()._cdata
    return number


def is_fake(tensor: Tensor) -> bool:
    """Return whether a tensor has no values, only a shape, a dtype and a device, as while a compiler traces."""
    return isinstance(tensor, FakeTensor)


def repeats(tensors: Sequence[Tensor]) -> dict[int, int]:
    """Return the tensors that are in the whole memory of an earlier one, each with the first of them, by index."""
    starts = _starts(tensors)
    if len(set(starts)) == len(starts):
        return {}
    first: dict[object, int] = {}
    pairs = zip(starts, tensors, strict=True)
    keys = [(start, t.device, t.dtype, _runs(t)) if start > 0 else start for start, t in pairs]
    earlier = {i: first.setdefault(key, i) for i, key in enumerate(keys)}
    return {i: other for i, other in earlier.items() if i != other}


def _starts(tensors: Sequence[Tensor]) -> list[int]:
    """Return where the memory of each tensor begins; below zero for one that has no block, such as an empty one."""
    if torch.compiler.is_compiling() or any(map(is_fake, tensors[:1])):
        return [-id(t) for t in tensors]
    try:
        starts = list(map(Tensor.data_ptr, tensors))
    except RuntimeError:  # of a tensor without a storage, such as a sparse one
        starts = [t.data_ptr() if t.layout is torch.strided and not is_fake(t) else 0 for t in tensors]
    return [start or -id(t) for start, t in zip(starts, tensors, strict=True)] if 0 in starts else starts


def _runs(tensor: Tensor) -> tuple[tuple[int, int], ...]:
    """Return step and number of the elements of a strided tensor, the same for all orders and shapes of its memory."""
    runs: list[tuple[int, int]] = []
    pairs = zip(tensor.stride(), tensor.shape, strict=True)
    for step, size in sorted((step, size) for step, size in pairs if size > 1):
        inner, count = runs[-1] if runs else (0, 0)
        if runs and inner * count == step:
            runs[-1] = (inner, count * size)
        else:
            runs.append((step, size))
    return tuple(runs)


def plain(tensor: Tensor) -> Tensor:
    """Return a tensor as no subclass; one whose class handles every operation, such as a fake one, as it is."""
    kind = type(tensor)
    if kind is Tensor or kind.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl:
        return tensor
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(Tensor)


def undo_negation(tensor: Tensor) -> Tensor:
    """Return a view of the memory of a tensor, without a pending negation."""
    return torch._neg_view(tensor) if tensor.is_neg() else tensor


def sparse_values(tensor: Tensor) -> Tensor:
    """Return the values of a sparse COO tensor, coalesced or not, to be written to."""
    return tensor._values()
