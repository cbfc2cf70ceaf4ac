"""What is measured at one optimizer's step."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from .. import _measure
from ..graph import find_names
from ._pieces import here, piece, speaks, why_not
from ._torch import is_flattened, scaled_by

__all__ = ["Probe", "Reading"]

# Weights before and after a step are compared on at most this many elements, evenly spread: 16 MB, whatever the model.
_SAMPLE = 1 << 22


@dataclass
class Reading:
    """One step's numbers, of what this rank has.

    Attributes:
        norms: the gradient norm of each parameter, None where it has no gradient, NaN where it cannot be measured.
        norm: that of all of them together; None where it does not follow from what is on this rank.
        bad: how many values of which gradient are not finite, by the parameter's place.
        turn: the cosine between the last step and the gradient after it. Positive: the step went too far.
        update: how far the weights moved, relative to their size.
        unmoved: places of the parameters that did not move at all.
        sums: squares of the move and of the weights after it, product of the last move and this gradient, squares
            of both: this rank's summands of them, where parameters lie on several ranks. From the sums over all
            ranks follow `update` and `turn`.
    """

    norms: list[float | None]
    norm: float | None
    bad: dict[int, int] = field(default_factory=dict)
    turn: float | None = None
    update: float | None = None
    unmoved: list[int] = field(default_factory=list)
    sums: list[float | None] = field(default_factory=lambda: [None] * 5)


class Probe:
    """Measures the gradients of one optimizer before its step, and the weights on both sides of it.

    Attributes:
        pieces: which piece of each parameter this rank has, None where it is a plain tensor.
        spread: do parameters lie on several ranks? Then no norm of all of them is known here.
        unmeasured: places of parameters whose gradient could not be measured, with the reason.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, rank: int = 0) -> None:
        self.optimizer = optimizer
        self.parameters: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
        self.pieces = [piece(p) for p in self.parameters]
        self.spread = any(found is not None and found[1] != 1 for found in self.pieces)
        self.unmeasured: dict[int, str] = {}
        # Looking for pieces takes longer than measuring small tensors: not done where there are none.
        self._plain = not any(self.pieces) and not any(map(is_flattened, self.parameters))
        floats = [p for p in self.parameters if p.is_floating_point()]
        # On several devices there is no one place to compare weights in; then that is left out.
        comparable = len({p.device for p in floats}) == 1 and not any(map(is_flattened, floats))
        self._sampled = floats if comparable else []
        self._counted = [speaks(p, rank) for p in self._sampled]
        self.stride = max(1, math.ceil(sum(here(p).numel() for p in self._sampled) / _SAMPLE))
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
        norms: list[float | None] = [None] * len(self.parameters)
        parts, lost = grads, {}
        if not self._plain or not set(map(type, grads.values())) <= {Tensor}:
            lost = {i: why for i, g in grads.items() if (why := self._why_not(i, g)) is not None}
            parts = {i: here(g) for i, g in grads.items() if i not in lost}
            self.unmeasured.update(lost)
        each = _measure.norms(list(parts.values()), 2.0) / scaled_by(self.optimizer) if parts else torch.zeros(0)
        total = float(_measure.total(each, 2.0)) if parts else 0.0
        for i, norm in [*zip(parts, each.tolist(), strict=True), *((i, math.nan) for i in lost)]:
            norms[i] = norm
        bad = {}
        if not math.isfinite(total):
            worst = [i for i in parts if not math.isfinite(norms[i] or 0.0)]
            bad = dict(zip(worst, _measure.count_nonfinite([parts[i] for i in worst]).tolist(), strict=True))
        reading = Reading(norms, None if self.spread or lost else total, bad)
        if parts and not lost:
            self._read_turn(reading)
        return reading

    def _why_not(self, i: int, grad: Tensor) -> str | None:
        if is_flattened(self.parameters[i]):
            return (
                "torch's first FullyShardedDataParallel has flattened its parameter, and no tensor says which piece is "
                "here; use torch.distributed.fsdp.fully_shard"
            )
        return why_not(self.parameters[i], grad)

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
        each, sizes = _measure.norms(self._held, 2.0), _measure.norms(seen, 2.0)
        place = {id(p): i for i, p in enumerate(self.parameters)}
        reading.unmoved = [place[id(p)] for p, n in zip(self._sampled, each.tolist(), strict=True) if n == 0]
        self._holds = "moves"
        if self.spread:
            reading.sums[0], reading.sums[1] = self._square(each), self._square(sizes)
            return
        self._length, size = float(_measure.total(each, 2.0)), float(_measure.total(sizes, 2.0))
        reading.update = self._length / size if size > 0 else None

    def forget(self) -> None:
        """A step goes by unmeasured."""
        self._holds = "nothing"

    def _read_turn(self, reading: Reading) -> None:
        """Compare the gradient with the last move, which is held with its sign turned."""
        grads = [g for p in self._sampled if (g := p.grad) is not None and g.layout is torch.strided]
        if self._holds != "moves" or len(grads) != len(self._sampled):
            return
        with torch.no_grad():
            seen = self._look(grads)
            pairs = zip(self._held, seen, strict=True)
            products = [-float(torch.dot(h.reshape(-1), g.reshape(-1).to(self._wide))) for h, g in pairs]
        sizes = _measure.norms(seen, 2.0)
        if self.spread:
            counted = [n for n, counts in zip(products, self._counted, strict=True) if counts]
            moves = _measure.norms(self._held, 2.0)
            reading.sums[2:] = [sum(counted) * self.stride, self._square(moves), self._square(sizes)]
            return
        length = float(_measure.total(sizes, 2.0)) * self._length
        cosine = sum(products) / length if length > 0 else math.nan
        reading.turn = cosine if math.isfinite(cosine) else None

    def _square(self, norms: Tensor) -> float:
        """The sum of squares of what this rank counts, of all elements as far as the sampled ones tell."""
        pairs = zip(norms.tolist(), self._counted, strict=True)
        return float(sum(n * n for n, counts in pairs if counts)) * self.stride

    def _look(self, tensors: list[Tensor]) -> list[Tensor]:
        """The elements that are compared: all, or an even sample."""
        plain = [t.detach() for t in (tensors if self._plain else map(here, tensors))]
        return plain if self.stride == 1 else [t.reshape(-1)[:: self.stride] for t in plain]
