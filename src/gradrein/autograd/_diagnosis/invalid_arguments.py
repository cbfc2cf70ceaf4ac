"""Messages for outputs and gradients that do not fit.

The first line of each is torch's own, so that people recognise it; the rest names the argument and the fix.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from ... import graph
from ..._torch.nodes import is_cpp_nested, nested_sizes
from .._engine_call import Output
from .context import argument_label, producer_label


def non_scalar(output: Output, index: int) -> str:
    """Return the message for an output with more than one element and no gradient."""
    shape = _shape(output)
    advice = "Reduce it first, as in `.mean()` or `.sum()`, or pass the gradient it should start from."
    if len(shape) == 1:
        advice += " (A data-parallel wrapper returns one loss per device: `.mean()` is the fix.)"
    return (
        "grad can be implicitly created only for scalar outputs\n"
        f"{argument_label('output', output, index)} has shape {tuple(shape)}, {producer_label(output)}.\n{advice}"
    )


def non_real(output: Output, index: int, dtype: torch.dtype) -> str:
    """Return the message for a complex output and no gradient."""
    return (
        f"grad can be implicitly created only for real scalar outputs but got {dtype}\n"
        f"{argument_label('output', output, index)}, {producer_label(output)}, is not real.\n"
        "Take `.real`, `.imag` or `.abs()` of it, or pass the gradient it should start from."
    )


def unmatched(outputs: Sequence[Output], given: int) -> str:
    """Return which outputs have no gradient, or which gradients no output."""
    if given > len(outputs):
        extra = ", ".join(str(index) for index in range(len(outputs), given))
        return f"There is no output for gradient {extra}. Pass one gradient (or None) for each output."
    missing = ", ".join(argument_label("output", outputs[index], index) for index in range(given, len(outputs)))
    return f"There is no gradient for {missing}. Pass one gradient (or None) for each output."


def shape_mismatch(output: Output, grad: Tensor, index: int, batched: bool) -> str:
    """Return the message for a gradient of another shape than its output."""
    shape, given = _shape(output), _shape(grad)
    if not batched:
        return (
            f"Mismatch in shape: grad_output[{index}] has a shape of {given} "
            f"and output[{index}] has a shape of {shape}.\n"
            f"{argument_label('output', output, index)} is {producer_label(output)}. Pass a gradient of its shape."
        )
    wanted = ", ".join(["batch", *map(str, shape)])
    return (
        "If `is_grads_batched=True`, we interpret the first dimension of each grad_output as the batch "
        "dimension. The sizes of the remaining dimensions are expected to match the shape of corresponding "
        f"output, but a mismatch was detected: grad_output[{index}] has a shape of {given} "
        f"and output[{index}] has a shape of {shape}.\n"
        f"{argument_label('output', output, index)} is {producer_label(output)}. Pass a gradient of shape ({wanted})."
    )


def dtype_mismatch(output: Output, grad: Tensor, index: int, dtype: torch.dtype) -> str:
    """Return the message for a real gradient of a complex output, or the other way round."""
    return (
        "For complex Tensors, both grad_output and output are required to have the same dtype. "
        f"Mismatch in dtype: grad_output[{index}] has a dtype of {grad.dtype} "
        f"and output[{index}] has a dtype of {dtype}.\n"
        f"{argument_label('output', output, index)} is {producer_label(output)}. Cast the gradient with `.to({dtype})`."
    )


def _shape(output: Output) -> Sequence[int] | Sequence[list[int]]:
    if isinstance(output, GradientEdge):
        return torch.Size(graph.describe(output.node)[output.output_nr].shape)
    return nested_sizes(output) if is_cpp_nested(output) else output.shape
