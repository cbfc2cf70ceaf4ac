"""The gradients of one call: measured when a policy asks, and only once for each kind of norm."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..errors import UnsupportedGradientError
from . import _measure
from ._groups import Groups, marks_of
from ._ranks import Ranks, absent, spans
from ._target import live_names, warn_raw_gradients

__all__ = ["Gradients", "measure_together"]


class Gradients:
    """Parameters that have a gradient, each once, with their gradients and, on request, their norms.

    A parameter that lies on several ranks is among them on all of these, also where one has no gradient of it.

    Attributes:
        parameters: the parameters.
        tensors: the gradient of each (empty where there is none on this rank).
        known_names: their names, or None where the target had none.
        target_names: the names of all parameters of the target, with a gradient or without.
        label: the name pattern that gathered them: what a policy with a memory remembers a whole group by.
        ranks: where their pieces are, or None where all of this is one process's own.
        local: what is on this rank of each, to be written to.
        values: what is on this rank of each, to be measured.
    """

    def __init__(
        self,
        parameters: list[Tensor],
        tensors: list[Tensor],
        known_names: list[str] | None = None,
        target_names: list[str] | None = None,
        ranks: Ranks | None = None,
        where: Sequence[int] = (),
        places: list[int] | None = None,
    ) -> None:
        self.parameters = parameters
        self.tensors = tensors
        self.known_names = known_names
        self.target_names = target_names
        self.label = "*"
        self._places = places
        self.ranks = ranks
        self.local = tensors if ranks is None else [ranks.local[i] for i in where]
        self.values = tensors if ranks is None else [ranks.values[i] for i in where]
        self._where = where
        self._norms: dict[float, Tensor] = {}
        self._summands: dict[float, Tensor] = {}
        self._totals: dict[float, Tensor] = {}

    @classmethod
    def of(
        cls,
        names: list[str] | None,
        parameters: list[Tensor],
        groups: Groups | None = None,
        call: Callable[[], str] = str,
    ) -> Gradients:
        """The gradients that parameters have."""
        found = [p.grad for p in parameters]
        if not any(g is not None for g in found):
            warn_raw_gradients(parameters)
        return cls.listed(names, parameters, found, groups, call)

    @classmethod
    def listed(
        cls,
        names: list[str] | None,
        parameters: list[Tensor],
        found: list[Tensor | None],
        groups: Groups | None = None,
        call: Callable[[], str] = str,
    ) -> Gradients:
        """These gradients of these parameters; `call` says what a rank was called with, for others to compare."""
        first = {id(g): i for i, g in reversed(list(enumerate(found))) if g is not None}
        kept = sorted(first.values())
        ranks = None
        if groups is not None or spans(parameters) or spans(found):
            patterns, pattern_of = marks_of(groups, names, len(parameters))
            kept = sorted([*kept, *absent(parameters, found, patterns, pattern_of)])
            numbers = [pattern_of[i] for i in kept]
            told = None if names is None else [names[i] for i in kept]
            ranks = Ranks([parameters[i] for i in kept], [found[i] for i in kept], patterns, numbers, told, call())
            found = [*found]
            for i, piece in zip(kept, ranks.local, strict=True):
                found[i] = piece if found[i] is None else found[i]
        grads = [g for g in [found[i] for i in kept] if g is not None]
        known = None if names is None else [names[i] for i in kept]
        names_tell = names is not None and len(set(names)) == len(names)
        places = None if names_tell else kept
        return cls([parameters[i] for i in kept], grads, known, names, ranks, range(len(kept)), places)

    def subset(self, where: Sequence[int], label: str = "*") -> Gradients:
        """Some of them."""
        names = None if self.known_names is None else [self.known_names[i] for i in where]
        parameters, tensors = [self.parameters[i] for i in where], [self.tensors[i] for i in where]
        places = None if self._places is None else [self._places[i] for i in where]
        inside = [] if self.ranks is None else [self._where[i] for i in where]
        part = Gradients(parameters, tensors, names, None, self.ranks, inside, places)
        part.label = label
        return part

    def names(self) -> list[str]:
        """A name for each: the target's own, else that of the live module that owns the parameter."""
        return live_names(self.parameters) if self.known_names is None else self.known_names

    def keys(self) -> list[str]:
        """What to remember each by from step to step: its name, its place in the target where names do not tell."""
        if self._places is None:
            return self.names()
        return [f"parameter {place}" for place in self._places]

    def norms(self, p: float = 2.0) -> Tensor:
        """The p-norm of each gradient, over all ranks: a float64 vector on the device of the first."""
        if p not in self._norms:
            measure_together([(self, p)])
        return self._norms[p]

    def summands(self, p: float = 2.0) -> Tensor:
        """A vector whose p-norm is that of all gradients: their norms, and what other ranks hold beside them."""
        if p not in self._norms:
            measure_together([(self, p)])
        return self._summands[p]

    def total(self, p: float = 2.0) -> Tensor:
        """The p-norm of all gradients as one vector: a 0-dim tensor."""
        if p not in self._totals:
            with torch.no_grad():
                self._totals[p] = _measure.total(self.summands(p), p)
        return self._totals[p]

    def sizes(self) -> list[int]:
        """How many elements each gradient has, over all ranks."""
        for k, i in enumerate(self._where if self.ranks is not None else ()):
            if self.ranks is not None and not self.ranks.size_known(i):
                raise UnsupportedGradientError(
                    f"{self.names()[k]} was said to be Sharded, and a plain tensor does not tell how many elements "
                    "the other ranks hold, which this policy divides by. Use a DTensor, or another policy for it."
                )
        return [p.numel() for p in self.parameters]

    def require_alone(self, policy: str) -> None:
        """Refuse other ranks that hold other gradients, for a policy that could not decide the same on all of them."""
        if self.ranks is not None and self.ranks.marked:
            raise UnsupportedGradientError(
                f"{policy} compares gradients with parameters, and `groups` says that other ranks hold other ones: "
                "each would decide for itself. Use a policy that looks at norms, such as by_median."
            )

    def require_whole(self, policy: str) -> None:
        """Refuse gradients that lie on several ranks, for a policy that looks inside them."""
        for k, i in enumerate(self._where if self.ranks is not None else ()):
            if self.ranks is not None and not self.ranks.whole(i):
                raise UnsupportedGradientError(
                    f"{policy} compares parts of a gradient, and that of {self.names()[k]} lies on several ranks. "
                    "Give such parameters another policy by a name pattern."
                )

    def count_nonfinite(self) -> Tensor:
        """How many values of each are NaN or infinite, over all ranks: a vector on the device of the first."""
        here = _measure.count_nonfinite(self.values)
        if self.ranks is None:
            return here
        return self.ranks.combine(here.to(torch.float64), self._where, [1.0] * len(here))

    def why_not_finite(self) -> str:
        """In words, where the norm is not finite and no gradient is known to hold such a value."""
        elsewhere = self.ranks is not None and self.ranks.marked
        return ("a gradient on another rank is not finite, or " if elsewhere else "") + _measure.TOO_LARGE

    def settle(self) -> None:
        """Make changes to `values` changes to `local`."""
        if self.ranks is not None:
            self.ranks.settle(self._where)

    def forget(self) -> None:
        """Measure again when asked next: the gradients have been changed."""
        self._norms.clear()
        self._summands.clear()
        self._totals.clear()

    def readable_now(self) -> bool:
        """Can values be read without waiting for a device?"""
        return _measure.readable_now(self.local)


def measure_together(held: Sequence[tuple[Gradients, float]]) -> None:
    """Measure parts of one call, each in its own norm, with one exchange between ranks for all of them."""
    ranks = held[0][0].ranks if held else None
    if ranks is None:
        for grads, p in held:
            grads._norms[p] = grads._summands[p] = _measure.norms(grads.tensors, p)
        return
    answers = ranks.measure([(grads._where, p) for grads, p in held])
    for (grads, p), (norms, summands) in zip(held, answers, strict=True):
        grads._norms[p], grads._summands[p] = norms, summands
