from dataclasses import dataclass

from torch import Tensor

from .._validate import count, number
from .adaptive import AdaptivePolicy
from .base import GradientView
from .state import State
from .window import empty, push, quantile_and_largest


@dataclass(eq=False)
class ByQuantile(AdaptivePolicy):
    """Clip to a quantile of the norms seen so far, including this one.

    `limit = quantile(last norms before clipping, q)`. The default, the tenth percentile, clips nine steps of ten: in
    effect the step length follows the calm part of the run. Use 0.9 to clip only the largest tenth. Seetharaman et
    al., AutoClip (arXiv 2007.14469). For further arguments see `AdaptivePolicy`.

    Args:
        q: Which quantile, from 0 to 1.
        window: The number of norms to keep (the paper keeps all of them).

    Raises:
        ArgumentError: (a ValueError) A setting is out of range.

    Examples:
        >>> policy = gradrein.policies.ByQuantile(0.5)
        >>> weight = torch.nn.Parameter(torch.zeros(1))
        >>> for size in (1.0, 2.0, 9.0):
        ...     weight.grad = torch.tensor([size])
        ...     report = gradrein.clip_([weight], policy)
        >>> report.norm, report.norm_after
        (9.0, 2.0)

    See Also:
        [`gradrein.policies.ByMedian`][], [`gradrein.policies.ByZScore`][]
    """

    q: float = 0.1
    window: int = 1000

    def __post_init__(self) -> None:
        """Validate the arguments."""
        super().__post_init__()
        self.q, self.window = number(self.q, "q", 0, 1), count(self.window, "window")

    def init(self) -> State:
        """Return an empty window."""
        return {"window": empty(self.window)}

    def _may_overflow(self, grads: GradientView) -> bool:  # noqa: ARG002
        return False

    def update(self, state: State, norm: Tensor, warm: Tensor) -> tuple[Tensor, State]:
        """Add the norm to the window, then compute the quantile."""
        window = push(state["window"], norm)
        return self.bounded(quantile_and_largest(window, self.q, state["seen"])[0], warm), {"window": window}
