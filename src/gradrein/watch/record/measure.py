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
from .readback import Numbers, Values
from .shards import is_flattened, is_primary_shard, local_shard, shard_index, unmeasurable

# Weights before and after a step are compared on a sample: so many elements in all, and at least so many of a tensor.
_SAMPLE = 1 << 16
_LEAST_OF_EACH = 256


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
        if len(self.indices) == count and not before:
            return self.norms
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
        self._dtype = torch.float64 if any(p.dtype == torch.float64 for p in self._compared) else torch.float32
        share = max(_LEAST_OF_EACH, _SAMPLE // max(1, len(self._compared)))
        local = [local_shard(p) for p in self._compared]
        self._strides = [_stride(t, share) for t in local]
        self._sizes = [math.ceil(t.numel() / stride) for t, stride in zip(local, self._strides, strict=True)]
        # An element stands for as many as its stride, so squares are extrapolated by factors on the elements.
        self._factors: Tensor | None = None
        if max(self._strides, default=1) > 1:
            each = torch.tensor(self._strides, dtype=self._dtype).sqrt()
            self._factors = each.repeat_interleave(torch.tensor(self._sizes)).to(local[0].device)
        # All compared weights as they were before the step; after it, their negative move.
        self._held: Tensor | None = None
        self._is_move = False
        self._gradients: Tensor | None = None  # the compared elements of them

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
            compared = [move] if self.layers is None else [move, weights]
            each = [_measure.norms(list(torch.split(t, self._sizes)), 2.0) for t in compared]
            values["moves"] = each[:1]
            if self._factors is not None and self._gradients is not None:
                values["seen"] = [_measure.norms(list(torch.split(self._gradients, self._sizes)), 2.0)]
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

    def unmoved(self, numbers: Numbers) -> list[int]:
        """Return the indices of the parameters that did not move.

        Of an embedding few rows move. A sample tells only where it has seen a gradient.
        """
        index = {id(p): i for i, p in enumerate(self.parameters)}
        moves = numbers.get("moves", [])
        tells = [stride == 1 for stride in self._strides]
        if "seen" in numbers:
            tells = [whole or seen != 0 for whole, seen in zip(tells, numbers["seen"], strict=True)]
        each = zip(self._compared, moves, tells, strict=bool(moves))
        return [index[id(p)] for p, move, tell in each if move == 0 and tell]

    def skip_step(self) -> None:
        """Note that a step is not measured."""
        self._held = None

    def _compare_with_move(self) -> Values:
        grads = [g for p in self._compared if (g := p.grad) is not None and g.layout is torch.strided]
        complete = len(grads) == len(self._compared)
        joined = self._gradients = self._joined(grads) if complete and grads else None
        if joined is None or self._held is None or not self._is_move:
            return {}
        if self.is_sharded:
            ours = -torch.dot(self._masked(self._held), joined)
            return {"cosine_sums": [ours, self._squared(self._held), self._squared(joined)]}
        return {"cosine": [-torch.dot(self._held, joined) / (_norm(joined) * _norm(self._held))]}

    def _squared(self, values: Tensor) -> Tensor:
        """Return the sum of squares of what this rank counts."""
        return _norm(self._masked(values)).square()

    def _masked(self, values: Tensor) -> Tensor:
        """Return joined values with 0 for what another rank counts."""
        parts = torch.split(values, self._sizes)
        return torch.cat([t if counts else torch.zeros_like(t) for t, counts in zip(parts, self._counted, strict=True)])

    @torch.no_grad()
    def _joined(self, tensors: list[Any]) -> Tensor:
        """Return the compared elements as one vector, so that its squares add up to about those of all elements."""
        local = tensors if self.plain else map(local_shard, tensors)
        sampled = zip(local, self._sizes, self._strides, strict=True)
        joined = torch.cat([_every(t, size, stride) for t, size, stride in sampled]).to(self._dtype)
        return joined if self._factors is None else joined.mul_(self._factors)


def _stride(t: Tensor, share: int) -> int:
    """Return the distance of compared elements: at most `share` of them, and not always in the same columns."""
    stride = max(1, math.ceil(t.numel() / share))
    while t.dim() and math.gcd(stride, t.shape[-1]) > 1:
        stride += 1
    return stride


def _every(t: Tensor, size: int, stride: int) -> Tensor:
    return t.as_strided((size,), (stride,)) if t.is_contiguous() else t.reshape(-1)[::stride]


def _norm(values: Tensor) -> Tensor:
    return _measure.norms([values], 2.0)[0]
