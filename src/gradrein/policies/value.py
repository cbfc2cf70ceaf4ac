import math
from dataclasses import dataclass

from torch import Tensor

from .._validate import tensor_threshold, threshold
from .base import Clamp, GradientView, Policy


@dataclass(frozen=True)
class _ByValue:
    max_value: float | Tensor
    p: float = math.inf

    def check(self, grads: GradientView) -> None:
        tensor_threshold(self.max_value, "max_value")
        grads.refuse_partial("by_value")

    def decide(self, grads: GradientView) -> Clamp:  # noqa: ARG002  # the limit does not depend on them
        return Clamp(self.max_value)


def by_value(max_value: float | Tensor) -> Policy:
    """Limit every element to `[-max_value, max_value]`, or its magnitude if it is complex. Changes the direction.

    With `nonfinite="propagate"` infinite elements are limited like all others and NaN stays, as in `clip_grad_value_`.

    Args:
        max_value: The largest magnitude allowed, a number or a 0-dim tensor.

    Returns:
        A policy for `gradrein.clip_`. Its report shows the largest magnitude as the norm.

    Raises:
        ArgumentError: (a ValueError) A negative or NaN `max_value`.

    Examples:
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.tensor([3.0, -0.25])
        >>> report = gradrein.clip_([weight], gradrein.by_value(1.0))
        >>> weight.grad, report.norm
        (tensor([ 1.0000, -0.2500]), 3.0)

    See Also:
        [`gradrein.clip_`][], [`gradrein.clip_grad_value_`][]
    """
    return _ByValue(threshold(max_value, "max_value"))
