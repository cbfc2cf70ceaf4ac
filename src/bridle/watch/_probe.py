"""What is measured at one optimizer's step."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from ..clip import _measure
from ..errors import UnsupportedGradientError
from ..graph import find_names
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
        # For each sampled weight: as it was before the step, and after the step how far it moved back.
        self._held: list[Tensor] = []
        self._holds: Literal["nothing", "weights", "moves"] = "nothing"
        self._length = 0.0

    def names(self, model: torch.nn.Module | None) -> list[str]:
        """A name for each parameter: the model's, those the optimizer was given, else those of live modules."""
        groups = self.optimizer.param_groups
        if model is None and all("param_names" in group for group in groups):
            return [name for group in groups for name in group["param_names"]]
        known = find_names(model)
        found = [known.of(p) or f"parameter {i}" for i, p in enumerate(self.parameters)]
        # Names of live modules begin with the class of the outermost; where all are of one, that says nothing.
        roots = {name.partition(".")[0] for name in found}
        if model is None and len(roots) == 1 and all("." in name for name in found):
            return [name.partition(".")[2] for name in found]
        return found

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
        with torch.no_grad():
            seen = self._look(self._sampled)
            if not self._held:
                self._held = [torch.empty(t.shape, dtype=self._wide, device=t.device) for t in seen]
            for held, weight in zip(self._held, seen, strict=True):
                held.copy_(weight)
        self._holds = "weights"

    def read_update(self, reading: Reading) -> None:
        """Measure how far the step moved the weights."""
        if self._holds != "weights" or not self._sampled:
            return
        with torch.no_grad():
            seen = self._look(self._sampled)
            for held, weight in zip(self._held, seen, strict=True):
                held.sub_(weight)
        each = _measure.norms(self._held, 2.0)
        size = float(_measure.total(_measure.norms(seen, 2.0), 2.0))
        self._length, self._holds = float(_measure.total(each, 2.0)), "moves"
        reading.update = self._length / size if size > 0 else None
        place = {id(p): i for i, p in enumerate(self.parameters)}
        reading.unmoved = [place[id(p)] for p, n in zip(self._sampled, each.tolist(), strict=True) if n == 0]

    def forget(self) -> None:
        """A step goes by unmeasured."""
        self._holds = "nothing"

    def _turn(self) -> float | None:
        grads = [g for p in self._sampled if (g := p.grad) is not None and g.layout is torch.strided]
        if self._holds != "moves" or len(grads) != len(self._sampled):
            return None
        with torch.no_grad():
            seen = self._look(grads)
            length = float(_measure.total(_measure.norms(seen, 2.0), 2.0)) * self._length
            pairs = zip(self._held, seen, strict=True)
            together = -sum(float(torch.dot(h.reshape(-1), g.reshape(-1).to(self._wide))) for h, g in pairs)
        cosine = together / length if length > 0 else math.nan
        return cosine if math.isfinite(cosine) else None

    def _look(self, tensors: list[Tensor]) -> list[Tensor]:
        """The elements that are compared: all, or an even sample."""
        plain = [t.detach() for t in tensors]
        return plain if self.stride == 1 else [t.reshape(-1)[:: self.stride] for t in plain]
