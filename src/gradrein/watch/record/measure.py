"""Measure gradients before a step, and weights on both sides of it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ... import _measure
from ..._devices import readable_now
from ...graph import find_names
from .layers import LayerNorms
from .readback import Values
from .shards import is_flattened, is_primary_shard, local_shard, shard_index, unmeasurable

# Weights before and after a step are compared on at most this many elements, evenly spread: 4 MB, whatever the model.
_MAX_COMPARED = 1 << 20


@dataclass
class Gradients:
    """The gradients of some parameters, as far as this rank holds them.

    Attributes:
        indices: Which of them have a gradient that can be measured.
        norms: The norm of each of these: a vector, on their device.
        nonfinite: How many values are NaN or infinite, by index; counted where no device is waited for.
        unmeasurable: Why a gradient cannot be measured, by index.
    """

    indices: list[int]
    norms: Tensor
    nonfinite: dict[int, int]
    unmeasurable: dict[int, str]

    def vector(self, count: int, before: Mapping[int, Tensor]) -> Tensor:
        """Return the norms by parameter, on their device: 0 without a gradient, NaN where it cannot be measured.

        Args:
            count: How many parameters there are.
            before: The norms before clipping, where they are known.
        """
        each = [self.norms.new_zeros(())] * count
        for i, norm in [*zip(self.indices, self.norms.unbind(), strict=True), *before.items()]:
            each[i] = norm
        for i in self.unmeasurable:
            each[i] = self.norms.new_full((), math.nan)
        return torch.stack(each)

    def each(self, norms: list[float], count: int) -> list[float | None]:
        """Return the norms, once read, by parameter: None without a gradient, NaN where it cannot be measured."""
        each: list[float | None] = [None] * count
        for i, norm in [*zip(self.indices, norms, strict=True), *((i, math.nan) for i in self.unmeasurable)]:
            each[i] = norm
        return each


def measure_gradients(parameters: Sequence[Tensor], plain: bool = False) -> Gradients:
    """Measure the gradients that parameters have now. `plain`: no parameter is sharded."""
    grads = {i: p.grad for i, p in enumerate(parameters) if p.grad is not None}
    local, lost = grads, {}
    # Looking at layouts takes longer than measuring small tensors: not done where all are plain.
    if not plain or not set(map(type, grads.values())) <= {Tensor}:
        lost = {i: why for i, g in grads.items() if (why := unmeasurable(parameters[i], g)) is not None}
        local = {i: local_shard(g) for i, g in grads.items() if i not in lost}
    norms = _measure.norms(list(local.values()), 2.0)
    worst: list[int] = []
    if readable_now([norms]):
        worst = [i for i, norm in zip(local, norms.tolist(), strict=True) if not math.isfinite(norm)]
    counts = _measure.count_nonfinite([local[i] for i in worst]).tolist()
    return Gradients(list(local), norms, dict(zip(worst, counts, strict=True)), lost)


class Meter:
    """Measures the gradients of one optimizer before its step, and the weights on both sides of it.

    Attributes:
        shards: Which shard of each parameter this rank holds, None where it is a plain tensor.
        is_sharded: Whether any parameter lies on several ranks. Then no norm of all gradients is known here.
        unmeasurable: Why gradients could not be measured, by the parameter's index.
        layers: What to measure by layer, if anything.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, rank: int = 0) -> None:
        self.optimizer = optimizer
        self.layers: LayerNorms | None = None
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
        # All compared weights as they were before the step; after it, their negative move.
        self._held: Tensor | None = None
        self._is_move = False

    def names(self, model: torch.nn.Module | None) -> list[str]:
        """Return a name for each parameter: the model's, those the optimizer was given, else those of live modules."""
        groups = self.optimizer.param_groups
        if model is None and all("param_names" in group for group in groups):
            return [name for group in groups for name in group["param_names"]]
        known = find_names(model)
        names = [known.of(p) or f"parameter {i}" for i, p in enumerate(self.parameters)]
        # Names of live modules begin with the class of the outermost; where all are of one, leave it out.
        roots = {name.partition(".")[0] for name in names}
        if model is None and len(roots) == 1 and all("." in name for name in names):
            return [name.partition(".")[2] for name in names]
        return names

    def is_stale(self) -> bool:
        """Return whether the optimizer has been given other parameters since."""
        now = [p for group in self.optimizer.param_groups for p in group["params"]]
        return len(now) != len(self.parameters) or any(a is not b for a, b in zip(now, self.parameters, strict=True))

    def measure_gradients(self) -> tuple[Gradients, Values]:
        """Measure the gradients, and compare them with the last move."""
        gradients = measure_gradients(self.parameters, self.plain)
        self.unmeasurable.update(gradients.unmeasurable)
        compared = {} if gradients.unmeasurable else self._compare_with_move()
        return gradients, {"norms": [gradients.norms], **compared}

    def hold_weights(self) -> None:
        """Keep a copy of the weights, to compare with after the step."""
        self._held = self._joined(self._compared) if self._compared else None
        self._is_move = False

    def measure_update(self, gradient_norms: Tensor | None) -> Values:
        """Measure how far the step moved the weights: each, all relative to their size, and by layer.

        Args:
            gradient_norms: Of every parameter, where layers are measured: ranks that hold shards then communicate.
        """
        values: Values = {}
        each = [torch.zeros(0)] * 2
        if self._held is not None and not self._is_move:
            weights = self._joined(self._compared)
            move = self._held.sub_(weights)
            self._is_move = True
            sizes = [t.numel() for t in self._view(self._compared)]
            compared = [move] if self.layers is None else [move, weights]
            each = [_measure.norms(list(torch.split(t, sizes)), 2.0) for t in compared]
            values["moves"] = each[:1]
            if self.is_sharded:
                values["update_sums"] = [self._squared(move), self._squared(weights)]
            else:
                values["update"] = [_norm(move) / _norm(weights)]
        if self.layers is not None and gradient_norms is not None:
            sizes_now = _measure.norms([local_shard(p).detach() for p in self.parameters], 2.0)
            known = len(each[0]) == len(self.parameters)  # not with complex weights, or weights on several devices
            rows = [gradient_norms, sizes_now, *(each if known else [torch.zeros_like(sizes_now)] * 2)]
            values["layers"] = [self.layers.sum_over_ranks(rows)]
        return values

    def unmoved(self, moves: list[float]) -> list[int]:
        """Return the indices of the parameters that did not move."""
        index = {id(p): i for i, p in enumerate(self.parameters)}
        return [index[id(p)] for p, n in zip(self._compared, moves, strict=bool(moves)) if n == 0]

    def skip_step(self) -> None:
        """Note that a step is not measured."""
        self._held = None

    def _compare_with_move(self) -> Values:
        grads = [g for p in self._compared if (g := p.grad) is not None and g.layout is torch.strided]
        if self._held is None or not self._is_move or len(grads) != len(self._compared):
            return {}
        joined = self._joined(grads)
        if self.is_sharded:
            ours = -torch.dot(self._masked(self._held), joined) * self.stride
            return {"cosine_sums": [ours, self._squared(self._held), self._squared(joined)]}
        return {"cosine": [-torch.dot(self._held, joined) / (_norm(joined) * _norm(self._held))]}

    def _squared(self, values: Tensor) -> Tensor:
        """Return the sum of squares of what this rank counts, extrapolated to all elements from the compared ones."""
        return _norm(self._masked(values)).square() * self.stride

    def _masked(self, values: Tensor) -> Tensor:
        """Return joined values with 0 for what another rank counts."""
        parts = torch.split(values, [t.numel() for t in self._view(self._compared)])
        return torch.cat([t if counts else torch.zeros_like(t) for t, counts in zip(parts, self._counted, strict=True)])

    @torch.no_grad()
    def _joined(self, tensors: list[Any]) -> Tensor:
        """Return the compared elements as one vector."""
        return torch.cat([t.reshape(-1) for t in self._view(tensors)]).to(self._dtype)

    def _view(self, tensors: list[Any]) -> list[Tensor]:
        """Return the elements that are compared: all, or an even sample."""
        plain = [t.detach() for t in (tensors if self.plain else map(local_shard, tensors))]
        return plain if self.stride == 1 else [t.reshape(-1)[:: self.stride] for t in plain]


def _norm(values: Tensor) -> Tensor:
    return _measure.norms([values], 2.0)[0]
