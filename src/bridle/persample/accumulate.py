"""The way of a gradient into ``.grad``."""

import torch
from torch import Tensor

from . import tracing


def accumulate(parameter: Tensor, gradient: Tensor) -> None:
    """Add to ``.grad``, as backward would."""
    gradient = gradient if gradient.dtype == parameter.dtype else gradient.to(parameter.dtype)
    before = parameter.grad
    if tracing.local.tracer is not None:
        tracing.local.tracer.add_to_grad(parameter, gradient)
    elif before is None:
        parameter.grad = gradient if gradient.is_sparse else gradient.contiguous()
    else:
        with torch.no_grad():
            parameter.grad = before + gradient if before.is_sparse else before.add_(gradient)
