"""The gradients of one call: measured when a policy asks, once per order of the norm."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import _devices, _measure
from .._torch.storage import plain
from ..errors import NonFiniteGradientError, UnsupportedGradientError
from .target.parameters import live_names

if TYPE_CHECKING:
    from ._gate import RankShare


class Gradients:
    """Parameters that have a gradient, each once, with their gradients and norms: a `GradientView` for policies.

    Args:
        parameters: The parameters.
        tensors: The gradient of each.
        target_names: The names of all parameters of the target, with a gradient or without; None where it has none.
        where: Where these are among all parameters of the target; None where they are all.
        share: What this process holds of gradients that are split; None where it holds all of them.

    Attributes:
        local: What this process holds of each gradient, to be written to.
        values: The same, to be measured.
        where: As given.
        pattern: The name pattern that selected them: what a policy with a memory remembers a whole group by.
    """

    def __init__(
        self,
        parameters: list[Tensor],
        tensors: list[Tensor],
        target_names: list[str] | None = None,
        where: list[int] | None = None,
        share: RankShare | None = None,
    ) -> None:
        self.parameters = parameters
        self.tensors = tensors
        self.target_names = target_names
        self.pattern = "*"
        self.local = tensors if share is None else share.local
        self.values = tensors if share is None else share.values
        self.where = where
        self._share = share
        self._readable: bool | None = None
        self._norms: dict[float, tuple[Tensor, Tensor]] = {}
        self._totals: dict[float, Tensor] = {}

    def subset(self, where: Sequence[int], pattern: str) -> Gradients:
        """Return some of them, that a name pattern selects."""
        indices = [*where] if self.where is None else [self.where[i] for i in where]
        parameters, tensors = [self.parameters[i] for i in where], [self.tensors[i] for i in where]
        share = None if self._share is None else self._share.subset(where)
        subset = Gradients(parameters, tensors, self.target_names, indices, share)
        subset.pattern = pattern
        return subset

    @property
    def known_names(self) -> list[str] | None:
        """The name of each, or None where the target had none."""
        names = self.target_names
        return names if names is None or self.where is None else [names[i] for i in self.where]

    @property
    def is_split(self) -> bool:
        """Whether this process may hold only a part of some of them."""
        return self._share is not None

    @property
    def has_others(self) -> bool:
        """Whether other processes may hold gradients that this one does not."""
        return self._share is not None and bool(self._share.stages)

    def names(self) -> list[str]:
        """Return a name for each: the target's own, else that of the live module that owns the parameter."""
        names = self.known_names
        return live_names(self.parameters) if names is None else names

    def keys(self) -> list[str]:
        """Return what to remember each by from step to step: its name, or its index where names are not unique."""
        if self.target_names is not None and len(set(self.target_names)) == len(self.target_names):
            return self.names()
        return [f"parameter {i}" for i in (range(len(self.tensors)) if self.where is None else self.where)]

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

    def measure_total(self, p: float, foreach: bool | None, error_if_nonfinite: bool) -> tuple[Tensor, float | Tensor]:
        """Return the same where nothing else is asked, and the norm to compute with: see `_measure.total_norm`."""
        if foreach:
            _measure.check_foreach(self.local, foreach)
        norm: Tensor
        value: float | Tensor
        if self._share is not None:
            total = self._share.total(p, foreach)
            value = total.item() if self.readable_now() else total
            number = value if isinstance(value, float) else None
            norm = total.to(_measure.dtype_of_norm(self._share.double, number))
        elif self.tensors:
            norm, value = _measure.total_norm(self.tensors, p, foreach)
        else:
            norm, value = torch.tensor(0.0), 0.0
        if error_if_nonfinite and not math.isfinite(value):
            raise self._nonfinite_total(p)
        return norm, value

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
        if self.has_others:
            raise UnsupportedGradientError(
                f"{policy} compares gradients with parameters, and `placement` says that ranks hold different "
                "parameters: each rank would decide for itself. Use a policy that uses norms only, such as ByMedian."
            )

    def refuse_partial(self, policy: str) -> None:
        """Raise if this process holds a summand of a gradient, for policies that change single elements."""
        for i in self._share.partial if self._share is not None else ():
            raise UnsupportedGradientError(
                f"{self.names()[i]} is partial: other ranks hold summands of its elements, which {policy} looks at one "
                "by one. Redistribute it before clipping: `grad.redistribute(placements=parameter.placements)`."
            )

    def weights(self) -> list[Tensor]:
        """Return what this process holds of each parameter."""
        return [p.detach() for p in self.parameters] if self._share is None else self._share.weights(self.parameters)

    def combined(self, each: Tensor, p: float = 1.0) -> Tensor:
        """Return what values of the part of each gradient here come to: a p-norm; of order 1, a sum."""
        return each if self._share is None else self._share.combine(each, p)

    def combined_slices(self, slices: Sequence[Tensor], dims: Sequence[set[int]]) -> list[Tensor]:
        """Return the 2-norms of slices along some dimensions of each gradient, given those of the part here."""
        return [*slices] if self._share is None else self._share.combine_slices(slices, dims)

    def count_nonfinite(self, *, later: bool = False) -> Callable[[], Tensor]:
        """Return a function that says how many values of each whole gradient are NaN or infinite now.

        Args:
            later: Count when it is called; on several ranks, which have to count together, they count now.
        """
        if self._share is None and later:
            return _measure.count_nonfinite_later(self.values)
        counts = _measure.count_nonfinite(self.values)
        if self._share is not None:  # of copies it is the mean: one that is not finite in some of them counts too
            counts = (self._share.combine(counts.to(torch.float64), 1.0) - 1e-6).ceil()
        return lambda: counts

    def why_not_finite(self) -> str:
        """Explain a norm that is not finite where no gradient is known to hold such a value."""
        elsewhere = "a gradient on another rank is not finite, or " if self._share is not None else ""
        return elsewhere + _measure.TOO_LARGE

    def invalidate(self) -> None:
        """Measure again when asked next: the gradients have been changed."""
        self._norms.clear()
        self._totals.clear()

    def readable_now(self) -> bool:
        """Return whether values can be read without waiting for a device."""
        if self._readable is None:
            self._readable = _devices.readable_now(self.local)
        return self._readable


def measure_together(several: Sequence[tuple[Gradients, float]]) -> None:
    """Measure gradients of one call, each in its own norm, with one exchange for all of them."""
    split = [(grads._share, p) for grads, p in several if grads._share is not None]
    if split:
        measured = split[0][0].measure(split)
    else:
        measured = [(norms, norms) for norms in (plain(_measure.norms(grads.tensors, p)) for grads, p in several)]
    for (grads, p), norms in zip(several, measured, strict=True):
        grads._norms[p] = norms
