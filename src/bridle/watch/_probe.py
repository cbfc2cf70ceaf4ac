"""What is measured at one optimizer's step."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..clip import _measure
from ..errors import UnsupportedGradientError
from ._torch import is_plain, scaled_by

__all__ = ["Probe", "Reading"]

# Weights before and after a step are compared on at most this many elements, evenly spread: 16 MB, whatever the model.
_SAMPLE = 1 << 22


@dataclass
class Reading:
    """One step's numbers.

    Attributes:
        norms: the gradient norm of each parameter, None where it has no gradient.
        norm: that of all of them together.
        bad: how many values of which gradient are not finite, by the parameter's place.
        turn: the cosine between the last step and the gradient after it. Positive: the step went too far.
        update: how far the weights moved, relative to their size.
        unmoved: places of the parameters that did not move at all.
    """

    norms: list[float | None]
    norm: float
    bad: dict[int, int] = field(default_factory=dict)
    turn: float | None = None
    update: float | None = None
    unmoved: list[int] = field(default_factory=list)


class Probe:
    """Measures the gradients of one optimizer before its step, and the weights on both sides of it."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.parameters: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
        floats = [p for p in self.parameters if p.is_floating_point()]
        # On several devices there is no one place to compare weights in; then that is left out.
        self._sampled = floats if len({p.device for p in floats}) == 1 else []
        self.stride = max(1, math.ceil(sum(p.numel() for p in self._sampled) / _SAMPLE))
        self._wide = torch.float64 if any(p.dtype == torch.float64 for p in self._sampled) else torch.float32
        self._before: Tensor | None = None
        self._moved: Tensor | None = None

    def is_stale(self) -> bool:
        """Has the optimizer been given other parameters since?"""
        now = [p for group in self.optimizer.param_groups for p in group["params"]]
        return len(now) != len(self.parameters) or any(a is not b for a, b in zip(now, self.parameters, strict=True))

    def read_gradients(self) -> Reading:
        """Measure the gradients."""
        grads = {i: p.grad for i, p in enumerate(self.parameters) if p.grad is not None}
        for g in grads.values():
            if not is_plain(g):
                raise UnsupportedGradientError(
                    f"a gradient is a {type(g).__name__}, one rank's part of a whole. Whole ones are measured."
                )
        norms: list[float | None] = [None] * len(self.parameters)
        if not grads:
            return Reading(norms, 0.0)
        each = _measure.norms(list(grads.values()), 2.0) / scaled_by(self.optimizer)
        total = float(_measure.total(each, 2.0))
        for i, norm in zip(grads, each.tolist(), strict=True):
            norms[i] = norm
        bad = {}
        if not math.isfinite(total):
            worst = [i for i in grads if not math.isfinite(norms[i] or 0.0)]
            bad = dict(zip(worst, _measure.count_nonfinite([grads[i] for i in worst]).tolist(), strict=True))
        return Reading(norms, total, bad, turn=self._turn())

    def remember_weights(self) -> None:
        """Keep a copy of the weights, to compare with after the step."""
        self._before = self._gather(self._sampled) if self._sampled else None

    def read_update(self, reading: Reading) -> None:
        """Measure how far the step moved the weights."""
        if self._before is None:
            return
        after = self._gather(self._sampled)
        moved, self._before = after - self._before, None
        each = _measure.norms(list(torch.split(moved, [self._count(p) for p in self._sampled])), 2.0)
        size = float(_measure.norms([after], 2.0))
        reading.update = float(_measure.total(each, 2.0)) / size if size > 0 else None
        place = {id(p): i for i, p in enumerate(self.parameters)}
        reading.unmoved = [place[id(p)] for p, n in zip(self._sampled, each.tolist(), strict=True) if n == 0]
        self._moved = moved

    def _turn(self) -> float | None:
        moved, self._moved = self._moved, None
        if moved is None or any(p.grad is None or p.grad.layout is not torch.strided for p in self._sampled):
            return None
        gradient = self._gather([p.grad for p in self._sampled if p.grad is not None])
        sizes = _measure.norms([moved, gradient], 2.0)
        if not bool(torch.isfinite(sizes).all()) or not bool(sizes.all()):
            return None
        return float(torch.dot(moved / sizes[0], gradient / sizes[1]))

    def _count(self, p: Tensor) -> int:
        return -(-p.numel() // self.stride)

    def _gather(self, tensors: list[Tensor]) -> Tensor:
        with torch.no_grad():
            return torch.cat([t.detach().reshape(-1)[:: self.stride].to(self._wide) for t in tensors])
