"""The gradients of one call: measured when a policy asks, once per order of the norm."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import copy

import torch
from torch import Tensor

from .. import _devices, _measure
from .._torch.storage import plain
from ..errors import NonFiniteGradientError
from .target.parameters import live_names


class Gradients:
    """Parameters that have a gradient, each once, with their gradients and norms: a `GradientView` for policies.

    Args:
        parameters: The parameters.
        tensors: The gradient of each.
        target_names: The names of all parameters of the target, with a gradient or without; None where it has none.
        where: Where these are among all parameters of the target; None where they are all.

    Attributes:
        local: What this process holds of each gradient, to be written to.
        values: The same, to be measured.
        where: As given.
        pattern: The name pattern that selected them: what a policy with a memory remembers a whole group by.
        is_split: Whether this process may hold only a part of some of them.
        has_others: Whether other processes may hold gradients that this one does not.
    """

    is_split = False
    has_others = False
    _lists: tuple[str, ...] = ("parameters", "tensors", "local", "values")  # with an entry for each gradient

    def __init__(
        self,
        parameters: list[Tensor],
        tensors: list[Tensor],
        target_names: list[str] | None = None,
        where: list[int] | None = None,
    ) -> None:
        self.parameters = parameters
        self.tensors = tensors
        self.target_names = target_names
        self.pattern = "*"
        self.local = tensors
        self.values = tensors
        self.where = where
        self._readable: bool | None = None
        self._norms: dict[float, tuple[Tensor, Tensor]] = {}
        self._totals: dict[float, Tensor] = {}

    def subset(self, where: Sequence[int], pattern: str) -> Gradients:
        """Return some of them, that a name pattern selects."""
        subset = copy(self)
        subset.pattern, subset.where, subset._readable = pattern, self._places(where), None
        subset._norms, subset._totals = {}, {}
        for name in self._lists:
            setattr(subset, name, [getattr(self, name)[i] for i in where])
        return subset

    def _places(self, where: Sequence[int]) -> list[int]:
        return [*where] if self.where is None else [self.where[i] for i in where]

    def names(self) -> list[str]:
        """Return a name for each: the target's own, else that of the live module that owns the parameter."""
        names = self.target_names
        if names is None:
            return live_names(self.parameters)
        return names if self.where is None else [names[i] for i in self.where]

    def keys(self) -> list[str]:
        """Return what to remember each by from step to step: its name, or its index where names are not unique."""
        if self.target_names is not None and len(set(self.target_names)) == len(self.target_names):
            return self.names()
        return [f"parameter {i}" for i in self._places(range(len(self.tensors)))]

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
            self.measure([(self, p)])
        return self._norms[p]

    def measure(self, several: Sequence[tuple[Gradients, float]]) -> None:
        """Measure gradients of this call, each in its own norm; where they are split, with one exchange for all."""
        each = [plain(_measure.norms(grads.values, p)) for grads, p in several]
        for (grads, p), whole in zip(several, self._whole(several, each), strict=True):
            grads._norms[p] = whole

    def _whole(self, several: Sequence[tuple[Gradients, float]], each: list[Tensor]) -> list[tuple[Tensor, Tensor]]:  # noqa: ARG002
        """Return for each of several the norms of whole gradients, given those of what is here, and `norm_terms`."""
        return [(norms, norms) for norms in each]

    def measure_total(self, p: float, foreach: bool | None, error_if_nonfinite: bool) -> tuple[Tensor, float | Tensor]:
        """Return the same where nothing else is asked, and the norm to compute with: see `_measure.total_norm`."""
        if foreach:
            _measure.check_foreach(self.local, foreach)
        norm, value = self._total(p, foreach)
        if error_if_nonfinite and not math.isfinite(value):
            raise self._nonfinite_total(p)
        return norm, value

    def _total(self, p: float, foreach: bool | None) -> tuple[Tensor, float | Tensor]:
        return _measure.total_norm(self.tensors, p, foreach)

    def _nonfinite_total(self, p: float) -> NonFiniteGradientError:
        counts = zip(self.names(), self.count_nonfinite()().tolist(), strict=True)
        offenders = {name: int(n) for name, n in counts if n}
        why = f"NaN or infinite values: {_measure.list_offenders(offenders)}" if offenders else self.why_not_finite()
        return NonFiniteGradientError(
            f"The total norm of order {p} for gradients from `parameters` is non-finite, so it cannot be clipped. To "
            "disable this error and scale the gradients by the non-finite norm anyway, set `error_if_nonfinite=False`."
            f"\n{why[0].upper()}{why[1:]}.",
            offenders,
        )

    def refuse_disjoint(self, policy: str) -> None:
        """Raise if other processes hold other parameters, for a policy that each would decide for itself."""

    def refuse_partial(self, policy: str) -> None:
        """Raise if this process holds a summand of a gradient, for policies that change single elements."""

    def weights(self) -> list[Tensor]:
        """Return what this process holds of each parameter."""
        return [p.detach() for p in self.parameters]

    def combined(self, each: Tensor, p: float = 1.0) -> Tensor:  # noqa: ARG002
        """Return what values of the part of each gradient here come to: a p-norm; of order 1, a sum."""
        return each

    def combined_slices(self, slices: Sequence[Tensor], dims: Sequence[set[int]]) -> list[Tensor]:  # noqa: ARG002
        """Return the 2-norms of slices along some dimensions of each gradient, given those of the part here."""
        return [*slices]

    def count_nonfinite(self, *, later: bool = False) -> Callable[[], Tensor]:
        """Return a function that says how many values of each whole gradient are NaN or infinite now.

        Args:
            later: Count when it is called.
        """
        if later:
            return _measure.count_nonfinite_later(self.values)
        counts = _measure.count_nonfinite(self.values)
        return lambda: counts

    def why_not_finite(self) -> str:
        """Explain a norm that is not finite where no gradient is known to hold such a value."""
        return _measure.TOO_LARGE

    def invalidate(self) -> None:
        """Measure again when asked next: the gradients have been changed."""
        self._norms.clear()
        self._totals.clear()

    def readable_now(self) -> bool:
        """Return whether values can be read without waiting for a device."""
        if self._readable is None:
            self._readable = _devices.readable_now(self.local)
        return self._readable
