"""The memory of a tensor as it is stored."""

import sys

import torch
from torch import Tensor


def storage_of(tensor: Tensor) -> int:
    """Return a number that tells storages apart that are alive at one time, also those without memory."""
    number: int = tensor.untyped_storage()._cdata
    return number


def holders(tensor: Tensor) -> tuple[int, int]:
    """Return how many tensors refer to the memory of this one, and how many Python objects to its storage.

    Only equal or not equal to an earlier count of the same tensor means something.
    """
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage)


def is_fake(tensor: Tensor) -> bool:
    """Return whether a tensor has no values, only a shape, a dtype and a device, as while a compiler traces."""
    module = sys.modules.get("torch._subclasses.fake_tensor")
    return module is not None and isinstance(tensor, module.FakeTensor)


def undo_negation(tensor: Tensor) -> Tensor:
    """Return a view of the memory of a tensor, without a pending negation."""
    return torch._neg_view(tensor) if tensor.is_neg() else tensor


def sparse_values(tensor: Tensor) -> Tensor:
    """Return the values of a sparse COO tensor, coalesced or not, to be written to."""
    return tensor._values()
