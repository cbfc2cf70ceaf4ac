from dataclasses import dataclass

import torch
from torch import Tensor

from .._validate import number
from .adaptive import AdaptivePolicy, Bounds
from .state import State


@dataclass(eq=False)
class ByTrackedQuantile(AdaptivePolicy):
    """Clip to a quantile of the norms that is tracked with one number, without a history.

    `C <- C exp(-rate (b - q))`, where b is 1 if the norm was at most C and 0 if it was above: C settles where a
    fraction q of all norms is below it. It starts at the first norm. Andrew et al., Differentially Private Learning
    with Adaptive Clipping (arXiv 1905.03871), without the noise. For further arguments see `AdaptivePolicy`.

    Args:
        q: Which quantile, from 0 to 1; 0.5 is the median.
        rate: How far one step moves the estimate, on a logarithmic scale.

    Raises:
        ArgumentError: (a ValueError) A setting is out of range.

    Examples:
        >>> policy = gradrein.policies.ByTrackedQuantile()
        >>> weight = torch.nn.Parameter(torch.zeros(1))
        >>> for size in (1.0, 9.0):
        ...     weight.grad = torch.tensor([size])
        ...     report = gradrein.clip_([weight], policy)
        >>> report.norm, round(report.norm_after, 3)
        (9.0, 0.905)

    See Also:
        [`gradrein.policies.ByQuantile`][]
    """

    q: float = 0.5
    rate: float = 0.2

    def __post_init__(self) -> None:
        """Validate the arguments."""
        super().__post_init__()
        self.q, self.rate = number(self.q, "q", 0, 1), number(self.rate, "rate")

    def init(self) -> State:
        """Return no estimate yet."""
        return {"estimate": torch.zeros((), dtype=torch.float64)}

    def update(self, state: State, norm: Tensor, bounds: Bounds) -> tuple[Tensor, State]:
        """Clip to the estimate, then move it."""
        estimate = torch.where(state["seen"] == 0, norm, state["estimate"])
        below = (norm <= estimate).to(norm.dtype)
        return bounds.clamp(estimate), {"estimate": estimate * torch.exp(-self.rate * (below - self.q))}
