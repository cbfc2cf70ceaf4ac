"""Small gradients of several parameters, written down side by side."""

from collections.abc import Mapping
from math import prod

import torch
from torch import Tensor

from ..._torch.ops import foreach_copy
from .base import Dense, SampleGrads
from .numerics import on_host, row_norms, weighted_sum

# The gradients of a parameter are small if writing them takes about as long as a few calls of torch: on the host, and
# on a device, where a kernel is launched in the time that it takes to write some megabytes.
_SMALL_ON_HOST, _SMALL_ON_DEVICE = 1 << 16, 1 << 22


class Joint:
    """Small gradients of several parameters as columns of one matrix: one norm and one product serve all of them.

    Attributes:
        forms: the same gradients, of each parameter.
        nbytes: how many bytes the matrix takes, about.
    """

    def __init__(self, forms: Mapping[str, SampleGrads], budget: int) -> None:
        """Write down those that are small, real, not sparse and on one device, within a budget of bytes."""
        self.nbytes = 0
        blocks: dict[str, Tensor] = {}
        for name, form in forms.items():
            size, held = form.nbytes(), form.held_tensors
            limit = _SMALL_ON_HOST if not held or on_host(held[0]) else _SMALL_ON_DEVICE
            if size <= min(limit, budget - self.nbytes) and not form.is_sparse:
                block = form.dense()
                elsewhere = blocks and block.device != next(iter(blocks.values())).device
                if not block.is_complex() and not elsewhere:
                    blocks[name] = block.reshape(len(block), prod(form.shape))
                    self.nbytes += size
        self._rows = torch.cat(list(blocks.values()), 1) if blocks else torch.empty(0, 0)
        self._sizes = [block.shape[1] for block in blocks.values()]
        self.forms = {
            name: Dense(columns.view(len(columns), *forms[name].shape))
            for name, columns in zip(blocks, torch.split(self._rows, self._sizes, 1) if blocks else (), strict=True)
        }

    def norms(self) -> Tensor:
        """Return the norm of each sample's gradient, of all parameters together."""
        return row_norms(self._rows)

    def weighted(self, weights: Tensor) -> dict[str, Tensor]:
        """Return, for each parameter, the sum over samples of weight times gradient: tensors of their own."""
        if not self.forms:
            return {}
        parts = torch.split(weighted_sum(self._rows, weights), self._sizes)
        shaped = [part.view(form.shape) for part, form in zip(parts, self.forms.values(), strict=True)]
        return dict(zip(self.forms, foreach_copy(shaped), strict=True))
