"""How a loss is put together, from the autograd graph behind it: powers and weights inside the mean."""

from typing import Any

from torch import Tensor
from torch.autograd.graph import Node

_DEPTH = 16
_REDUCTIONS = ("MeanBackward", "SumBackward")
_END = ("Addmm", "Convolution", "NativeBatchNorm", "LogSoftmax")


def describe_loss(tensors: Any) -> dict[str, Any]:
    """Return what is done to the single terms of a loss: `power`, `of` what, and whether they are `weighted`.

    Only names and numbers of the graph are read, no saved tensor is unpacked. Empty where nothing of that is seen.
    """
    tensor = tensors if isinstance(tensors, Tensor) else None
    node = None if tensor is None else tensor.grad_fn
    found: dict[str, Any] = {}
    reduced = False
    for _ in range(_DEPTH):
        if node is None or node.name().startswith(_END):
            break
        name = node.name()
        inputs = [one for one, _ in node.next_functions]
        following = next((one for one in inputs if one is not None), None)
        if name.startswith(_REDUCTIONS):
            reduced = True
        elif name.startswith("PowBackward0"):
            exponent = getattr(node, "_saved_exponent", None)
            base = following.name().split("Backward")[0] if following is not None else ""
            if _is_parameter(following):
                break  # a penalty on the weights, not a term of the data
            if isinstance(exponent, (int, float)) and exponent > found.get("power", 1):
                found.update(power=float(exponent), of=base)
        elif name.startswith("MulBackward") and reduced and len(inputs) == 2 and None in inputs:
            found["weighted"] = True
        node = following
    return found


def _is_parameter(node: Node | None) -> bool:
    return node is not None and node.name().endswith("AccumulateGrad")
