import math
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .._validate import decay_below_one, number
from .adaptive import AdaptivePolicy, Bounds
from .state import State

_EPS = 1e-8


@dataclass(eq=False)
class ByStableNorm(AdaptivePolicy):
    """Keep the direction of each gradient and replace its norm by a stable one, near 1.

    `norm <- m / (sqrt(v) + 1e-8)`, where m and v are bias-corrected moving averages of the norm and of its
    square. A spike raises both, so the result stays bounded whatever its size. This changes the scale of
    *every* step, up as well as down: use it with optimizers that cancel the scale (Adam and similar); with plain
    SGD the learning rate becomes the length of a step. Huang et al., GradientStabilizer (arXiv 2502.17055). For
    further arguments see `AdaptivePolicy`; here `floor` (at most 65504, the largest float16) and `ceiling` are the
    smallest and the largest resulting norm.

    Args:
        decay: The fraction of the average norm that a step keeps.
        square_decay: The fraction of the average squared norm that a step keeps.

    Raises:
        ArgumentError: (a ValueError) A setting is out of range.

    Examples:
        >>> policy = gradrein.policies.ByStableNorm()
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> for size in (1.0, 1.0, 1000.0):
        ...     weight.grad = torch.tensor([3.0, 4.0]) * size
        ...     report = gradrein.clip_([weight], policy)
        >>> report.norm, round(report.norm_after, 3)
        (5000.0, 0.753)

    See Also:
        [`gradrein.policies.ByRunningNorm`][], [`gradrein.policies.ByMedian`][]
    """

    rescales: ClassVar[bool] = True

    decay: float = 0.7
    square_decay: float = 0.9
    _: KW_ONLY
    per_parameter: bool = True

    def __post_init__(self) -> None:
        """Validate the arguments."""
        self.decay = decay_below_one(self.decay, "decay")
        self.square_decay = decay_below_one(self.square_decay, "square_decay")
        number(self.floor, "floor", 0, torch.finfo(torch.float16).max)  # no gradient may become infinite by it
        super().__post_init__()

    def init(self) -> State:
        """Return averages of zero."""
        return {"mean": torch.zeros((), dtype=torch.float64), "rms": torch.zeros((), dtype=torch.float64)}

    def update(self, state: State, norm: Tensor, bounds: Bounds) -> tuple[Tensor, State]:
        """Update the averages with the norm, then replace it."""
        mean = self.decay * state["mean"] + (1 - self.decay) * norm
        # The root of the moving average of squares, so that no square overflows or vanishes.
        rms = torch.hypot(math.sqrt(self.square_decay) * state["rms"], math.sqrt(1 - self.square_decay) * norm)
        times = state["seen"] + 1
        unbiased_mean = mean / (1 - self.decay**times)
        unbiased_rms = rms / (1 - self.square_decay**times).sqrt()
        return bounds.clamp(unbiased_mean / (unbiased_rms + _EPS)), {"mean": mean, "rms": rms}
