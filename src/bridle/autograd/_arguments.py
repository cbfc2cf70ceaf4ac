"""The front half of a backward pass: what was passed in, made uniform and checked."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from ..errors import (
    ArgumentError,
    BackwardError,
    GradientMismatchError,
    GradientTypeError,
    NonScalarOutputError,
)
from ..graph import describe
from . import _explain, _torch
from ._run import Inputs, Output

Gradients: TypeAlias = Tensor | Sequence[Tensor | None] | None


def as_outputs(outputs: Output | Iterable[Output]) -> tuple[Output, ...]:
    """Return one output or several as a tuple."""
    if _torch.is_tensor_like(outputs) or isinstance(outputs, GradientEdge):
        return (outputs,)  # type: ignore[return-value]
    return tuple(outputs)


def as_inputs(inputs: Any, caller: str) -> Inputs:
    """Return inputs in whatever form they came: one, several, a dict, or a module for its parameters."""
    names = None
    values: tuple[Output, ...]
    if _torch.is_tensor_like(inputs) or isinstance(inputs, GradientEdge):
        values = (inputs,)
    elif isinstance(inputs, nn.Module):
        values = _iterated(inputs)
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
        values = tuple(inputs)
    if not values:
        found = "a module without trainable parameters" if isinstance(inputs, nn.Module) else "nothing in it"
        raise BackwardError(f"`inputs` argument to `{caller}()` cannot be empty.\nIt came with {found}.")
    return Inputs(values, names)


def _iterated(module: nn.Module) -> tuple[Output, ...]:
    """Return what a module that is a sequence of tensors holds, as an `nn.ParameterList` does; else nothing.

    torch takes such a module for the sequence it is.
    """
    try:
        entries = iter(module)  # type: ignore[call-overload]
        first: Any = next(entries)
    except Exception:
        return ()  # no sequence, or an empty one: torch would refuse it
    is_one = _torch.is_tensor_like(first) or isinstance(first, GradientEdge)
    return (first, *entries) if is_one else ()


def gradients_for(outputs: Sequence[Output], grads: Gradients, *, batched: bool) -> tuple[Tensor | None, ...]:
    """Return one gradient per output: those given, checked, and ones for scalars where none was given.

    An output that requires no gradient and came without one keeps None: the engine has the last word on it.
    """
    if grads is None:
        return tuple(_implicit(output, index, batched) for index, output in enumerate(outputs))
    given = (grads,) if isinstance(grads, Tensor) else tuple(grads)
    for index, grad in enumerate(given):
        if grad is not None and not isinstance(grad, Tensor):
            raise GradientTypeError(
                f"gradients can be either Tensors or None, but got {type(grad).__name__}\n"
                f"It is the one for output {index}."
            )
    if len(given) != len(outputs):
        raise GradientMismatchError(
            f"got {len(outputs)} tensors and {len(given)} gradients\n"
            + _explain.which_without_partner(outputs, len(given))
        )
    return tuple(
        _implicit(output, index, batched) if grad is None else _checked(output, grad, index, batched)
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


def _implicit(output: Output, index: int, batched: bool) -> Tensor | None:
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
        raise NonScalarOutputError(_explain.non_scalar(output, index))
    if not dtype.is_floating_point:
        raise NonScalarOutputError(_explain.non_real(output, index, dtype))


def _check_not_batched(index: int, batched: bool) -> None:
    if batched:
        raise ArgumentError(
            f"is_grads_batched=True: output {index} came without a grad_output, and how many gradients are "
            "meant cannot be guessed. Pass one with a batch as its first dimension."
        )


def _checked(output: Output, grad: Tensor, index: int, batched: bool) -> Tensor:
    if isinstance(output, GradientEdge):
        _refuse_nested_edge(output)
        shape, dtype, _ = describe(output.node)[output.output_nr]
        same = _torch.same_shape(grad.shape[batched:], shape)
    else:
        _check_is_tensor(output, index)
        dtype = output.dtype
        if _torch.is_cpp_nested(output):
            if batched:
                raise BackwardError(
                    "Batched grads are not supported with Nested Tensor.\n"
                    f"output {index} is one. Call grad once per gradient, or use layout=torch.jagged."
                )
            same = grad.is_nested and torch.is_same_size(output, grad)
        else:
            same = not _torch.is_cpp_nested(grad) and _torch.same_shape(grad.shape[batched:], output.shape)
    if not same or grad.dim() < batched:
        raise GradientMismatchError(_explain.shape_mismatch(output, grad, index, batched))
    if dtype.is_complex != grad.dtype.is_complex:
        raise GradientMismatchError(_explain.dtype_mismatch(output, grad, index, dtype))
    return grad


def _check_is_tensor(output: Any, index: int) -> None:
    if not isinstance(output, Tensor):
        found = type(output).__name__
        raise GradientTypeError(f"output {index} is a {found}; expected a Tensor or a GradientEdge.")


def _refuse_nested_edge(edge: GradientEdge) -> None:
    if _torch.is_cpp_nested_edge(edge):
        raise BackwardError(
            "C++ NestedTensor are not supported with GradientEdge\n"
            "Pass the nested tensor itself, or make it with layout=torch.jagged."
        )
