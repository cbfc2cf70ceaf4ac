from dataclasses import dataclass

import torch
from torch import Tensor

from .._measure import clip_factor
from .._validate import norm_order, tensor_threshold, threshold
from .base import GradientView, Policy, Scale


@dataclass(frozen=True)
class ByNorm:
    """Limit the norm of all gradients or of each; `per_element`, its root mean square."""

    max_norm: float | Tensor
    p: float
    per_parameter: bool
    per_element: bool = False

    def check(self, grads: GradientView) -> None:  # noqa: ARG002  # the limit does not depend on them
        """Refuse a limit in a tensor that cannot be used."""
        tensor_threshold(self.max_norm, "max_rms" if self.per_element else "max_norm")

    def decide(self, grads: GradientView) -> Scale:
        """Reduce what is above the limit to it."""
        norm = grads.norms(self.p) if self.per_parameter else grads.total_norm(self.p)
        if self.per_element:
            roots = torch.tensor([max(1, p.numel()) ** 0.5 for p in grads.parameters], dtype=norm.dtype, device="cpu")
            norm = norm / roots.to(norm.device, non_blocking=True)
        return Scale(clip_factor(self.max_norm, norm))


def by_norm(max_norm: float | Tensor, p: float | str = 2.0, *, per_parameter: bool = False) -> Policy:
    """Reduce the norm of all gradients to `max_norm` by one factor, `min(1, max_norm / norm)`.

    Unlike in `clip_grad_norm_` there is no epsilon in the division: a norm at the threshold does not change.

    Args:
        max_norm: The largest norm allowed, a number or a 0-dim tensor (which is never read from its device).
        p: The order of the norm.
        per_parameter: Limit the norm of each gradient separately: one exploding layer does not shrink the others.

    Returns:
        A policy for `gradrein.clip_`.

    Raises:
        ArgumentError: (a ValueError) A negative or NaN `max_norm`, or an order that is not positive.

    Examples:
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> gradrein.clip_([weight], gradrein.by_norm(1.0)).norm
        5.0
        >>> large, small = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))
        >>> large.grad, small.grad = torch.tensor([100.0]), torch.tensor([0.5])
        >>> report = gradrein.clip_([large, small], gradrein.by_norm(1.0, per_parameter=True))
        >>> large.grad, small.grad
        (tensor([1.]), tensor([0.5000]))

    See Also:
        [`gradrein.clip_`][], [`gradrein.by_rms`][], [`gradrein.by_unit`][], [`gradrein.clip_grad_norm_`][]
    """
    return ByNorm(threshold(max_norm, "max_norm"), norm_order(p), per_parameter)
