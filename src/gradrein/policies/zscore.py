from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from .._measure import needs_rescaling
from .._validate import number
from .adaptive import AdaptivePolicy
from .base import GradientView
from .state import State


@dataclass(eq=False)
class ByZScore(AdaptivePolicy):
    """Clip a norm that is more than `z` standard deviations above the running mean.

    With `z_t = (norm - mean) / sd`: where `z_t > z` the norm becomes `mean + z² sd / z_t`, so a larger outlier
    ends closer to the mean. Mean and variance are moving averages of the norms *after* clipping; during
    warm-up they are the plain mean and variance of the norms so far. Kumar et al., ZClip (arXiv 2504.02507). For
    further arguments see `AdaptivePolicy`.

    Args:
        z: The threshold, in standard deviations above the mean.
        decay: The fraction of the old averages that a step keeps.

    Raises:
        ArgumentError: (a ValueError) A setting is out of range.

    Examples:
        >>> policy = gradrein.policies.ByZScore(warmup=4)
        >>> weight = torch.nn.Parameter(torch.zeros(1))
        >>> for size in (1.0, 1.2, 0.8, 1.0, 50.0):
        ...     weight.grad = torch.tensor([size])
        ...     report = gradrein.clip_([weight], policy)
        >>> report.norm, round(report.norm_after, 3)
        (50.0, 1.003)

    See Also:
        [`gradrein.policies.ByMedian`][], [`gradrein.policies.SkipSpikes`][]
    """

    z: float = 2.5
    decay: float = 0.97
    _: KW_ONLY
    warmup: int = 25

    def __post_init__(self) -> None:
        """Validate the arguments."""
        super().__post_init__()
        self.z, self.decay = number(self.z, "z"), number(self.decay, "decay", 0, 1)

    def init(self) -> State:
        """Return a mean and variance of zero."""
        return {"mean": torch.zeros((), dtype=torch.float64), "variance": torch.zeros((), dtype=torch.float64)}

    def update(self, state: State, norm: Tensor, warm: Tensor) -> tuple[Tensor, State]:
        """Limit the norm by its distance from the mean, and update the averages with the limited norm."""
        mean, variance, seen = state["mean"], state["variance"], state["seen"]
        # mean + z² sd / z_t with z_t = (norm - mean) / sd; above the norm where that is no spike, or below the mean.
        limit = self.bounded(torch.addcdiv(mean, variance, (norm - mean).abs_(), value=self.z**2), warm)
        clipped = torch.minimum(norm, limit)
        # During warm-up the plain mean and variance of all norms so far, moving averages of the same afterwards.
        later = torch.tensor(1 - self.decay, dtype=norm.dtype, device="cpu")  # no launch, unlike a number
        weight = torch.where(warm, (seen + 1).reciprocal_(), later)
        above = clipped - mean
        new_mean = torch.addcmul(mean, weight, above)
        left = clipped - new_mean
        squared = left * torch.where(warm, above, left)
        return limit, {"mean": new_mean, "variance": torch.lerp(variance, squared, weight)}

    def _may_overflow(self, grads: GradientView) -> bool:
        return needs_rescaling(grads.tensors, 2.0)
