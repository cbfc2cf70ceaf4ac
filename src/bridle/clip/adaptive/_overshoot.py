from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...errors import ArgumentError, UnsupportedGradientError
from .. import _measure
from .._check import number
from .._decision import Scale, down_to
from .._gradients import Gradients
from ._adaptive import Bounds, count
from ._memory import Memory, check_kind, learned
from ._window import blank, push, quantile

__all__ = ["by_overshoot"]

_KIND = "by_overshoot"
_LEAST = 1e-3  # of the median norm: a limit that fell further would take too long to come back


class _ByOvershoot:
    p = 2.0

    def __init__(self, rate: float, start: float, window: int, floor: float, ceiling: float) -> None:
        self.rate, self.start, self.floor, self.ceiling = rate, start, floor, ceiling
        self._memory = Memory({"limit": torch.zeros((), dtype=torch.float64), "window": blank(window)})
        self._before: dict[str, Tensor] = {}  # by key: the parameter as it was a step ago

    def check(self, grads: Gradients) -> None:
        """Refuse gradients that cannot be compared with a change of their parameters."""
        grads.require_whole("by_overshoot")
        grads.require_alone("by_overshoot")
        for key, p, g in zip(grads.keys(), grads.parameters, grads.tensors, strict=True):
            if g.layout is not torch.strided:
                raise UnsupportedGradientError(
                    f"by_overshoot compares the gradient with a change of the parameter, and a gradient is {g.layout}. "
                    "Give that parameter another policy by a name pattern, or use a dense gradient."
                )
            before = self._before.get(key)
            if before is not None and before.shape != p.shape:
                raise ArgumentError(
                    f"the parameter {key!r} has shape {tuple(p.shape)} and had {tuple(before.shape)} before: one "
                    "policy was used for two models, or loaded from another one. Make a policy for each."
                )

    def decide(self, grads: Gradients) -> Scale:
        """Move the limit by what the last step turned out to be, and bring the norm down to it."""
        with torch.no_grad():
            keys, norm = [grads.label], grads.total(self.p).reshape(1)
            state = self._memory.recall(keys, norm)
            window = push(state["window"], state["seen"], norm)
            usual = quantile(window, 0.5)
            moved = state["limit"] * torch.exp(-self.rate * self._overshoot(grads, norm))
            limit = torch.where(state["seen"] == 0, self.start * norm, moved)
            limit = torch.minimum(torch.maximum(limit, _LEAST * usual), usual)
            good = (norm > 0) & (norm < math.inf)
            self._memory.keep(keys, learned(state, {"limit": limit, "window": window}, good))
            bounds = Bounds(torch.zeros_like(good), self.floor, self.ceiling)
            return Scale(down_to(bounds.hold(limit), norm).reshape(()))

    def _overshoot(self, grads: Gradients, norm: Tensor) -> Tensor:
        """The cosine between this gradient and the last change of the parameters: above 0, it went too far."""
        keys, now = grads.keys(), [p.detach() for p in grads.parameters]
        changes = [p - self._recall(key, p) for key, p in zip(keys, now, strict=True)]
        for key, p in zip(keys, now, strict=True):
            self._before[key].copy_(p)
        length = _measure.total(_measure.norms(changes, self.p), self.p)
        # Divided before they are multiplied, so that no product overflows.
        pairs = zip(changes, grads.tensors, strict=True)
        parts = [_dot(d.div_(length.to(d.device)), g.detach()).to(norm) for d, g in pairs]
        cosine = torch.stack(parts).sum() / norm
        return torch.where(torch.isfinite(cosine), cosine, 0.0)  # no change yet, or nothing to compare

    def _recall(self, key: str, p: Tensor) -> Tensor:
        if key not in self._before:
            self._before[key] = p.clone(memory_format=torch.contiguous_format)
        before = self._before[key] = self._before[key].to(p)
        return before

    def state_dict(self) -> dict[str, Any]:
        """What it has learned, for a checkpoint: loads with `torch.load(..., weights_only=True)`."""
        before = {key: t.clone() for key, t in self._before.items()}
        return {"policy": _KIND, **self._memory.state_dict(), "before": before}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on from a checkpoint. The policy has to be built with the same settings.

        Raises:
            ArgumentError: (a ValueError) the state of another policy, or of one with other settings.
        """
        check_kind(saved, _KIND)
        self._memory.load_state_dict(saved)
        self._before = {key: t.clone() for key, t in saved["before"].items()}

    def __repr__(self) -> str:
        return f"<{_KIND} rate={self.rate:g} start={self.start:g} floor={self.floor:g} ceiling={self.ceiling:g}>"


def _dot(change: Tensor, grad: Tensor) -> Tensor:
    a, b = change.reshape(-1), grad.reshape(-1).to(change.dtype)
    return torch.vdot(a, b).real if a.is_complex() else torch.dot(a, b)


def by_overshoot(
    rate: float = 0.1,
    start: float = 0.1,
    window: int = 100,
    *,
    floor: float = 0.0,
    ceiling: float = math.inf,
) -> _ByOvershoot:
    """Clip to a limit that shrinks when steps go too far and grows while they do not.

    With d the last change of the parameters and g the gradient now, `limit <- limit exp(-rate cos(g, d))`, between
    a thousandth of the median of the last norms and that median. A positive cosine says that the loss rises along
    the way just taken, so the step overshot; a negative one that it could have gone further. It starts at `start`
    times the first norm, which is a warm-up of its own. It needs no threshold and no guess at the scale of the
    gradients, and costs a copy of the parameters. The rule is hypergradient descent (Baydin et al., Online Learning
    Rate Adaptation with Hypergradient Descent, arXiv 1703.04782) in a multiplicative form, for a limit on the norm
    instead of a learning rate, and with what the optimizer really did instead of the previous gradient.

    Args:
        rate: how far one step moves the limit, on a logarithmic scale.
        start: the first limit, relative to the first norm.
        window: how many norms the median is taken over.
        floor: a norm below this is never clipped.
        ceiling: a norm above this always is.

    Returns:
        A policy for `bridle.clip_` and `bridle.Clipper`, with a memory of its own.

    Example:
        >>> policy = bridle.by_overshoot(rate=1.0)
        >>> weight = torch.nn.Parameter(torch.tensor([1.0]))
        >>> for change, gradient in ((0.0, 1.0), (-1.0, 1.0), (-1.0, -1.0)):
        ...     _ = weight.data.add_(change)
        ...     weight.grad = torch.tensor([gradient])
        ...     print(round(bridle.clip_([weight], policy).norm_after, 3))
        0.1
        0.272
        0.1
    """
    if number(floor, "floor") > number(ceiling, "ceiling"):
        raise ArgumentError(f"`floor` is {floor:g} and `ceiling` {ceiling:g}; swap them.")
    return _ByOvershoot(
        number(rate, "rate"), number(start, "start", 0, 1), count(window, "window"), float(floor), float(ceiling)
    )
