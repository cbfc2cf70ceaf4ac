from __future__ import annotations

import torch
from torch import Tensor

from ...errors import ArgumentError
from .._decision import Scale, down_to
from .._gradients import Gradients

__all__ = ["by_auto"]


class _ByAuto:
    def __init__(self, share: float, warmup: int, window: int) -> None:
        self.p = 2.0
        self._share, self._warmup, self._window = share, warmup, window
        self._norms: Tensor | None = None
        self._seen: Tensor | None = None

    def decide(self, grads: Gradients) -> Scale:
        with torch.no_grad():
            norm = grads.total(self.p)
            if self._norms is None or self._seen is None:
                self._norms = norm.new_full((self._window,), torch.nan)
                self._seen = torch.zeros((), dtype=torch.int64, device=norm.device)
            finite = torch.isfinite(norm)
            place = (self._seen % self._window).reshape(1)
            kept = torch.where(finite, norm, self._norms[place].squeeze(0))
            self._norms.index_copy_(0, place, kept.reshape(1))
            self._seen += finite
            limit = torch.nanquantile(self._norms, self._share)
            factor = down_to(limit, norm)
            return Scale(torch.where(self._seen > self._warmup, factor, 1.0))

    def __repr__(self) -> str:
        return f"by_auto(share={self._share}, warmup={self._warmup}, window={self._window})"


def by_auto(share: float = 0.25, warmup: int = 20, window: int = 1000) -> _ByAuto:
    return _ByAuto(share, warmup, window)
