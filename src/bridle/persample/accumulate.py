"""The way of a gradient into ``.grad``."""

import torch
from torch import Tensor

from . import tracing


def accumulate(parameter: Tensor, gradient: Tensor) -> None:
    """Add to ``.grad``, as backward would."""
    with torch.no_grad():
        gradient = gradient.to(parameter.dtype)
        if tracing.local.tracer is not None:
            tracing.local.tracer.add_to_grad(parameter, gradient)
        elif parameter.grad is None:
            parameter.grad = gradient if gradient.is_sparse else gradient.contiguous()
        else:
            parameter.grad = parameter.grad + gradient if parameter.grad.is_sparse else parameter.grad.add_(gradient)
