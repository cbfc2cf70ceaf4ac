"""A gradient that does not fit where it arrives: which output, or which op."""

import re

from torch import Tensor

from .. import graph
from ..errors import GradientMismatchError
from ._run import Run
from ._words import Scene, indent, label


def explain(text: str, run: Run) -> GradientMismatchError:
    """Name the output whose gradient is on another device, or the op that returned the wrong gradient."""
    by_op = re.search(r"Function (\w+) returned an invalid gradient", text)
    if by_op is None:
        told = [
            f"{label('output', output, index)} is on {output.device}, its gradient on {grad.device}"
            for index, (output, grad) in enumerate(zip(run.outputs, run.grads, strict=False))
            if isinstance(output, Tensor) and grad is not None and grad.device != output.device
        ]
        advice = "Move the gradient to the device of its output."
        return GradientMismatchError(f"{text}\n{indent(told)}\n{advice}")
    scene = Scene(run.outputs)
    told = [scene.tell(node) for node in scene.read.nodes if graph.op(node) == by_op[1]]
    return GradientMismatchError(
        f"{text}\nIn this graph that is:\n{indent(told)}\n"
        "The backward of a custom Function must return one gradient per argument of its forward, each of "
        "that argument's shape."
    )
