"""The memory of a tensor as it is stored."""

import torch
from torch import Tensor


def undo_negation(tensor: Tensor) -> Tensor:
    """Return a view of the memory of a tensor, without a pending negation."""
    return torch._neg_view(tensor) if tensor.is_neg() else tensor


def sparse_values(tensor: Tensor) -> Tensor:
    """Return the values of a sparse COO tensor, coalesced or not, to be written to."""
    return tensor._values()
