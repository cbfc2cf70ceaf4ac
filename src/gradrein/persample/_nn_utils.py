"""torch's own entry point for per-sample gradients, by the same name and contract."""

from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from .. import graph
from .._torch.pytree import flatten
from ..errors import CallArgumentError, UnsupportedOperationError, UnusedInputError
from . import engine
from ._output_batch import Value, losses_of, tensor_of, with_tensor
from ._per_sample import per_sample
from .gate.unsupported import refuse_sharded
from .queries.result import PerSample

_Split: TypeAlias = Callable[[list[Tensor]], list[Tensor | None]]


def call_for_per_sample_grads(
    module: nn.Module, *, batch_size: int | None = None, loss_reduction: str = "sum", batch_first: bool = True
) -> Callable[..., Any]:
    """Return the module's forward such that backward gives every trainable parameter a ``grad_sample``.

    A drop-in for ``torch.nn.utils._per_sample_grad.call_for_per_sample_grads``, for any module. After
    backward ``parameter.grad_sample`` has shape (batch, *parameter.shape), ``parameter.grad`` is unchanged,
    and frozen or unused parameters have neither.

    Args:
        module: the module to call.
        batch_size: the number of samples; by default that of the tensors among the arguments.
        loss_reduction: "sum", or "mean" if the loss will divide by the batch size, which is then undone.
        batch_first: whether the samples are the first dimension of inputs and outputs; otherwise the second. Packed
            sequences and the states of recurrent layers are recognised.

    Returns:
        A function to call like the module.

    Raises:
        CallArgumentError: an argument has the wrong type, a parameter still has a ``grad_sample``,
            (when the result is called) the batch size cannot be determined or matches no input, or (in backward) the
            outputs have no dimension that separates the samples.
        UnsupportedOperationError: the gradient of an input is asked for with ``create_graph=True``.

    Examples:
        >>> import torch
        >>> from gradrein import call_for_per_sample_grads
        >>> model = torch.nn.Linear(4, 3)
        >>> call = call_for_per_sample_grads(model, batch_size=5, loss_reduction="mean")
        >>> call(torch.randn(5, 4)).mean().backward()
        >>> model.weight.grad_sample.shape, model.weight.grad
        (torch.Size([5, 3, 4]), None)

    See Also:
        [`gradrein.per_sample`][]
    """
    _check(module, batch_size, loss_reduction)
    for name, parameter in module.named_parameters():
        if getattr(parameter, "grad_sample", None) is not None:
            raise CallArgumentError(
                f"call_for_per_sample_grads: `{name}` still holds a grad_sample, and new ones would be "
                "added to it. Set its grad_sample to None first."
            )

    @wraps(module.forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return _call(module, args, kwargs, batch_size, loss_reduction == "mean", 0 if batch_first else 1)

    return forward


def _check(module: Any, batch_size: Any, loss_reduction: Any) -> None:
    if loss_reduction not in ("sum", "mean"):
        raise CallArgumentError(
            f"call_for_per_sample_grads: loss_reduction must be 'sum' or 'mean', found {loss_reduction!r}."
        )
    if not isinstance(module, nn.Module):
        raise CallArgumentError(f"call_for_per_sample_grads: expected an nn.Module, found {type(module).__name__}.")
    refuse_sharded(module)
    is_count = isinstance(batch_size, int) and not isinstance(batch_size, bool) and batch_size > 0
    if batch_size is not None and not is_count:
        raise CallArgumentError(
            f"call_for_per_sample_grads: batch_size must be None or a positive integer, found {batch_size!r:.80}."
        )


def _batch_size(module: nn.Module, units: list[Any], first: int, batch_size: int | None) -> int:
    """Return the number of samples, as the inputs have it; refuse one that was passed and that no input has."""
    tensors = [unit for unit in units if isinstance(unit, Tensor) and unit.dim() > first]
    packed = {int(unit.batch_sizes[0]) for unit in units if isinstance(unit, PackedSequence)}
    if batch_size is not None:
        sizes = packed | {tensor.shape[first] for tensor in tensors}
        if sizes and batch_size not in sizes:
            raise CallArgumentError(
                f"call_for_per_sample_grads: batch_size is {batch_size}, and no input has that many samples: dimension "
                f"{first} of the inputs has sizes {sorted(sizes)}."
            )
        return batch_size
    if isinstance(module, nn.RNNBase):  # what follows is a state, which has its samples second
        tensors = tensors[:1]
    sizes = packed or {tensor.shape[first] for tensor in tensors}
    if len(sizes) != 1:
        which = f"sizes {sorted(sizes)}" if sizes else "no tensor that has one"
        raise CallArgumentError(
            f"call_for_per_sample_grads: the batch size cannot be determined from dimension {first} of the inputs: "
            f"found {which}. Pass batch_size."
        )
    return sizes.pop()


def _call(module: nn.Module, args: Any, kwargs: Any, batch_size: int | None, mean: bool, first: int) -> Any:
    """Run the module on inputs cut off from their history, and hand its outputs on through one node."""
    given, rebuild = flatten((args, kwargs))
    count = _batch_size(module, given, first, batch_size)
    inner = [_with_gradient(unit) for unit in given]
    inner_args, inner_kwargs = rebuild(inner)
    outputs, rebuild_outputs = flatten(module(*inner_args, **inner_kwargs))
    live = [i for i, out in enumerate(outputs) if _needs_gradient(out)]
    if not live:
        return rebuild_outputs(outputs)
    where = [i for i, unit in enumerate(given) if _needs_gradient(unit)]

    def split(gradients: list[Tensor]) -> list[Tensor | None]:
        pairs = [(outputs[i], g) for i, g in zip(live, gradients, strict=True)]
        losses = losses_of(pairs, [unit for unit in inner if isinstance(unit, Value)], count, first)
        with suppress(UnusedInputError):  # outputs may depend on inputs alone
            if any(parameter.requires_grad for parameter in module.parameters()):
                _hand_out(per_sample(losses, module), module, count if mean else 1)
        if not where:
            return []
        edges = [graph.edge_of(tensor_of(inner[i])) for i in where]
        return list(engine.gradients_at(losses, torch.ones_like(losses), edges))

    # Inputs may need no gradient, and yet the node must be in the graph.
    start = torch.zeros((), requires_grad=True)
    handed: tuple[Tensor, ...] = PerSampleGrads.apply(  # type: ignore[no-untyped-call]
        split, [tensor_of(outputs[i]) for i in live], start, *(tensor_of(given[i]) for i in where)
    )
    by_place = {i: with_tensor(outputs[i], out) for i, out in zip(live, handed, strict=True)}
    return rebuild_outputs([by_place.get(i, out) for i, out in enumerate(outputs)])


def _hand_out(ps: PerSample, module: nn.Module, factor: int) -> None:
    blocks = {name: block * factor for name, block in ps.grads().items()}
    for name, block in blocks.items():
        parameter: Any = module.get_parameter(name)
        held = getattr(parameter, "grad_sample", None)
        parameter.grad_sample = block if held is None else held + block


def _needs_gradient(unit: Any) -> bool:
    return isinstance(unit, Value) and tensor_of(unit).requires_grad


def _with_gradient(unit: Any) -> Any:
    """Return an input that needs a gradient: where it stands in the graph shows whose its rows are."""
    if not isinstance(unit, Value):
        return unit
    x = tensor_of(unit)
    has_gradient = (x.is_floating_point() or x.is_complex()) and x.dim() > 0
    return with_tensor(unit, x.detach().requires_grad_(has_gradient))


class PerSampleGrads(torch.autograd.Function):
    """The node through which outputs are handed on: its backward splits the gradient it gets."""

    @staticmethod
    def forward(ctx: Any, split: _Split, outputs: list[Tensor], _start: Tensor, *_inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.split = split
        return tuple(out.detach().clone() for out in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        if torch.is_grad_enabled() and any(ctx.needs_input_grad[3:]):
            raise UnsupportedOperationError(
                "call_for_per_sample_grads: the gradient of an input is to be differentiated a second time "
                "(create_graph=True, as for a gradient penalty). Compute the penalty with the module itself.",
                "PerSampleGradsBackward",
            )
        with torch.no_grad():
            return None, None, None, *ctx.split(list(gradients))
