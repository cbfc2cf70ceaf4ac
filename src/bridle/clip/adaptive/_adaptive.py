"""What all adaptive policies share: memory, warm-up, floor and ceiling, and statistics no bad step can spoil."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from ...errors import ArgumentError
from .._check import number, order
from .._decision import Scale, down_to
from .._gradients import Gradients
from ._memory import Memory, State, check_kind, learned

__all__ = ["Adaptive", "Bounds", "Rule", "count"]


@dataclass(frozen=True)
class Bounds:
    """Floor, ceiling and warm-up, for the rows at hand.

    Attributes:
        warm: which rows have not yet seen enough.
        floor: the least a limit may be.
        ceiling: the most a limit may be, and what it is during warm-up.
    """

    warm: Tensor
    floor: float
    ceiling: float

    def hold(self, limit: Tensor) -> Tensor:
        """The limit within bounds; one that is not known yet (NaN) is the ceiling."""
        known = torch.isnan(limit).logical_not() & self.warm.logical_not()
        return torch.where(known, limit.clamp(self.floor, self.ceiling), self.ceiling)


class Rule(Protocol):
    """How one policy gets its limit: a value without state, so that the formula stands alone.

    Attributes:
        kind: the name of the policy, which its saved state carries.
        replaces: whether the limit is what the norm becomes, larger or smaller, rather than the most it may be.
    """

    kind: ClassVar[str]
    replaces: ClassVar[bool]

    def blank(self) -> dict[str, Tensor]:
        """A row of the state before anything was seen."""

    def step(self, state: State, norm: Tensor, bounds: Bounds) -> tuple[Tensor, dict[str, Tensor]]:
        """The limit of each row, within bounds, and the next state as if the norm were a good one."""


class Adaptive:
    """A policy with a memory: a limit on norms that follows the norms it has seen.

    Norms that are zero, infinite or NaN are not learned from. The state lives where the gradients do, and
    nothing is read from there.
    """

    def __init__(
        self,
        rule: Rule,
        *,
        each: bool = False,
        warmup: int = 0,
        floor: float = 0.0,
        ceiling: float = math.inf,
        p: float | str = 2.0,
    ) -> None:
        self.rule = rule
        self.each = each
        self.warmup = count(warmup, "warmup", 0)
        self.floor, self.ceiling = number(floor, "floor"), number(ceiling, "ceiling")
        if self.floor > self.ceiling:
            raise ArgumentError(f"`floor` is {self.floor:g} and `ceiling` {self.ceiling:g}; swap them.")
        self._p = order(p)
        self._memory = Memory(rule.blank())

    @property
    def p(self) -> float:
        """The order of the norm it looks at."""
        return self._p

    def decide(self, grads: Gradients) -> Scale:
        """Bring the norm down to the limit, and learn from it."""
        with torch.no_grad():
            keys = grads.keys() if self.each else [grads.label]
            norm = grads.norms(self.p) if self.each else grads.total(self.p).reshape(1)
            state = self._memory.recall(keys, norm)
            bounds = Bounds(state["seen"] < self.warmup, self.floor, self.ceiling)
            limit, after = self.rule.step(state, norm, bounds)
            good = (norm > 0) & (norm < math.inf)
            self._memory.keep(keys, learned(state, after, good))
            if self.rule.replaces:
                most = torch.finfo(norm.dtype).max  # times what is smaller than its inverse would be infinite
                factor = torch.where(good & torch.isfinite(limit), (limit / norm).clamp(max=most), 1.0)
            else:
                factor = down_to(limit, norm)
            return Scale(factor if self.each else factor.reshape(()))

    def state_dict(self) -> dict[str, Any]:
        """What it has learned, for a checkpoint: loads with `torch.load(..., weights_only=True)`."""
        return {"policy": self.rule.kind, **self._memory.state_dict()}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on from a checkpoint. The policy has to be built with the same settings.

        Raises:
            ArgumentError: (a ValueError) the state of another policy, or of one with other settings.
        """
        check_kind(saved, self.rule.kind)
        self._memory.load_state_dict(saved)

    def __repr__(self) -> str:
        return f"<{self.rule} each={self.each} warmup={self.warmup} floor={self.floor:g} ceiling={self.ceiling:g}>"


def count(value: int, name: str, least: int = 1) -> int:
    """A whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ArgumentError(f"`{name}` is a whole number of at least {least}; found {value!r:.80}.")
    return value
