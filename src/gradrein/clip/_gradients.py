"""The gradients of one call: measured when a policy asks, once per order of the norm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import _devices, _measure
from .._torch.storage import plain
from ..errors import UnsupportedGradientError
from ._apply import writing
from .target.parameters import live_names

if TYPE_CHECKING:
    from ._gate import Parts

_UNNAMED: dict[int, str] = {}  # to make them takes four times as long as to look them up; the same in any thread


def _unnamed(indices: Sequence[int]) -> list[str]:
    """Return what parameters without unique names are remembered by."""
    if torch.compiler.is_compiling():  # what is traced changes nothing outside
        return [f"parameter {i}" for i in indices]
    try:
        return [_UNNAMED[i] for i in indices]
    except KeyError:
        _UNNAMED.update((i, f"parameter {i}") for i in indices)
        return [_UNNAMED[i] for i in indices]


class Gradients:
    """Parameters that have a gradient, each once, with their gradients and norms: a `GradientView` for policies.

    Args:
        parameters: The parameters.
        tensors: The gradient of each.
        target_names: The names of all parameters of the target, with a gradient or without; None where it has none.
        where: Where these are among all parameters of the target; None where they are all.
        parts: What this process holds of gradients that are split; None where it holds all of them.

    Attributes:
        local: What this process holds of each gradient, to be written to.
        values: The same, to be measured.
        pattern: The name pattern that selected them: what a policy with a memory remembers a whole group by.
    """

    def __init__(
        self,
        parameters: list[Tensor],
        tensors: list[Tensor],
        target_names: list[str] | None = None,
        where: list[int] | None = None,
        parts: Parts | None = None,
    ) -> None:
        self.parameters = parameters
        self.tensors = tensors
        self.target_names = target_names
        self.pattern = "*"
        self.local = tensors if parts is None else parts.local
        self.values = tensors if parts is None else parts.values
        self._where = where
        self._parts = parts
        self._inside: Sequence[int] = range(len(tensors))
        self._readable: bool | None = None
        self._norms: dict[float, tuple[Tensor, Tensor]] = {}
        self._totals: dict[float, Tensor] = {}

    def subset(self, where: Sequence[int], pattern: str) -> Gradients:
        """Return some of them, that a name pattern selects."""
        indices = where if self._where is None else [self._where[i] for i in where]
        parameters, tensors = [self.parameters[i] for i in where], [self.tensors[i] for i in where]
        part = Gradients(parameters, tensors, self.target_names, [*indices])
        part.pattern, part._parts, part._inside = pattern, self._parts, [*where]
        part.local, part.values = [self.local[i] for i in where], [self.values[i] for i in where]
        return part

    @property
    def known_names(self) -> list[str] | None:
        """The name of each, or None where the target had none."""
        names = self.target_names
        return names if names is None or self._where is None else [names[i] for i in self._where]

    @property
    def is_split(self) -> bool:
        """Whether this process may hold only a part of some of them."""
        return self._parts is not None

    @property
    def has_others(self) -> bool:
        """Whether other processes may hold gradients that this one does not."""
        return self._parts is not None and self._parts.others

    def names(self) -> list[str]:
        """Return a name for each: the target's own, else that of the live module that owns the parameter."""
        names = self.known_names
        return live_names(self.parameters) if names is None else names

    def keys(self) -> list[str]:
        """Return what to remember each by from step to step: its name, or its index where names are not unique."""
        if self.target_names is not None and len(set(self.target_names)) == len(self.target_names):
            return self.names()
        return _unnamed(range(len(self.tensors)) if self._where is None else self._where)

    def norms(self, p: float = 2.0) -> Tensor:
        """Return the p-norm of each whole gradient: a float64 vector on the device of the first."""
        return self._measured(p)[0]

    def norm_terms(self, p: float = 2.0) -> Tensor:
        """Return a vector whose p-norm is that of all gradients: their norms, and what other processes contribute."""
        return self._measured(p)[1]

    def total_norm(self, p: float = 2.0) -> Tensor:
        """Return the p-norm of all gradients as one vector: a 0-dim tensor."""
        if p not in self._totals:
            rescale = self.readable_now() or _measure.needs_rescaling(self.tensors, p)
            with torch.no_grad():
                self._totals[p] = _measure.total(self.norm_terms(p), p, rescale=rescale)
        return self._totals[p]

    def _measured(self, p: float) -> tuple[Tensor, Tensor]:
        if p not in self._norms:
            measure_together([(self, p)])
        return self._norms[p]

    def measure_total(self, p: float, foreach: bool | None) -> tuple[Tensor, float | Tensor]:
        """Return the same where nothing else is asked, and the norm to compute with: see `_measure.total_norm`."""
        if self._parts is None:
            return _measure.total_norm(self.tensors, p, foreach) if self.tensors else (torch.tensor(0.0), 0.0)
        norm = self._parts.total(p, foreach)
        value = norm.item() if self.readable_now() else None
        return norm.to(_measure.dtype_of_norm(self._parts.double, value)), norm if value is None else value

    def numels(self) -> list[int]:
        """Return how many elements each whole gradient has."""
        self._refuse_plain_shards("this policy divides by the number of elements of the whole")
        return [p.numel() for p in self.parameters]

    def refuse_plain_shards(self, policy: str) -> None:
        """Raise if a gradient is a shard in a plain tensor, for a policy that looks inside gradients."""
        self._refuse_plain_shards(f"{policy} compares parts of a gradient")

    def _refuse_plain_shards(self, why: str) -> None:
        for name, i in zip(self.names(), self._inside, strict=True) if self._parts is not None else ():
            if self._parts is not None and self._parts.is_plain_shard(i):
                raise UnsupportedGradientError(
                    f"{name} is Sharded by `placement`, and {why}: a plain tensor does not know which part of the "
                    "whole it is. Use a DTensor, or by_norm for it."
                )

    def refuse_disjoint(self, policy: str) -> None:
        """Raise if other processes hold other parameters, for a policy that each would decide for itself."""
        if self.has_others:
            raise UnsupportedGradientError(
                f"{policy} compares gradients with parameters, and `placement` says that ranks hold different "
                "parameters: each rank would decide for itself. Use a policy that uses norms only, such as ByMedian."
            )

    def refuse_shared_elements(self) -> None:
        """Raise if a summand cannot hold what it is reduced to, for policies that change single elements."""
        for name, i in zip(self.names(), self._inside, strict=True) if self._parts is not None else ():
            if self._parts is not None and self._parts.cannot_hold(i):
                t = self._parts.local[i]
                raise UnsupportedGradientError(
                    f"{name} is partial, and this rank stores several of its elements in the same memory, as an "
                    f"expanded tensor does (shape {tuple(t.shape)}, strides {t.stride()}). Clone it first."
                )

    def weights(self) -> list[Tensor]:
        """Return what this process holds of each parameter."""
        if self._parts is None:
            return [p.detach() for p in self.parameters]
        return [self._parts.weight(i, p) for i, p in zip(self._inside, self.parameters, strict=True)]

    def combined(self, each: Tensor, p: float = 1.0) -> Tensor:
        """Return what values of the part of each gradient here come to: a p-norm; of order 1, a sum."""
        return each if self._parts is None else self._parts.combine(each, self._inside, p)

    def combined_slices(self, slices: Sequence[Tensor], dims: Sequence[set[int]]) -> list[Tensor]:
        """Return the 2-norms of slices along some dimensions of each gradient, given those of the part here."""
        return [*slices] if self._parts is None else self._parts.combine_slices(slices, self._inside, dims)

    def count_nonfinite(self, *, later: bool = False) -> Callable[[], Tensor]:
        """Return a function that says how many values of each whole gradient are NaN or infinite now.

        Args:
            later: Count when it is called; on several ranks, which have to count together, they count now.
        """
        if self._parts is None and later:
            return _measure.count_nonfinite_later(self.values)
        counts = _measure.count_nonfinite(self.values)
        if self._parts is not None:  # of copies it is the mean: one that is not finite in some of them counts too
            counts = (self._parts.combine(counts.to(torch.float64), self._inside, 1.0) - 1e-6).ceil()
        return lambda: counts

    def why_not_finite(self) -> str:
        """Explain a norm that is not finite where no gradient is known to hold such a value."""
        elsewhere = "a gradient on another rank is not finite, or " if self._parts is not None else ""
        return elsewhere + _measure.TOO_LARGE

    def write_back(self) -> None:
        """Make changes to `values` changes to `local`."""
        if self._parts is not None:
            with writing(self.local):
                self._parts.write_back(self._inside)

    def invalidate(self) -> None:
        """Measure again when asked next: the gradients have been changed."""
        self._norms.clear()
        self._totals.clear()

    def readable_now(self) -> bool:
        """Return whether values can be read without waiting for a device."""
        if self._readable is None:
            self._readable = _devices.readable_now(self.local)
        return self._readable


def measure_together(parts: Sequence[tuple[Gradients, float]]) -> None:
    """Measure gradients of one call, each in its own norm, with one exchange for all of them."""
    whole = parts[0][0]._parts if parts else None
    if whole is None:
        for grads, p in parts:
            norms = plain(_measure.norms(grads.tensors, p))
            grads._norms[p] = norms, norms
        return
    measured_parts = whole.measure([(grads._inside, p) for grads, p in parts])
    for (grads, p), measured in zip(parts, measured_parts, strict=True):
        grads._norms[p] = measured


def require_same_places(parts: Sequence[Gradients]) -> None:
    """Raise where copies hold NaN or infinite values in different places: zeroing would leave copies that differ."""
    whole = parts[0]._parts if parts else None
    if whole is not None and all(grads.readable_now() for grads in parts):
        whole.require_same_places([i for grads in parts for i in grads._inside])
