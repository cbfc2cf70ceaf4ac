"""What a policy is, and what it can decide."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from ._gradients import Gradients

__all__ = ["Clamp", "Decision", "Policy", "Scale", "Skip", "Stateful", "check", "down_to"]


@dataclass(frozen=True)
class Scale:
    """Multiply the gradients.

    Attributes:
        by: one factor for all (0-dim), one for each (a vector), or for each a tensor that broadcasts over it.
    """

    by: Tensor | Sequence[Tensor]


@dataclass(frozen=True)
class Clamp:
    """Limit every element to [-limit, limit].

    Attributes:
        limit: one for all, or for each gradient a tensor of its shape.
    """

    limit: float | Tensor | Sequence[Tensor]


@dataclass(frozen=True)
class Skip:
    """Set the gradients to zero if `when` (0-dim, bool) is true; otherwise do something else."""

    when: Tensor
    otherwise: Scale | Clamp


Decision: TypeAlias = Scale | Clamp | Skip


@runtime_checkable
class Policy(Protocol):
    """A rule for clipping: a value that looks at gradients and decides what becomes of them.

    It may also have a method `check(grads)` that raises for what it cannot decide about. All policies of a call are
    asked that before any of them decides, and so before anything is learned or written.

    Attributes:
        p: the order of the norm it looks at; what the report shows, and where non-finite values are looked for.
    """

    @property
    def p(self) -> float:
        """The order of the norm it looks at."""

    def decide(self, grads: Gradients) -> Decision:
        """Decide, without touching a gradient and without reading a value from a device. It may remember."""


@runtime_checkable
class Stateful(Policy, Protocol):
    """A policy with a memory."""

    def state_dict(self) -> dict[str, Any]:
        """What it has learned."""

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on from what was learned."""


def check(policy: Policy | None, grads: Gradients) -> None:
    """Let a policy refuse gradients that it cannot decide about."""
    refuse = getattr(policy, "check", None)
    if refuse is not None:
        refuse(grads)


def down_to(limit: float | Tensor, norm: Tensor) -> Tensor:
    """The factor that brings a norm down to a limit: exactly 1 under it, and 1 where the norm is not finite."""
    # Not a number over a tensor: torch makes that a reciprocal, which a tiny norm makes infinite.
    ceiling = limit.to(norm) if isinstance(limit, Tensor) else norm.new_full((), limit)
    factor = ceiling / norm
    # What is too small for all its digits is rounded down, so that the norm after is not above the limit.
    tiny = torch.finfo(norm.dtype).tiny
    factor = torch.where(factor < tiny, torch.nextafter(factor, torch.zeros_like(factor)), factor)
    return torch.where((norm > ceiling) & (norm < math.inf), factor, 1.0)
