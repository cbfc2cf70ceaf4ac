"""Measure gradients before a step, and weights on both sides of it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from ... import _measure
from ...graph import find_names
from .shards import is_flattened, is_primary_shard, local_shard, shard_index, unmeasurable

# Weights before and after a step are compared on at most this many elements, evenly spread: 16 MB, whatever the model.
_MAX_COMPARED = 1 << 22


@dataclass
class Gradients:
    """The gradients of some parameters, as far as this rank holds them.

    Attributes:
        norms: The norm of each, None where there is no gradient, NaN where it cannot be measured.
        nonfinite: How many values are NaN or infinite, by index.
        unmeasurable: Why a gradient cannot be measured, by index.
    """

    norms: list[float | None]
    nonfinite: dict[int, int]
    unmeasurable: dict[int, str]

    @property
    def total(self) -> float:
        """The norm of all of them that could be measured."""
        known = [n for i, n in enumerate(self.norms) if n is not None and i not in self.unmeasurable]
        return math.nan if any(map(math.isnan, known)) else math.hypot(*known)


def measure_gradients(parameters: Sequence[Tensor], plain: bool = False) -> Gradients:
    """Measure the gradients that parameters have now. `plain`: no parameter is sharded."""
    grads = {i: p.grad for i, p in enumerate(parameters) if p.grad is not None}
    norms: list[float | None] = [None] * len(parameters)
    local, lost = grads, {}
    # Looking at layouts takes longer than measuring small tensors: not done where all are plain.
    if not plain or not set(map(type, grads.values())) <= {Tensor}:
        lost = {i: why for i, g in grads.items() if (why := unmeasurable(parameters[i], g)) is not None}
        local = {i: local_shard(g) for i, g in grads.items() if i not in lost}
    each = _measure.norms(list(local.values()), 2.0) if local else torch.zeros(0)
    for i, norm in [*zip(local, each.tolist(), strict=True), *((i, math.nan) for i in lost)]:
        norms[i] = norm
    worst = [i for i in local if not math.isfinite(norms[i] or 0.0)]
    counts = _measure.count_nonfinite([local[i] for i in worst]).tolist() if worst else []
    return Gradients(norms, dict(zip(worst, counts, strict=True)), lost)


@dataclass
class Measurement:
    """The numbers of one step, of what this rank holds.

    Attributes:
        norms: The gradient norm of each parameter, None where it has no gradient, NaN where it cannot be measured.
        norm: That of all of them; None where it does not follow from what is on this rank.
        nonfinite: How many values of which gradient are not finite, by the parameter's index.
        step_grad_cosine: Cosine between the last step and the gradient after it. Positive: the step went too far.
        update: Distance the weights moved, relative to their norm.
        unmoved: Indices of the parameters that did not move.
        partial_sums: This rank's terms where parameters are sharded, as in the record.
    """

    norms: list[float | None]
    norm: float | None
    nonfinite: dict[int, int] = field(default_factory=dict)
    step_grad_cosine: float | None = None
    update: float | None = None
    unmoved: list[int] = field(default_factory=list)
    partial_sums: list[float | None] = field(default_factory=lambda: [None] * 5)


class Meter:
    """Measures the gradients of one optimizer before its step, and the weights on both sides of it.

    Attributes:
        shards: Which shard of each parameter this rank holds, None where it is a plain tensor.
        is_sharded: Whether any parameter lies on several ranks. Then no norm of all gradients is known here.
        unmeasurable: Why gradients could not be measured, by the parameter's index.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, rank: int = 0) -> None:
        self.optimizer = optimizer
        self.parameters: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
        self.shards = [shard_index(p) for p in self.parameters]
        self.is_sharded = any(shard is not None and shard[1] != 1 for shard in self.shards)
        self.unmeasurable: dict[int, str] = {}
        self.plain = not any(self.shards) and not any(map(is_flattened, self.parameters))
        floats = [p for p in self.parameters if p.is_floating_point()]
        # Weights on several devices are not compared.
        comparable = len({p.device for p in floats}) == 1 and not any(map(is_flattened, floats))
        self._compared = floats if comparable else []
        self._counted = [is_primary_shard(p, rank) for p in self._compared]
        self.stride = max(1, math.ceil(sum(local_shard(p).numel() for p in self._compared) / _MAX_COMPARED))
        self._dtype = torch.float64 if any(p.dtype == torch.float64 for p in self._compared) else torch.float32
        # For each compared weight: as it was before the step, and after the step its negative move.
        self._held: list[Tensor] = []
        self._holds: Literal["nothing", "weights", "moves"] = "nothing"
        self._length = 0.0

    def names(self, model: torch.nn.Module | None) -> list[str]:
        """Return a name for each parameter: the model's, those the optimizer was given, else those of live modules."""
        groups = self.optimizer.param_groups
        if model is None and all("param_names" in group for group in groups):
            return [name for group in groups for name in group["param_names"]]
        known = find_names(model)
        found = [known.of(p) or f"parameter {i}" for i, p in enumerate(self.parameters)]
        # Names of live modules begin with the class of the outermost; where all are of one, leave it out.
        roots = {name.partition(".")[0] for name in found}
        if model is None and len(roots) == 1 and all("." in name for name in found):
            return [name.partition(".")[2] for name in found]
        return found

    def is_stale(self) -> bool:
        """Return whether the optimizer has been given other parameters since."""
        now = [p for group in self.optimizer.param_groups for p in group["params"]]
        return len(now) != len(self.parameters) or any(a is not b for a, b in zip(now, self.parameters, strict=True))

    def measure_step(self, scale: float) -> Measurement:
        """Measure the gradients, which are multiplied by `scale`, and compare them with the last move."""
        found = measure_gradients(self.parameters, self.plain)
        self.unmeasurable.update(found.unmeasurable)
        norms = found.norms if scale == 1 else [None if n is None else n / scale for n in found.norms]
        known = not self.is_sharded and not found.unmeasurable
        measured = Measurement(norms, found.total / scale if known else None, found.nonfinite)
        if not found.unmeasurable:
            self._compare_with_move(measured)
        return measured

    def hold_weights(self) -> None:
        """Keep a copy of the weights, to compare with after the step."""
        with torch.no_grad():
            weights = self._view(self._compared)
            if not self._held:
                self._held = [torch.empty(t.shape, dtype=self._dtype, device=t.device) for t in weights]
            for held, weight in zip(self._held, weights, strict=True):
                held.copy_(weight)
        self._holds = "weights"

    def measure_update(self, measured: Measurement) -> None:
        """Measure how far the step moved the weights."""
        if self._holds != "weights" or not self._compared:
            return
        with torch.no_grad():
            weights = self._view(self._compared)
            for held, weight in zip(self._held, weights, strict=True):
                held.sub_(weight)
        moves, sizes = _measure.norms(self._held, 2.0), _measure.norms(weights, 2.0)
        index = {id(p): i for i, p in enumerate(self.parameters)}
        measured.unmoved = [index[id(p)] for p, n in zip(self._compared, moves.tolist(), strict=True) if n == 0]
        self._holds = "moves"
        if self.is_sharded:
            measured.partial_sums[0], measured.partial_sums[1] = self._squared(moves), self._squared(sizes)
            return
        self._length, size = float(_measure.total(moves, 2.0)), float(_measure.total(sizes, 2.0))
        measured.update = self._length / size if size > 0 else None

    def skip_step(self) -> None:
        """Note that a step is not measured."""
        self._holds = "nothing"

    def _compare_with_move(self, measured: Measurement) -> None:
        grads = [g for p in self._compared if (g := p.grad) is not None and g.layout is torch.strided]
        if self._holds != "moves" or not grads or len(grads) != len(self._compared):
            return
        with torch.no_grad():
            seen = self._view(grads)
            pairs = zip(self._held, seen, strict=True)
            products = [-float(torch.dot(h.reshape(-1), g.reshape(-1).to(self._dtype))) for h, g in pairs]
        sizes = _measure.norms(seen, 2.0)
        if self.is_sharded:
            counted = [n for n, counts in zip(products, self._counted, strict=True) if counts]
            moves = _measure.norms(self._held, 2.0)
            measured.partial_sums[2:] = [sum(counted) * self.stride, self._squared(moves), self._squared(sizes)]
            return
        length = float(_measure.total(sizes, 2.0)) * self._length
        cosine = sum(products) / length if length > 0 else math.nan
        measured.step_grad_cosine = cosine if math.isfinite(cosine) else None

    def _squared(self, norms: Tensor) -> float:
        """Return the sum of squares of what this rank counts, extrapolated to all elements from the compared ones."""
        pairs = zip(norms.tolist(), self._counted, strict=True)
        return float(sum(n * n for n, counts in pairs if counts)) * self.stride

    def _view(self, tensors: list[Any]) -> list[Tensor]:
        """Return the elements that are compared: all, or an even sample."""
        plain = [t.detach() for t in (tensors if self.plain else map(local_shard, tensors))]
        return plain if self.stride == 1 else [t.reshape(-1)[:: self.stride] for t in plain]
