import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from .. import _measure
from .._torch.dtensor import local_tensor, spec_of, spread
from .._validate import count, floor_and_ceiling, number
from ..errors import ArgumentError, UnsupportedGradientError
from .adaptive import Bounds
from .base import GradientView, Scale, clip_factor
from .built_once import BuiltOnce
from .state import StateRows, accept_finite, check_complete
from .window import empty, push, quantile

_LEAST = 1e-3  # of the median norm: a limit that fell further would take too long to come back


@dataclass(eq=False)
class ByOvershoot(BuiltOnce):
    """Clip to a limit that shrinks when steps go too far and grows while they do not.

    With d the last change of the parameters and g the gradient now, `limit <- limit exp(-rate cos(g, d))`, between a
    thousandth of the median of the last norms and that median. A positive cosine says that the loss rises along the
    last step, so it overshot; a negative one that it could have gone further. The limit starts at `start` times the
    first norm, which is a warm-up of its own. The policy needs no threshold and no guess at the scale of the gradients,
    and costs a copy of the parameters. The rule is hypergradient descent (Baydin et al., Online Learning Rate
    Adaptation with Hypergradient Descent, arXiv 1703.04782) in a multiplicative form, for a limit on the norm instead
    of a learning rate, and with what the optimizer really did instead of the previous gradient.

    Args:
        rate: How far one step moves the limit, on a logarithmic scale.
        start: The first limit, relative to the first norm.
        window: How many norms the median is taken over.
        floor: A norm below this is never clipped.
        ceiling: A norm above this always is.

    Example:
        >>> policy = bridle.policies.ByOvershoot(rate=1.0)
        >>> weight = torch.nn.Parameter(torch.tensor([1.0]))
        >>> for change, gradient in ((0.0, 1.0), (-1.0, 1.0), (-1.0, -1.0)):
        ...     _ = weight.data.add_(change)
        ...     weight.grad = torch.tensor([gradient])
        ...     print(round(bridle.clip_([weight], policy).norm_after, 3))
        0.1
        0.272
        0.1
    """

    p: ClassVar[float] = 2.0

    rate: float = 0.1
    start: float = 0.1
    window: int = 100
    _: KW_ONLY
    floor: float = 0.0
    ceiling: float = math.inf

    def __post_init__(self) -> None:
        """Validate the arguments."""
        self.rate, self.start = number(self.rate, "rate"), number(self.start, "start", 0, 1)
        self.window = count(self.window, "window")
        self.floor, self.ceiling = floor_and_ceiling(self.floor, self.ceiling)
        self._before: dict[str, Tensor] = {}  # by key: the parameter as it was a step ago
        self._specs: dict[str, Any] = {}  # how it is spread over ranks

    @cached_property
    def _rows(self) -> StateRows:
        return StateRows({"limit": torch.zeros((), dtype=torch.float64), "window": empty(self.window)})

    def check(self, grads: GradientView) -> None:
        """Refuse gradients that cannot be compared with a change of their parameters."""
        super().check(grads)
        grads.refuse_plain_shards("ByOvershoot")
        grads.refuse_disjoint("ByOvershoot")
        for key, p, g in zip(grads.keys(), grads.weights(), grads.values, strict=True):
            if g.layout is not torch.strided:
                raise UnsupportedGradientError(
                    f"ByOvershoot compares the gradient with a change of the parameter, and a gradient is {g.layout}. "
                    "Give that parameter another policy by a name pattern, or use a dense gradient."
                )
            before = self._before.get(key)
            if before is not None and before.shape != p.shape:
                raise ArgumentError(
                    f"the parameter {key!r} has shape {tuple(p.shape)} and had {tuple(before.shape)} before: one "
                    "policy was used for two models, or loaded from another one. Make a policy for each."
                )

    def decide(self, grads: GradientView) -> Scale:
        """Move the limit by what the last step turned out to be, and bring the norm down to it."""
        with torch.no_grad():
            keys, norm = [grads.pattern], grads.total_norm(self.p).reshape(1)
            state = self._rows.read(keys, norm)
            window = push(state["window"], state["seen"], norm)
            median = quantile(window, 0.5)
            moved = state["limit"] * torch.exp(-self.rate * self._overshoot(grads, norm))
            limit = torch.where(state["seen"] == 0, self.start * norm, moved)
            limit = torch.minimum(torch.maximum(limit, _LEAST * median), median)
            good = (norm > 0) & (norm < math.inf)
            self._rows.write(keys, accept_finite(state, {"limit": limit, "window": window}, good))
            bounds = Bounds(torch.zeros_like(good), self.floor, self.ceiling)
            return Scale(clip_factor(bounds.clamp(limit), norm).reshape(()))

    def _overshoot(self, grads: GradientView, norm: Tensor) -> Tensor:
        """Return the cosine between this gradient and the last change of the parameters: above 0, it went too far."""
        keys, now = grads.keys(), grads.weights()
        self._specs.update(zip(keys, map(spec_of, grads.parameters), strict=True))
        changes = [p - self._parameter_before(key, p) for key, p in zip(keys, now, strict=True)]
        for key, p in zip(keys, now, strict=True):
            self._before[key].copy_(p)
        length = _measure.total(grads.over_ranks(_measure.norms(changes, self.p), self.p), self.p)
        # Divided before they are multiplied, so that no product overflows.
        pairs = zip(changes, grads.values, strict=True)
        terms = [_dot(d.div_(length.to(d.device)), g.detach()).to(norm) for d, g in pairs]
        cosine = grads.over_ranks(torch.stack(terms)).sum() / norm
        return torch.where(torch.isfinite(cosine), cosine, 0.0)  # no change yet, or nothing to compare

    def _parameter_before(self, key: str, p: Tensor) -> Tensor:
        if key not in self._before:
            self._before[key] = p.clone(memory_format=torch.contiguous_format)
        before = self._before[key] = self._before[key].to(p)
        return before

    def state_dict(self) -> dict[str, Any]:
        """Return what it has learned. It loads with `torch.load(..., weights_only=True)`."""
        before = {key: spread(t.clone(), self._specs.get(key)) for key, t in self._before.items()}
        return self._saved(**self._rows.state_dict(), before=before, before_keys=list(before))

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue from a checkpoint. Build the policy with the same settings first.

        Raises:
            ArgumentError: (a ValueError) The state of another policy, or of one with other settings.
        """
        self._check_saved(saved)
        check_complete(saved.get("before_keys", saved["before"]), saved["before"])
        self._rows.load_state_dict(saved)
        self._specs = {key: spec_of(t) for key, t in saved["before"].items()}
        self._before = {key: local_tensor(t).clone() for key, t in saved["before"].items()}


def _dot(change: Tensor, grad: Tensor) -> Tensor:
    if change.shape != grad.shape:  # this rank lacks a gradient that others have
        return torch.zeros((), device=change.device)
    a, b = change.reshape(-1), grad.reshape(-1).to(change.dtype)
    return torch.vdot(a, b).real if a.is_complex() else torch.dot(a, b)
