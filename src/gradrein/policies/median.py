from dataclasses import KW_ONLY, dataclass

from torch import Tensor

from .._validate import count, number
from .adaptive import AdaptivePolicy
from .base import GradientView
from .state import State
from .window import empty, median, middle, push


@dataclass(eq=False)
class ByMedian(AdaptivePolicy):
    """Clip to `k` times the median of the previous norms.

    `limit = k median(last norms before clipping)`. The limit stays meaningful even if nearly half of the window are
    outliers. As in ScaledAdam of the icefall speech recipes (Yao et al., Zipformer, arXiv 2310.11230), with k = 2.
    For further arguments see `AdaptivePolicy`.

    Args:
        k: The limit as a multiple of the median.
        window: The number of norms to keep.

    Raises:
        ArgumentError: (a ValueError) A setting is out of range.

    Examples:
        >>> policy = gradrein.policies.ByMedian(warmup=3)
        >>> weight = torch.nn.Parameter(torch.zeros(1))
        >>> for size in (1.0, 100.0, 2.0, 9.0):
        ...     weight.grad = torch.tensor([size])
        ...     report = gradrein.clip_([weight], policy)
        >>> report.norm, report.norm_after
        (9.0, 4.0)

    See Also:
        [`gradrein.policies.ByQuantile`][], [`gradrein.policies.ByZScore`][], [`gradrein.Clipper`][]
    """

    k: float = 2.0
    window: int = 128
    _: KW_ONLY
    warmup: int = 10

    def __post_init__(self) -> None:
        """Validate the arguments."""
        super().__post_init__()
        self.k, self.window = number(self.k, "k"), count(self.window, "window")

    def init(self) -> State:
        """Return an empty window."""
        return {"window": empty(self.window)}

    def _may_overflow(self, grads: GradientView) -> bool:  # noqa: ARG002
        return False

    def update(self, state: State, norm: Tensor, warm: Tensor) -> tuple[Tensor, State]:
        """Compute the median, then add the norm to the window."""
        window = state["window"]
        limit = self.bounded(self.k * median(window, middle(state["seen"], self.window)), warm)
        return limit, {"window": push(window, norm)}
