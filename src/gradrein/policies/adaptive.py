"""What adaptive policies share: warm-up, bounds, a memory that no bad step spoils, checkpoints."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from .._measure import clip_factor_or_one
from .._validate import count, floor_and_ceiling, norm_order
from .base import GradientView, Scale
from .elements import ElementMemory
from .state import LearningPolicy, State, StateRows, accepted, finite


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
        ...     def update(self, state, norm, warm):
        ...         limit = self.bounded(state["largest"], warm)
        ...         return limit, {"largest": torch.maximum(state["largest"], torch.minimum(norm, limit))}
        >>> policy, weight = ByLargest(warmup=2), torch.nn.Parameter(torch.zeros(1))
        >>> for size in (1.0, 3.0, 9.0):
        ...     weight.grad = torch.tensor([size])
        ...     report = gradrein.clip_([weight], policy)
        >>> report.norm, report.norm_after
        (9.0, 3.0)

    See Also:
        [`gradrein.policies.Policy`][], [`gradrein.policies.ByMedian`][]
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
    def update(self, state: State, norm: Tensor, warm: Tensor) -> tuple[Tensor, State]:
        """Return the limit of each row, `bounded`, and the next state, assuming that the norm is valid.

        Args:
            state: The rows.
            norm: The norm of each; NaN where it is not finite.
            warm: Which rows are still in warm-up.
        """

    def bounded(self, limit: Tensor, warm: Tensor) -> Tensor:
        """Return a limit within floor and ceiling; the ceiling during warm-up and where it is unknown (NaN)."""
        inside = limit if self.floor == 0 and self.ceiling == math.inf else limit.clamp(self.floor, self.ceiling)
        return inside.nan_to_num(self.ceiling, math.inf, 0.0).masked_fill_(warm, self.ceiling)

    def _may_overflow(self, grads: GradientView) -> bool:  # noqa: ARG002  # what others write is not known
        """Return whether a good norm may give a statistic that is not finite."""
        return True

    def _new_memory(self) -> dict[str, StateRows | ElementMemory]:
        return {"rows": StateRows(self.init())}

    def decide(self, grads: GradientView) -> Scale:
        """Reduce the norm to the limit, and update the state."""
        with torch.no_grad():
            keys = grads.keys() if self.per_parameter else [grads.pattern]
            norm = finite(grads.norms(self.p) if self.per_parameter else grads.total_norm(self.p).reshape(1))
            rows: StateRows = self._memory["rows"]
            state = rows.read(keys, norm)
            limit, after = self.update(state, norm, state["seen"] < max(1, self.warmup))
            rows.write(keys, accepted(state, after, norm > 0, guarded=self._may_overflow(grads)))
            factor = clip_factor_or_one(limit, norm)
            return Scale(factor if self.per_parameter else factor.reshape(()))
