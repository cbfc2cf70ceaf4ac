"""The gradients of one call: measured when a policy asks, and only once for each kind of norm."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import _measure
from ._target import Target, live_names, named, warn_raw_gradients

__all__ = ["Gradients"]


class Gradients:
    """Parameters that have a gradient, each once, with their gradients and, on request, their norms.

    Attributes:
        parameters: the parameters.
        tensors: the gradient of each.
        known_names: their names, or None where the target had none.
        target_names: the names of all parameters of the target, with a gradient or without.
        label: the name pattern that gathered them: what a policy with a memory remembers a whole group by.
    """

    def __init__(
        self,
        parameters: list[Tensor],
        tensors: list[Tensor],
        known_names: list[str] | None = None,
        target_names: list[str] | None = None,
        places: list[int] | None = None,
    ) -> None:
        self.parameters = parameters
        self.tensors = tensors
        self.known_names = known_names
        self.target_names = target_names
        self.label = "*"
        self._places = places
        self._norms: dict[float, Tensor] = {}

    @classmethod
    def of(cls, target: Target) -> Gradients:
        """The gradients of whatever was passed to `clip_`."""
        names, parameters = named(target)
        found = [p.grad for p in parameters]
        first = {id(g): i for i, g in reversed(list(enumerate(found))) if g is not None}
        kept = sorted(first.values())
        if not kept:
            warn_raw_gradients(parameters)
        grads = [g for g in [found[i] for i in kept] if g is not None]
        known = None if names is None else [names[i] for i in kept]
        names_tell = names is not None and len(set(names)) == len(names)
        return cls([parameters[i] for i in kept], grads, known, names, None if names_tell else kept)

    def subset(self, where: Sequence[int], label: str = "*") -> Gradients:
        """Some of them."""
        names = None if self.known_names is None else [self.known_names[i] for i in where]
        places = None if self._places is None else [self._places[i] for i in where]
        part = Gradients([self.parameters[i] for i in where], [self.tensors[i] for i in where], names, places=places)
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
        """The p-norm of each gradient: a float64 vector on the device of the first."""
        if p not in self._norms:
            self._norms[p] = _measure.norms(self.tensors, p)
        return self._norms[p]

    def total(self, p: float = 2.0) -> Tensor:
        """The p-norm of all gradients as one vector: a 0-dim tensor."""
        with torch.no_grad():
            return _measure.total(self.norms(p), p)

    def forget(self) -> None:
        """Measure again when asked next: the gradients have been changed."""
        self._norms.clear()

    def readable_now(self) -> bool:
        """Can values be read without waiting for a device?"""
        return _measure.readable_now(self.tensors)
