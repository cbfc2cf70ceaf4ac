"""A gradient on the wrong device or of the wrong shape: which output, or which op."""

import re

from torch import Tensor

from ... import graph
from ...errors import GradientMismatchError
from .._engine_call import EngineCall
from .context import ErrorContext, argument_label, bullet_list


def diagnose(text: str, call: EngineCall) -> GradientMismatchError:
    """Name the output whose gradient is on another device, or the op that returned the wrong gradient."""
    by_op = re.search(r"Function (\w+) returned an invalid gradient", text)
    if by_op is None:
        labels = [
            f"{argument_label('output', output, index)} is on {output.device}, its gradient on {grad.device}"
            for index, (output, grad) in enumerate(zip(call.outputs, call.grads, strict=False))
            if isinstance(output, Tensor) and grad is not None and grad.device != output.device
        ]
        advice = "Move the gradient to the device of its output."
        return GradientMismatchError(f"{text}\n{bullet_list(labels)}\n{advice}")
    context = ErrorContext(call.outputs)
    labels = [context.node_label(node) for node in context.graph.nodes if graph.op(node) == by_op[1]]
    return GradientMismatchError(
        f"{text}\nIn this graph that is:\n{bullet_list(labels)}\n"
        "The backward of a custom Function must return one gradient per argument of its forward, each of "
        "that argument's shape."
    )
