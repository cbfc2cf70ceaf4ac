"""The way of a gradient into ``.grad``."""

import torch
from torch import Tensor

from ..._measure import shares_memory
from .. import tracing


def accumulate(parameter: Tensor, gradient: Tensor) -> None:
    """Add to ``.grad``, as backward would."""
    gradient = gradient if gradient.dtype == parameter.dtype else gradient.to(parameter.dtype)
    before = parameter.grad
    if tracing.local.tracer is not None:
        tracing.local.tracer.add_to_grad(parameter, gradient)
    elif before is None:
        # A parameter may be told to have gradients of another type (torch 2.10).
        wanted = getattr(parameter, "grad_dtype", None) or gradient.dtype
        gradient = gradient if gradient.dtype == wanted else gradient.to(wanted)
        parameter.grad = gradient if gradient.is_sparse else gradient.contiguous()
    else:
        with torch.no_grad():
            parameter.grad = before.add_(gradient) if _is_writable(before) else _sum(before, gradient)


def _is_writable(grad: Tensor) -> bool:
    """Return whether a gradient can be added to in place: of several parameters, no write may fail after others."""
    if grad.is_sparse or (grad.is_inference() and not torch.is_inference_mode_enabled()):
        return False
    return grad.is_contiguous() or not shares_memory(grad)


def _sum(before: Tensor, gradient: Tensor) -> Tensor:
    return before + gradient if gradient.is_sparse else gradient + before  # torch adds no dense tensor to a sparse one
