"""`grad`: return gradients, single or batched, in the structure of the inputs."""

import warnings
from collections.abc import Sequence
from typing import TypeAlias, overload

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from .._torch.engine import torch_grad
from .._torch.modes import traces_autograd
from ..errors import ArgumentError, BackwardError
from ._arguments import Gradients, as_inputs, as_outputs, batch_size, gradients_for
from ._batched import run_batched
from ._engine import dispatch_override, overriding_tensors, run
from ._engine_call import EngineCall

_ONLY_INPUTS = (
    "only_inputs argument is deprecated and is ignored now (defaults to True). To accumulate gradient for "
    "other parts of the graph, please use torch.autograd.backward."
)
_Outputs: TypeAlias = Tensor | GradientEdge | Sequence[Tensor] | Sequence[GradientEdge]


@overload
def grad(
    outputs: _Outputs,
    inputs: _Outputs,
    grad_outputs: Gradients = ...,
    retain_graph: bool | None = ...,
    create_graph: bool = ...,
    only_inputs: bool = ...,
    allow_unused: bool | None = ...,
    is_grads_batched: bool = ...,
    materialize_grads: bool = ...,
) -> tuple[Tensor, ...]: ...


@overload
def grad(
    outputs: _Outputs,
    inputs: dict[str, Tensor] | nn.Module,
    grad_outputs: Gradients = ...,
    retain_graph: bool | None = ...,
    create_graph: bool = ...,
    only_inputs: bool = ...,
    allow_unused: bool | None = ...,
    is_grads_batched: bool = ...,
    materialize_grads: bool = ...,
) -> dict[str, Tensor]: ...


def grad(
    outputs: _Outputs,
    inputs: _Outputs | dict[str, Tensor] | nn.Module,
    grad_outputs: Gradients = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: bool | None = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> tuple[Tensor, ...] | dict[str, Tensor]:
    """Return the gradients of `outputs` with respect to `inputs`, without changing ``.grad``.

    Semantics are those of `torch.autograd.grad`. In addition, `inputs` may be a module. What torch cannot vectorise,
    or vectorises wrongly, raises.

    Args:
        outputs: one or several tensors or edges to differentiate; their gradients are summed.
        inputs: one or several tensors or edges, a dict of tensors, or a module (its trainable parameters).
        grad_outputs: the gradient of each output. None means 1 and is allowed only for a scalar.
        retain_graph: keep the graph for another pass. None means the value of `create_graph`.
        create_graph: make the gradients differentiable.
        only_inputs: deprecated and ignored.
        allow_unused: return None for an input that no output depends on, instead of raising. None means the value
            of `materialize_grads`.
        is_grads_batched: the first dimension of every grad output is a batch, and so is that of the result.
        materialize_grads: return zeros for an input that no output depends on.

    Returns:
        A tuple with one gradient per input; a dict with the same names if `inputs` has names.

    Raises:
        BackwardError: always one of its subclasses; each is also a `RuntimeError`.
        ArgumentError: (a `ValueError`) the arguments contradict each other.

    Examples:
        >>> import torch, gradrein
        >>> x = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> gradrein.grad(x.square().sum(), x)
        (tensor([2., 4.]),)
        >>> gradrein.grad(x.square(), x, torch.eye(2), is_grads_batched=True)
        (tensor([[2., 0.],
                [0., 4.]]),)

    See Also:
        [`gradrein.backward`][], [`gradrein.autograd.find_unused_parameters`][]
    """
    if materialize_grads and allow_unused is False:
        raise ArgumentError(
            "Expected allow_unused to be True or not passed when materialize_grads=True, but got: allow_unused=False."
        )
    allow_unused = materialize_grads if allow_unused is None else allow_unused
    starts = as_outputs(outputs)
    wanted, names = as_inputs(inputs, "grad")
    overridden = overriding_tensors((*starts, *wanted))
    if overridden or traces_autograd():
        theirs = {
            "grad_outputs": grad_outputs,
            "retain_graph": retain_graph,
            "create_graph": create_graph,
            "only_inputs": only_inputs,
            "allow_unused": allow_unused,
            "is_grads_batched": is_grads_batched,
            "materialize_grads": materialize_grads,
        }
        if overridden:
            call = EngineCall(starts, wanted, names=names)
            gradients = dispatch_override(torch.autograd.grad, overridden, call, starts, wanted, **theirs)
        else:
            gradients = torch_grad(starts, wanted, **theirs)
        return gradients if names is None else dict(zip(names, gradients, strict=True))
    if not only_inputs:
        warnings.warn(_ONLY_INPUTS, FutureWarning, stacklevel=2)
    call = EngineCall(
        starts,
        wanted,
        gradients_for(starts, grad_outputs, batched=is_grads_batched),
        retain_graph=create_graph if retain_graph is None else retain_graph,
        create_graph=create_graph,
        allow_unused=allow_unused,
        names=names,
    )
    size = batch_size(call.grads) if is_grads_batched else None
    gradients = run(call) if size is None else run_batched(call)
    if materialize_grads:
        gradients = tuple(
            _zeros(value, size, create_graph) if gradient is None else gradient
            for gradient, value in zip(gradients, wanted, strict=True)
        )
    return gradients if names is None else dict(zip(names, gradients, strict=True))


def _zeros(value: Tensor | GradientEdge, size: int | None, create_graph: bool) -> Tensor:
    if isinstance(value, GradientEdge):
        raise BackwardError(
            "materialize_grads cannot be used when the given input is a GradientEdge\n"
            "There is no tensor whose shape the zeros could have. Pass the tensor instead of its edge."
        )
    if size is None:
        return torch.zeros_like(value, requires_grad=create_graph)
    return value.new_zeros((size, *value.shape), requires_grad=create_graph)
