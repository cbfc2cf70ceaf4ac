from torch import Tensor

from .._validate import threshold
from .base import Policy
from .norm import ByNorm


def by_rms(max_rms: float | Tensor) -> Policy:
    """Limit the root mean square of the elements of each gradient: one limit for large and small layers.

    Args:
        max_rms: The largest root mean square allowed, a number or a 0-dim tensor.

    Returns:
        A policy for `gradrein.clip_`.

    Raises:
        ArgumentError: (a ValueError) A negative or NaN `max_rms`.

    Examples:
        >>> weight = torch.nn.Parameter(torch.zeros(4))
        >>> weight.grad = torch.full((4,), 3.0)
        >>> report = gradrein.clip_([weight], gradrein.by_rms(1.0))
        >>> weight.grad
        tensor([1., 1., 1., 1.])

    See Also:
        [`gradrein.clip_`][], [`gradrein.by_norm`][], [`gradrein.by_unit`][]
    """
    return ByNorm(threshold(max_rms, "max_rms"), 2.0, per_parameter=True, per_element=True)
