import math
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from .._validate import number
from .adaptive import AdaptivePolicy
from .base import GradientView
from .state import State


@dataclass(eq=False)
class ByRunningNorm(AdaptivePolicy):
    """Clip each gradient to `k` times the running average of its own norms.

    `limit = k s`, with `s <- decay s + (1 - decay) clipped norm`; during warm-up s is the smallest norm so far. A norm
    can grow by at most `1 + (1 - decay)(k - 1)` per step, so a gradient that was tiny once during warm-up stays small
    for long: a `floor` prevents that. Wang et al., AdaGC (arXiv 2502.11034). The paper clips by the total norm during
    warm-up; this policy clips each gradient by `ceiling`. For further arguments see `AdaptivePolicy`.

    Args:
        k: The limit as a multiple of the average.
        decay: The fraction of the old average that a step keeps.

    Raises:
        ArgumentError: (a ValueError) A setting is out of range.

    Examples:
        >>> policy = gradrein.policies.ByRunningNorm(warmup=3)
        >>> calm, wild = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))
        >>> for size in (1.0, 1.0, 1.0, 40.0):
        ...     calm.grad, wild.grad = torch.tensor([1.0]), torch.tensor([size])
        ...     report = gradrein.clip_({"calm": calm, "wild": wild}, policy)
        >>> report.norms_after
        {'calm': 1.0, 'wild': 1.05}

    See Also:
        [`gradrein.policies.ByMedian`][]
    """

    k: float = 1.05
    decay: float = 0.98
    _: KW_ONLY
    per_parameter: bool = True
    warmup: int = 100

    def __post_init__(self) -> None:
        """Validate the arguments."""
        super().__post_init__()
        self.k, self.decay = number(self.k, "k"), number(self.decay, "decay", 0, 1)

    def init(self) -> State:
        """Return an infinite average, which the first norm replaces."""
        return {"average": torch.full((), math.inf, dtype=torch.float64)}

    def _may_overflow(self, grads: GradientView) -> bool:  # noqa: ARG002
        return False

    def update(self, state: State, norm: Tensor, warm: Tensor) -> tuple[Tensor, State]:
        """Clip to the average, and update it with the clipped norm."""
        average = state["average"]
        limit = self.bounded(self.k * average, warm)
        clipped = torch.minimum(norm, limit)
        moved = torch.lerp(average, clipped, 1 - self.decay)
        return limit, {"average": torch.where(warm, torch.minimum(average, clipped), moved)}
