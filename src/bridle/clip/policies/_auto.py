from __future__ import annotations

import torch
from torch import Tensor

from ...errors import ArgumentError
from .._decision import Scale, down_to
from .._gradients import Gradients

__all__ = ["by_auto"]


class _ByAuto:
    p = 2.0

    def __init__(self, share: float, warmup: int, window: int) -> None:
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
            # A step that is not finite leaves no trace: what stood in its place is written back.
            self._norms.index_copy_(0, place, torch.where(finite, norm, self._norms[place]).reshape(1))
            self._seen += finite
            # A run can blow up within its first steps: until there is a history, the middle of what there is holds it.
            share = torch.where(self._seen > self._warmup, self._share, 0.5).to(self._norms)
            return Scale(down_to(torch.nanquantile(self._norms, share), norm))

    def __repr__(self) -> str:
        return f"by_auto(share={self._share}, warmup={self._warmup}, window={self._window})"


def by_auto(share: float = 0.25, warmup: int = 20, window: int = 1000) -> _ByAuto:
    """The norm of all gradients, brought down to a low quantile of the norms seen so far. Nothing to choose.

    The threshold is the `share`-quantile of the last `window` finite norms, measured before clipping: most steps are
    scaled to the length of a calm one, and the threshold follows the run as it settles. The quantile of a run's own
    history as threshold is AutoClip's (Seetharaman et al., arXiv 2007.14469), with a bounded history, a warm-up and a
    gentler quantile. It remembers: use one for each optimizer.

    Args:
        share: which quantile, between 0 and 1.
        warmup: for how many steps the median of those so far is used instead, which is gentler.
        window: how many norms are remembered.

    Returns:
        A policy for `bridle.clip_`.

    Raises:
        ArgumentError: (a ValueError) `share` outside 0 to 1, `warmup` below 1, `window` below `warmup`.
    """
    if not 0 < share < 1:
        raise ArgumentError(f"`share` lies between 0 and 1; found {share!r}.")
    if warmup < 1 or window < warmup:
        raise ArgumentError(f"`warmup` is 1 or more and `window` not below it; found {warmup!r} and {window!r}.")
    return _ByAuto(share, warmup, window)
