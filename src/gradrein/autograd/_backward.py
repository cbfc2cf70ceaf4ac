"""`backward`: accumulate gradients into ``.grad`` as torch does, with errors that name the cause."""

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from .._events import notify_backward
from .._torch.modes import inside_func_transform
from ..errors import BackwardError
from ._arguments import Gradients, as_inputs, as_outputs, gradients_for
from ._engine import dispatch_override, overriding_tensors, run
from ._engine_call import EngineCall


@notify_backward
def backward(
    tensors: Tensor | GradientEdge | Sequence[Tensor | GradientEdge],
    grad_tensors: Gradients = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    grad_variables: Gradients = None,
    inputs: Tensor | GradientEdge | Sequence[Tensor | GradientEdge] | dict[str, Tensor] | nn.Module | None = None,
) -> None:
    """Add the gradients of `tensors` to the ``.grad`` of the leaves they were computed from.

    Semantics and engine are those of `torch.autograd.backward`. Only errors differ: they name
    tensors, parameters and modules, and say what to do.

    Args:
        tensors: one or several tensors or edges to differentiate; their gradients are summed.
        grad_tensors: the gradient of each tensor. None means 1 and is allowed only for a scalar.
        retain_graph: keep the graph for another pass. None means the value of `create_graph`.
        create_graph: make the gradients differentiable. As in torch, ``.grad`` then refers to the graph and
            the graph to the parameter: set ``.grad`` to None when done, or use `grad`, which creates no such
            cycle.
        grad_variables: deprecated name of `grad_tensors`.
        inputs: the only tensors that get a gradient. One or several tensors or edges, leaves or
            not, a dict of tensors, or a module, which stands for its trainable parameters.

    Raises:
        BackwardError: always one of its subclasses; each is also a `RuntimeError`.

    Examples:
        >>> import torch, gradrein
        >>> weight = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> gradrein.backward(weight.square().sum())
        >>> weight.grad
        tensor([2., 4.])

    See Also:
        [`gradrein.grad`][], [`gradrein.trace`][], [`gradrein.detect_nonfinite`][],
        [`gradrein.autograd.find_unused_parameters`][]
    """
    if inside_func_transform():
        raise BackwardError(
            "backward() called inside a functorch transform. This is not supported, please use "
            "functorch.grad or functorch.vjp instead or call backward() outside of functorch transforms."
        )
    if grad_variables is not None:
        message = "`grad_variables` is deprecated. Use `grad_tensors` instead."
        warnings.warn(message, FutureWarning, stacklevel=3)  # past the decorator
        if grad_tensors is not None:
            raise BackwardError(
                "`grad_tensors` and `grad_variables` (deprecated) arguments both passed to `backward()`. "
                "Please only use `grad_tensors`."
            )
        grad_tensors = grad_variables
    outputs = as_outputs(tensors)
    wanted, names = ((), None) if inputs is None else as_inputs(inputs, "backward")
    overridden = overriding_tensors((*outputs, *wanted))
    if overridden:
        dispatch_override(
            torch.autograd.backward,
            overridden,
            EngineCall(outputs, wanted, names=names),
            outputs,
            grad_tensors=grad_tensors,
            retain_graph=retain_graph,
            create_graph=create_graph,
            inputs=None if inputs is None else wanted,
        )
        return
    call = EngineCall(
        outputs,
        wanted,
        gradients_for(outputs, grad_tensors, batched=False),
        retain_graph=create_graph if retain_graph is None else retain_graph,
        create_graph=create_graph,
        accumulate=True,
        names=names,
    )
    run(call)
