from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..._native.reference import wide
from ...errors import ArgumentError, UnsupportedGradientError
from .. import _measure
from .._check import number
from .._decision import Clamp
from .._gradients import Gradients
from ._adaptive import count
from ._memory import check_kind

__all__ = ["by_element_spike"]

_KIND = "by_element_spike"


class _ByElementSpike:
    p = 2.0

    def __init__(self, theta: float, decay: float, warmup: int, floor: float, ceiling: float) -> None:
        self.theta, self.decay, self.warmup = theta, decay, warmup
        self.floor, self.ceiling = floor, ceiling
        # By key: the root of the moving average of squares, for every element, and how many steps it has seen.
        self._rms: dict[str, Tensor] = {}
        self._seen: dict[str, Tensor] = {}

    def check(self, grads: Gradients) -> None:
        """Refuse gradients whose elements cannot be told apart, or have no history of their own."""
        grads.require_whole("by_element_spike")
        for key, g in zip(grads.keys(), grads.tensors, strict=True):
            if g.layout is not torch.strided:
                raise UnsupportedGradientError(
                    f"by_element_spike remembers every element, and the gradient {key!r} is {g.layout}. Give that "
                    "parameter another policy by a name pattern, or use a dense gradient."
                )
            rms = self._rms.get(key)
            if rms is not None and rms.shape != g.shape:
                raise ArgumentError(
                    f"the history of {key!r} has shape {tuple(rms.shape)} and its gradient {tuple(g.shape)}: one "
                    "policy was used for two models, or loaded from another one. Make a policy for each."
                )

    def decide(self, grads: Gradients) -> Clamp:
        """Limit each element by its own history, and learn from it."""
        with torch.no_grad():
            finite = torch.isfinite(grads.norms(self.p)).unbind()
            rows = zip(grads.keys(), grads.tensors, finite, strict=True)
            return Clamp([self._limit(key, g.detach(), good.to(g.device)) for key, g, good in rows])

    def _limit(self, key: str, g: Tensor, good: Tensor) -> Tensor:
        size, rms, seen = self._recall(key, g)
        usual = rms / (1 - self.decay**seen).sqrt()  # corrected for the start at zero
        known = (rms > 0) & (seen >= self.warmup)  # an element that never had a gradient has no history to go by
        limit = torch.where(known, (math.sqrt(self.theta) * usual).clamp(self.floor, self.ceiling), self.ceiling)
        held = torch.minimum(size, limit)
        after = torch.hypot(math.sqrt(self.decay) * rms, math.sqrt(1 - self.decay) * held)
        self._rms[key] = torch.where(good & torch.isfinite(after), after, rms)
        self._seen[key] = seen + good
        return torch.where(good, limit, math.inf)

    def _recall(self, key: str, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        size = _measure.magnitudes(g)
        if size.dtype in (torch.float16, torch.bfloat16):
            size = size.float()
        if key not in self._rms:
            self._rms[key] = torch.zeros_like(size, memory_format=torch.contiguous_format)
            self._seen[key] = torch.zeros((), dtype=wide(size.device), device=size.device)
        return size, self._rms[key].to(size), self._seen[key].to(device=size.device, dtype=wide(size.device))

    def state_dict(self) -> dict[str, Any]:
        """What it has learned, for a checkpoint: loads with `torch.load(..., weights_only=True)`."""
        rows = {"rms": self._rms, "seen": self._seen}
        return {"policy": _KIND, **{name: {k: t.clone() for k, t in each.items()} for name, each in rows.items()}}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on from a checkpoint."""
        check_kind(saved, _KIND)
        self._rms = {key: t.clone() for key, t in saved["rms"].items()}
        self._seen = {key: t.clone() for key, t in saved["seen"].items()}

    def __repr__(self) -> str:
        return f"<{_KIND} theta={self.theta:g} decay={self.decay:g} warmup={self.warmup}>"


def by_element_spike(
    theta: float = 5000.0,
    decay: float = 0.999,
    *,
    warmup: int = 10,
    floor: float = 0.0,
    ceiling: float = math.inf,
) -> _ByElementSpike:
    """Limit each element by its own second moment: `g² > theta v` becomes `g = sign(g) sqrt(theta v)`.

    v is the moving average of the square of that element after clipping, corrected for its start at zero. Costs
    one number of memory for each element, as Adam's own second moment does; one of float32, so that elements below
    about 1e-37 are remembered with few digits or none. Of a complex element the magnitude is
    limited. Huang et al., SPAM (arXiv 2501.06842), of which this is the clipping; its reset of the moments belongs
    to the optimizer. There v is not corrected, so early limits are tighter.

    Args:
        theta: how many times the average square is too large.
        decay: how much of the old average a step keeps.
        warmup: steps to learn from before limiting; until then only `ceiling` holds.
        floor: an element below this is never changed.
        ceiling: an element above this always is.

    Returns:
        A policy for `bridle.clip_` and `bridle.Clipper`, with a memory of its own.

    Example:
        >>> policy = bridle.by_element_spike(theta=25.0, warmup=2)
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> for size in (1.0, 1.0, 1000.0):
        ...     weight.grad = torch.tensor([size, 1.0])
        ...     report = bridle.clip_([weight], policy)
        >>> weight.grad
        tensor([5.0000, 1.0000])
    """
    if number(decay, "decay", 0, 1) == 1:
        raise ArgumentError("a decay of 1 never learns; pass a number below 1.")
    if number(floor, "floor") > number(ceiling, "ceiling"):
        raise ArgumentError(f"`floor` is {floor:g} and `ceiling` {ceiling:g}; swap them.")
    return _ByElementSpike(
        number(theta, "theta"), float(decay), count(warmup, "warmup", 0), float(floor), float(ceiling)
    )
