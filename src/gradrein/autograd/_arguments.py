"""Arguments of a backward pass, normalised and checked."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from .._torch.modes import is_tensor_like, same_shape
from .._torch.nodes import is_cpp_nested, is_cpp_nested_edge
from ..errors import (
    ArgumentError,
    ArgumentTypeError,
    BackwardError,
    GradientMismatchError,
    GradientTypeError,
    NoGraphError,
)
from ..graph import describe
from ._diagnosis import invalid_arguments
from ._engine_call import Output

Gradients: TypeAlias = Tensor | Sequence[Tensor | None] | None


def as_outputs(outputs: Output | Iterable[Output]) -> tuple[Output, ...]:
    """Return one output or several as a tuple."""
    if is_tensor_like(outputs) or isinstance(outputs, GradientEdge):
        return (outputs,)  # type: ignore[return-value]
    return _as_tuple(outputs, "an output")


def as_inputs(inputs: Any, caller: str) -> tuple[tuple[Output, ...], tuple[str, ...] | None]:
    """Return inputs given as one, several, a dict, or a module, which stands for its parameters; and their names."""
    names = None
    values: tuple[Output, ...]
    if is_tensor_like(inputs) or isinstance(inputs, GradientEdge):
        values = (inputs,)
    elif isinstance(inputs, nn.Module):
        values = _tensors_in(inputs)
        if not values:
            trainable = {name: p for name, p in inputs.named_parameters() if p.requires_grad}
            names, values = tuple(trainable), tuple(trainable.values())
    elif type(inputs) is dict:
        names, values = tuple(inputs), tuple(inputs.values())
    elif isinstance(inputs, Mapping):
        raise GradientTypeError(
            f"`inputs` argument to `{caller}()` must be a dict, not {type(inputs).__name__}. "
            "Other Mapping types are not supported."
        )
    else:
        values = _as_tuple(inputs, "an input")
    if not values:
        passed = "a module without trainable parameters" if isinstance(inputs, nn.Module) else "an empty container"
        raise BackwardError(f"`inputs` argument to `{caller}()` cannot be empty.\nIt is {passed}.")
    return values, names


def _as_tuple(several: Any, what: str) -> tuple[Any, ...]:
    if isinstance(several, Iterable) or hasattr(several, "__getitem__"):
        return tuple(several)
    instead = "the loss, or its parameters, as in gradrein.grad(loss, model)"
    if isinstance(several, torch.optim.Optimizer):
        instead = "[p for group in optimizer.param_groups for p in group['params']]"
    raise GradientTypeError(
        f"'{type(several).__name__}' object is not iterable\n{what} is a tensor or a gradient edge, or there are "
        f"several of them; found {several!r:.80}. Pass {instead}."
    )


def check_is_loss(loss: Any, caller: str) -> None:
    """Refuse what is not a tensor, for functions of our own that take a loss and a model."""
    if not isinstance(loss, Tensor):
        swapped = "The loss comes first, then the model: " if isinstance(loss, nn.Module) else "Call "
        raise ArgumentTypeError(
            f"{caller}: `loss` is a tensor, found {type(loss).__name__}. {swapped}gradrein.{caller}(loss, model)."
        )


def check_has_graph(loss: Tensor, caller: str) -> None:
    """Refuse a loss without a recorded graph."""
    if not loss.requires_grad:
        raise NoGraphError(
            f"{caller}: element 0 of tensors does not require grad and does not have a grad_fn: `loss` has no recorded "
            "graph. Compute it with gradients on, and pass it undetached.",
            (),
        )


def check_model(model: Any, caller: str) -> None:
    """Refuse what is not a module, for functions of our own that use its names."""
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(
            f"{caller}: `model` is the module whose names to use, found {type(model).__name__}: {model!r:.80}. Pass "
            "the model."
        )


def _tensors_in(module: nn.Module) -> tuple[Output, ...]:
    """Return the tensors of a module that is a sequence of them, such as `nn.ParameterList`; else nothing.

    torch treats such a module as a sequence.
    """
    try:
        entries = iter(module)  # type: ignore[call-overload]
        first: Any = next(entries)
    except Exception:
        return ()  # not a sequence, or an empty one: torch would refuse it
    is_one = is_tensor_like(first) or isinstance(first, GradientEdge)
    return (first, *entries) if is_one else ()


def gradients_for(outputs: Sequence[Output], grads: Gradients, *, batched: bool) -> tuple[Tensor | None, ...]:
    """Return one gradient per output: the given one, checked, or ones for a scalar without one.

    An output that requires no gradient and was given none keeps None: the engine reports it.
    """
    if grads is None:
        return tuple(_implicit_grad(output, index, batched) for index, output in enumerate(outputs))
    given = (grads,) if isinstance(grads, Tensor) else _as_tuple(grads, "a gradient")
    for index, grad in enumerate(given):
        if grad is not None and not isinstance(grad, Tensor):
            raise GradientTypeError(
                f"gradients can be either Tensors or None, but got {type(grad).__name__}\n"
                f"It is the gradient for output {index}."
            )
    if len(given) != len(outputs):
        raise GradientMismatchError(
            f"got {len(outputs)} tensors and {len(given)} gradients\n"
            + invalid_arguments.unmatched(outputs, len(given))
        )
    return tuple(
        _implicit_grad(output, index, batched) if grad is None else _checked_grad(output, grad, index, batched)
        for index, (output, grad) in enumerate(zip(outputs, given, strict=True))
    )


def batch_size(grads: Sequence[Tensor | None]) -> int:
    """Return the size of the first dimension that every given gradient shares.

    Raises:
        ArgumentError: if they differ, or if there is none.
    """
    sizes = {index: grad.shape[0] for index, grad in enumerate(grads) if grad is not None}
    if len(set(sizes.values())) == 1 and next(iter(sizes.values())) > 0:
        return next(iter(sizes.values()))
    raise ArgumentError(
        "is_grads_batched=True: every grad_output needs the same first dimension, of at least 1; found "
        + (", ".join(f"grad_outputs[{i}]: {size}" for i, size in sizes.items()) or "no grad_output at all")
        + "."
    )


def _implicit_grad(output: Output, index: int, batched: bool) -> Tensor | None:
    if isinstance(output, GradientEdge):
        _refuse_nested_edge(output)
        shape, dtype, device = describe(output.node)[output.output_nr]
        _check_scalar(output, index, all(size == 1 for size in shape), dtype)
        _check_not_batched(index, batched)
        return torch.ones(shape, dtype=dtype, device=device)
    _check_is_tensor(output, index)
    if not output.requires_grad:
        return None
    _check_scalar(output, index, output.numel() == 1, output.dtype)
    _check_not_batched(index, batched)
    return torch.ones_like(output, memory_format=torch.preserve_format)


def _check_scalar(output: Output, index: int, scalar: bool, dtype: torch.dtype) -> None:
    if not scalar:
        raise GradientMismatchError(invalid_arguments.non_scalar(output, index))
    if not dtype.is_floating_point:
        raise GradientMismatchError(invalid_arguments.non_real(output, index, dtype))


def _check_not_batched(index: int, batched: bool) -> None:
    if batched:
        raise ArgumentError(
            f"is_grads_batched=True: output {index} has no grad_output, so the batch size is unknown. "
            "Pass one with a batch as its first dimension."
        )


def _checked_grad(output: Output, grad: Tensor, index: int, batched: bool) -> Tensor:
    if isinstance(output, GradientEdge):
        _refuse_nested_edge(output)
        shape, dtype, _ = describe(output.node)[output.output_nr]
        same = same_shape(grad.shape[batched:], shape)
    else:
        _check_is_tensor(output, index)
        dtype = output.dtype
        if is_cpp_nested(output):
            if batched:
                raise BackwardError(
                    "Batched grads are not supported with Nested Tensor.\n"
                    f"output {index} is a nested tensor. Call grad once per gradient, or use layout=torch.jagged."
                )
            same = grad.is_nested and torch.is_same_size(output, grad)
        else:
            same = not is_cpp_nested(grad) and same_shape(grad.shape[batched:], output.shape)
    if not same or grad.dim() < batched:
        raise GradientMismatchError(invalid_arguments.shape_mismatch(output, grad, index, batched))
    if dtype.is_complex != grad.dtype.is_complex:
        raise GradientMismatchError(invalid_arguments.dtype_mismatch(output, grad, index, dtype))
    return grad


def _check_is_tensor(output: Any, index: int) -> None:
    if not isinstance(output, Tensor):
        kind = type(output).__name__
        raise GradientTypeError(f"output {index} is a {kind}; expected a Tensor or a GradientEdge.")


def _refuse_nested_edge(edge: GradientEdge) -> None:
    if is_cpp_nested_edge(edge):
        raise BackwardError(
            "C++ NestedTensor are not supported with GradientEdge\n"
            "Pass the nested tensor itself, or make it with layout=torch.jagged."
        )
