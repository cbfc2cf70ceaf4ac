"""torch's own entry point for per-sample gradients, by the same name and contract."""

from collections.abc import Callable
from functools import wraps
from itertools import product
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from .. import graph
from ..errors import CallArgumentError, UnsupportedOperationError
from . import _reentrant, _torch
from ._api import per_sample
from ._cuts import Losses

_Split: TypeAlias = Callable[[list[Tensor]], list[Tensor | None]]


def call_for_per_sample_grads(
    module: nn.Module, *, batch_size: int | None = None, loss_reduction: str = "sum", batch_first: bool = True
) -> Callable[..., Any]:
    """Return the module's forward such that backward gives every trainable parameter a ``grad_sample``.

    A drop-in for ``torch.nn.utils._per_sample_grad.call_for_per_sample_grads``, for any module. After
    backward ``parameter.grad_sample`` has shape (batch, *parameter.shape), ``parameter.grad`` is as it was,
    and frozen or unused parameters have neither.

    Args:
        module: the module to call.
        batch_size: the number of samples; by default that of the tensors among the arguments.
        loss_reduction: "sum", or "mean" if the loss will divide by the batch size, which is then undone.
        batch_first: whether the samples are the first dimension of inputs and outputs, else the second.

    Returns:
        A function to call like the module.

    Raises:
        CallArgumentError: an argument is of the wrong kind, a parameter still holds a ``grad_sample``, or
            (when the result is called) the batch size cannot be told.

    Example:
        >>> import torch
        >>> from bridle import call_for_per_sample_grads
        >>> model = torch.nn.Linear(4, 3)
        >>> call = call_for_per_sample_grads(model, batch_size=5, loss_reduction="mean")
        >>> call(torch.randn(5, 4)).mean().backward()
        >>> model.weight.grad_sample.shape, model.weight.grad
        (torch.Size([5, 3, 4]), None)
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
        count = _batch_size(args, kwargs, batch_first) if batch_size is None else batch_size
        factor = count if loss_reduction == "mean" else 1
        return _call(module, args, kwargs, count, factor, batch_first)

    return forward


def _check(module: Any, batch_size: Any, loss_reduction: Any) -> None:
    if loss_reduction not in ("sum", "mean"):
        raise CallArgumentError(
            f"call_for_per_sample_grads: loss_reduction must be 'sum' or 'mean', found {loss_reduction!r}."
        )
    if not isinstance(module, nn.Module):
        raise CallArgumentError(f"call_for_per_sample_grads: expected an nn.Module, found {type(module).__name__}.")
    if _torch.sharded_states(module.parameters()):
        raise UnsupportedOperationError(
            "call_for_per_sample_grads: the module is spread by fully_shard, and a backward pass through it would "
            "gather its parameters as often as each rank happens to need. Use bridle.per_sample, which gathers them "
            "itself."
        )
    if batch_size is not None and (not isinstance(batch_size, int) or isinstance(batch_size, bool)):
        raise CallArgumentError(
            f"call_for_per_sample_grads: batch_size must be None or an integer, found {type(batch_size).__name__}."
        )
    if batch_size is not None and batch_size < 1:
        raise CallArgumentError(f"call_for_per_sample_grads: batch_size must be positive, found {batch_size}.")


def _batch_size(args: Any, kwargs: Any, batch_first: bool) -> int:
    dim = 0 if batch_first else 1
    tensors = [leaf for leaf in _torch.flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
    sizes = sorted({tensor.shape[dim] for tensor in tensors if tensor.dim() > dim})
    if len(sizes) != 1:
        found = f"sizes {sizes}" if sizes else "no tensor that has one"
        raise CallArgumentError(
            f"call_for_per_sample_grads: the batch size cannot be told from dimension {dim} of the inputs: "
            f"found {found}. Pass batch_size."
        )
    return sizes[0]


def _call(module: nn.Module, args: Any, kwargs: Any, count: int, factor: int, batch_first: bool) -> Any:
    """Run the module on inputs cut off from their history, and hand its outputs on through one node."""
    given, rebuild = _torch.flatten((args, kwargs))
    inner = [_asked(leaf) if isinstance(leaf, Tensor) else leaf for leaf in given]
    inner_args, inner_kwargs = rebuild(inner)
    outputs, rebuild_outputs = _torch.flatten(module(*inner_args, **inner_kwargs))
    live = [i for i, out in enumerate(outputs) if isinstance(out, Tensor) and out.requires_grad]
    if not live:
        return rebuild_outputs(outputs)
    where = [i for i, leaf in enumerate(given) if isinstance(leaf, Tensor) and leaf.requires_grad]

    def split(gradients: list[Tensor]) -> list[Tensor | None]:
        pairs = [(outputs[i], g) for i, g in zip(live, gradients, strict=True)]
        floats = [leaf for leaf in inner if isinstance(leaf, Tensor) and leaf.requires_grad]
        losses = _losses(pairs, count, batch_first, floats)
        ps = per_sample(losses, module)
        for name, _, block in ps.stream():
            parameter: Any = module.get_parameter(name)
            held = getattr(parameter, "grad_sample", None)
            block = block * factor
            parameter.grad_sample = block if held is None else held + block
        if not where:
            return []
        root = _reentrant.opened(Losses(losses, torch.arange(count), count)).root
        return list(_torch.gradients_at(root, torch.ones_like(root), [graph.edge_of(inner[i]) for i in where]))

    # Inputs may need no gradient, and yet the node must be in the graph.
    start = torch.zeros((), requires_grad=True)
    handed: tuple[Tensor, ...] = PerSampleGrads.apply(  # type: ignore[no-untyped-call]
        split, [outputs[i] for i in live], start, *(given[i] for i in where)
    )
    by_place = dict(zip(live, handed, strict=True))
    return rebuild_outputs([by_place.get(i, out) for i, out in enumerate(outputs)])


def _asked(x: Tensor) -> Tensor:
    """Return an input whose samples can be asked for: where it stands in the graph shows whose it is."""
    return x.detach().requires_grad_(x.is_floating_point() and x.dim() > 0)


class PerSampleGrads(torch.autograd.Function):
    """The node through which outputs are handed on: its backward splits the gradient it gets."""

    @staticmethod
    def forward(ctx: Any, split: _Split, outputs: list[Tensor], _start: Tensor, *_inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.split = split
        return tuple(out.detach().clone() for out in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, None, None, *ctx.split(list(gradients))


def _losses(pairs: list[tuple[Tensor, Tensor]], count: int, batch_first: bool, inputs: list[Tensor]) -> Tensor:
    """Return one number per sample whose gradient is what backward was given for it."""
    several = [_batch_dims(out, count, batch_first) for out, _ in pairs]
    for dims in product(*several):
        with torch.enable_grad():
            parts = [
                (out * g.detach()).movedim(dim, 0).reshape(count, -1).sum(1)
                for (out, g), dim in zip(pairs, dims, strict=True)
            ]
            losses = torch.stack(parts).sum(0)
        if all(len(dims) == 1 for dims in several) or _fits(losses, inputs, count, batch_first):
            return losses
    raise CallArgumentError(
        "call_for_per_sample_grads: none of the outputs' dimensions separates the samples as the inputs do."
    )


def _batch_dims(out: Tensor, count: int, batch_first: bool) -> list[int]:
    first = 0 if batch_first else 1
    dims = sorted((dim for dim, size in enumerate(out.shape) if size == count), key=lambda dim: dim != first)
    if not dims:
        raise CallArgumentError(
            f"call_for_per_sample_grads: an output of shape {tuple(out.shape)} has no dimension of the "
            f"batch size {count}, so its samples cannot be told apart."
        )
    # With one sample every dimension will do. Where no input can be asked, the order decides.
    return dims[:1] if count == 1 else dims


def _fits(losses: Tensor, inputs: list[Tensor], count: int, batch_first: bool) -> bool:
    """Tell whether each loss depends on its own sample of the inputs, as far as the inputs can be asked."""
    floats = [x for x in inputs if x.dim() > (0 if batch_first else 1)]
    edges = [graph.edge_of(x) for x in floats]
    found = Losses(losses, torch.arange(count, device=losses.device), count).owners(edge.node for edge in edges)
    for x, edge in zip(floats, edges, strict=True):
        dim = 0 if batch_first else 1
        layouts = found[edge.node]
        if layouts is None:
            return False
        layout = layouts[edge.output_nr]
        expected = torch.arange(count).view(-1, *(1,) * (x.dim() - dim - 1)).expand(x.shape).reshape(-1)
        owners = layout.owner_of_each(x.numel(), x.device)
        if owners.numel() and not bool(((owners == expected) | (owners < 0)).all()):
            return False
    return True
