"""Arguments of `per_sample` and of its answers: what has no meaning is refused, with the call that has."""

from collections.abc import Collection, Iterable, Mapping
from math import inf, prod
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ..._torch.dtensor import is_dtensor
from ..._torch.storage import is_fake
from ...errors import (
    ArgumentError,
    ArgumentTypeError,
    GradientTypeError,
    GradreinError,
    NoGraphError,
    UnsupportedOperationError,
    UnusedInputError,
)
from .. import tracing
from ..engine import Losses

Parameters: TypeAlias = nn.Module | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]] | Iterable[Tensor] | Tensor

_CALL = "gradrein.per_sample(losses, model)"


def read_losses(losses: Tensor, groups: Tensor | None) -> tuple[Losses, Tensor | None]:
    """Return what is differentiated, and the numbers of the groups."""
    _check_losses(losses)
    count = losses.shape[0]
    with torch.enable_grad():  # a tensor of its own, which stays when the losses are changed in place
        root = losses.clone() if losses.dim() == 1 else losses.reshape(count, prod(losses.shape[1:])).sum(1)
    if groups is None:
        return Losses(root, range(count), count), None
    _check_groups(groups, count)
    numbers, sample_of = torch.unique(groups.to("cpu"), return_inverse=True)
    return Losses(root, tuple(sample_of.tolist()), len(numbers)), numbers


def _check_losses(losses: Any) -> None:
    if not isinstance(losses, Tensor):
        raise ArgumentTypeError(
            f"per_sample: `losses` must be a tensor with one loss per sample, found {type(losses).__name__}. "
            f"{_instead_of(losses)}"
        )
    problem = _problem(losses)
    if problem:
        raise ArgumentError(f"per_sample: `losses` {problem}")
    if torch.is_inference_mode_enabled() and not losses.is_inference():
        raise NoGraphError(
            "per_sample: it was called in torch.inference_mode(), where autograd is disabled. Call it outside.", ()
        )
    if not losses.requires_grad and losses.shape[0]:  # a rank without samples need not have run the model
        raise NoGraphError(
            "per_sample: `losses` has no recorded graph. Was it computed under no_grad or inference_mode, detached, or "
            "from parameters that need no gradient? Compute it outside of these, with gradients on, and pass it as the "
            "loss function returns it.",
            (),
        )


def _problem(losses: Tensor) -> str:
    """Return what is wrong with a tensor of losses, and what to do; nothing if it may be split."""
    if losses.is_nested or losses.layout != torch.strided:
        which = "a nested tensor" if losses.is_nested else f"a tensor of layout {losses.layout}"
        way = "torch.stack([part.sum() for part in losses.unbind()])" if losses.is_nested else "losses.to_dense()"
        return f"must be a dense tensor with one loss per sample, found {which}. Pass {way}."
    if losses.is_meta or (type(losses) is not Tensor and is_fake(losses) and not tracing.is_traced()):
        which = "it is on the meta device" if losses.is_meta else "it is a fake tensor"
        return f"has no values: {which}. Compute it on a device that holds the model and the data."
    if losses.is_complex():
        return f"must be real, found {losses.dtype}. Pass a real number for each, as losses.abs() or losses.real."
    if losses.dim() == 0:
        return "is a single number. Pass one loss per sample; most losses give that with reduction='none'."
    return ""


def _instead_of(given: Any) -> str:
    if isinstance(given, nn.Module):
        return f"The losses come first, then the model: {_CALL}."
    if isinstance(given, list | tuple) and given and isinstance(given[0], Tensor):
        return "Pass torch.stack(losses)."
    return f"Pass what the loss function returns with reduction='none', which has a recorded graph: {_CALL}."


def _check_groups(groups: Any, count: int) -> None:
    if not isinstance(groups, Tensor):
        raise ArgumentTypeError(
            f"per_sample: `sample_groups` must be a tensor with one number per sample, found "
            f"{type(groups).__name__}. (To name ranks, use `process_group`.)"
        )
    if tuple(groups.shape) != (count,) or groups.is_complex() or not bool(torch.isfinite(groups).all()):
        raise ArgumentError(
            f"per_sample: `sample_groups` must have one number per sample, not NaN or infinite, such as an int64 "
            f"tensor of shape ({count},); found {groups.dtype} of shape {tuple(groups.shape)}."
        )


def read_parameters(parameters: Parameters) -> dict[str, Tensor]:
    """Return the parameters that need a gradient, by name, each once."""
    named: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in _pairs(parameters):
        if not isinstance(tensor, Tensor):
            raise GradientTypeError(
                f"per_sample: parameter {name!r} is not a tensor but {type(tensor).__name__}. Pass the model, or its "
                "parameters: model.named_parameters()."
            )
        if not tensor.requires_grad or id(tensor) in seen:
            continue
        if not tensor.is_leaf:
            raise GradientTypeError(
                f"per_sample: {name!r} was computed from other tensors. Pass the parameters themselves, such "
                "as model.named_parameters()."
            )
        if tensor.layout is not torch.strided or tensor.is_nested:
            found = "nested" if tensor.is_nested else str(tensor.layout)
            raise UnsupportedOperationError(
                f"per_sample: parameter {name!r} is not a dense tensor but {found}. Keep its values in a dense "
                "parameter, and convert it to this layout in the forward pass.",
                where=str(name),
            )
        if str(name) in named:
            raise ArgumentError(
                f"per_sample: two parameters are called {str(name)!r}, of shapes {tuple(named[str(name)].shape)} "
                f"and {tuple(tensor.shape)}. Give each its own name: for several models, pass one "
                "torch.nn.ModuleDict of them."
            )
        seen.add(id(tensor))
        named[str(name)] = tensor
    return named


def _pairs(parameters: Any) -> list[tuple[Any, Any]]:
    if isinstance(parameters, nn.Module):
        return list(parameters.named_parameters())
    if isinstance(parameters, Mapping):
        return list(parameters.items())
    if isinstance(parameters, Tensor):
        return [("0", parameters)]
    if isinstance(parameters, torch.optim.Optimizer) or not isinstance(parameters, Iterable):
        raise GradientTypeError(
            f"per_sample: `parameters` must be a model, names with tensors, or tensors; found "
            f"{type(parameters).__name__}: {parameters!r:.80}. Pass the model: {_CALL}."
        )
    items = [item if isinstance(item, tuple) else (str(i), item) for i, item in enumerate(parameters)]
    if any(len(item) != 2 or not isinstance(item[0], str) for item in items):
        raise GradientTypeError("per_sample: `parameters` contains a tuple that is not a pair of a name and a tensor.")
    return items


def read_scale(scaler: Any) -> float:
    """Return what a `GradScaler` has multiplied the losses by."""
    if scaler is None:
        return 1.0
    if not callable(getattr(scaler, "get_scale", None)):
        raise ArgumentTypeError(
            f"per_sample: `scaler` is the torch.amp.GradScaler that has scaled the losses; found {scaler!r:.80}. Pass "
            "the scaler itself, or leave it out if losses are not scaled."
        )
    scale = float(scaler.get_scale())
    if not 0 < scale < inf:
        raise ArgumentError(
            f"per_sample: the scale of `scaler` is {scale}, so gradients cannot be unscaled. Start the GradScaler "
            "again with a smaller init_scale."
        )
    return scale


def unreached(parameters: Collection[str]) -> GradreinError:
    """Return the error about losses that depend on none of the parameters: probably they are those of another model."""
    if not parameters:
        return ArgumentError("per_sample: no parameter requires a gradient.")
    names = tuple(parameters)
    some = ", ".join(f"`{name}`" for name in names[:3]) + (f" and {len(names) - 3} more" if names[3:] else "")
    return UnusedInputError(
        f"per_sample: the losses depend on none of the parameters ({some}). Were they computed by another model, or by "
        "a copy of this one?",
        names,
    )


def check_weights(weights: Any, count: int) -> None:
    """Refuse what is not one real weight per sample."""
    if not isinstance(weights, Tensor):
        raise ArgumentTypeError(
            f"weighted_: expected a tensor with one weight per sample, found {type(weights).__name__}. Pass "
            f"a tensor of shape ({count},), or a function that makes it from the norms."
        )
    if tuple(weights.shape) != (count,) or weights.is_complex():
        raise ArgumentError(
            f"weighted_: expected one real weight per sample, shape ({count},), found {weights.dtype} of shape "
            f"{tuple(weights.shape)}."
        )


def read_direction(direction: Any, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a direction as dense tensors; refuse one that is not made of tensors of the parameters' shapes."""
    if not isinstance(direction, Mapping):
        raise ArgumentTypeError(
            f"direction: expected a dict from names of parameters to tensors, found {type(direction).__name__}. Pass "
            "for instance {name: p.grad for name, p in model.named_parameters()}, or nothing for the mean gradient."
        )
    for name, v in direction.items():
        if name not in parameters:
            raise ArgumentError(
                f"direction: there is no parameter called {name!r}. Names here: {', '.join(list(parameters)[:8])}."
            )
        if not isinstance(v, Tensor):
            raise ArgumentTypeError(f"direction: {name!r} must be a tensor, found {type(v).__name__}.")
        if is_dtensor(v):
            raise ArgumentError(f"direction: {name!r} is a DTensor. Pass the full tensor: full_tensor().")
        if v.shape != parameters[name].shape:
            raise ArgumentError(
                f"direction: {name!r} has shape {tuple(v.shape)}, its parameter {tuple(parameters[name].shape)}. Pass "
                "one direction at a time; the gradients of another batch go to cross(other)."
            )
        if v.is_complex() and not parameters[name].is_complex():
            raise ArgumentError(f"direction: {name!r} is complex, its parameter is real.")
    return {name: v.detach().to_dense() if v.layout != torch.strided else v.detach() for name, v in direction.items()}


def read_scales(scales: Any, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what gradients are multiplied by, for every parameter, and real."""
    read = read_direction(scales, parameters)
    missing = [name for name in parameters if name not in read]
    if missing:
        raise ArgumentError(
            f"project: `scales` needs a tensor for every parameter: see {missing[0]!r}. Ones leave a gradient as it is."
        )
    return read
