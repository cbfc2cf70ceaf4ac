"""What adaptive policies share: warm-up, bounds, a memory that no bad step spoils, checkpoints."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from .._measure import clip_factor
from .._validate import count, floor_and_ceiling, norm_order
from .base import GradientView, Scale
from .elements import ElementMemory
from .state import LearningPolicy, State, StateRows, accepted, is_good


@dataclass(frozen=True)
class Bounds:
    """Warm-up, floor and ceiling for the rows of one call.

    Attributes:
        warm: Which rows are still in warm-up.
        floor: The smallest limit.
        ceiling: The largest limit, and the limit during warm-up.

    Examples:
        >>> from gradrein.policies import Bounds
        >>> Bounds(warm=torch.tensor([False, True]), floor=1.0, ceiling=5.0).clamp(torch.tensor([0.5, 2.0]))
        tensor([1., 5.])

    See Also:
        [`gradrein.policies.AdaptivePolicy`][]
    """

    warm: Tensor
    floor: float
    ceiling: float

    def clamp(self, limit: Tensor) -> Tensor:
        """Return the limit within bounds; the ceiling during warm-up and where the limit is unknown (NaN)."""
        inside = limit if self.floor == 0 and self.ceiling == math.inf else limit.clamp(self.floor, self.ceiling)
        return inside.nan_to_num(self.ceiling, math.inf, 0.0).masked_fill_(self.warm, self.ceiling)


@dataclass(eq=False, kw_only=True)
class AdaptivePolicy(LearningPolicy):
    """Base class of policies that limit a norm by the norms they have seen. Subclass it and write `init` and `update`.

    Norms that are zero, infinite or NaN do not change the state. The state is on the device of the gradients, and
    nothing is read from the device.

    Args:
        per_parameter: Keep statistics of each gradient separately instead of their total norm.
        warmup: The number of norms to see before clipping by them, at least one; until then only `ceiling` applies.
        floor: A norm below this is never clipped.
        ceiling: A norm above this is always clipped.
        p: The order of the norm.

    Raises:
        ArgumentError: (a ValueError) A setting is out of range.

    Examples:
        >>> from gradrein.policies import AdaptivePolicy
        >>> class ByLargest(AdaptivePolicy):
        ...     def init(self):
        ...         return {"largest": torch.zeros((), dtype=torch.float64)}
        ...
        ...     def update(self, state, norm, bounds):
        ...         limit = bounds.clamp(state["largest"])
        ...         return limit, {"largest": torch.maximum(state["largest"], torch.minimum(norm, limit))}
        >>> policy, weight = ByLargest(warmup=2), torch.nn.Parameter(torch.zeros(1))
        >>> for size in (1.0, 3.0, 9.0):
        ...     weight.grad = torch.tensor([size])
        ...     report = gradrein.clip_([weight], policy)
        >>> report.norm, report.norm_after
        (9.0, 3.0)

    See Also:
        [`gradrein.policies.Policy`][], [`gradrein.policies.Bounds`][], [`gradrein.policies.ByMedian`][]
    """

    per_parameter: bool = False
    warmup: int = 0
    floor: float = 0.0
    ceiling: float = math.inf
    p: float = 2.0

    def __post_init__(self) -> None:
        """Validate the arguments."""
        self.warmup = count(self.warmup, "warmup", 0)
        self.floor, self.ceiling = floor_and_ceiling(self.floor, self.ceiling)
        self.p = norm_order(self.p)

    @abstractmethod
    def init(self) -> State:
        """Return one row of the initial state."""

    @abstractmethod
    def update(self, state: State, norm: Tensor, bounds: Bounds) -> tuple[Tensor, State]:
        """Return the limit of each row, within bounds, and the next state, assuming that the norm is valid."""

    def _may_overflow(self, grads: GradientView) -> bool:  # noqa: ARG002  # what others write is not known
        """Return whether a good norm may give a statistic that is not finite."""
        return True

    def _new_memory(self) -> dict[str, StateRows | ElementMemory]:
        return {"rows": StateRows(self.init())}

    def decide(self, grads: GradientView) -> Scale:
        """Reduce the norm to the limit, and update the state."""
        with torch.no_grad():
            keys = grads.keys() if self.per_parameter else [grads.pattern]
            norm = grads.norms(self.p) if self.per_parameter else grads.total_norm(self.p).reshape(1)
            rows: StateRows = self._memory["rows"]
            state = rows.read(keys, norm)
            bounds = Bounds(state["seen"] < max(1, self.warmup), self.floor, self.ceiling)
            limit, after = self.update(state, norm, bounds)
            rows.write(keys, accepted(state, after, is_good(norm), guarded=self._may_overflow(grads)))
            factor = clip_factor(limit, norm)
            return Scale(factor if self.per_parameter else factor.reshape(()))
