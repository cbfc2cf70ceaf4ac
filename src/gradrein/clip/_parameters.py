"""Whatever is passed where parameters are expected, as a list of parameters with names where there are any."""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from .._torch.dtensor import grads_of
from .._warn import warn
from ..errors import GradientTypeError, NotAParameterError
from ..graph import find_names

Target: TypeAlias = (
    Tensor
    | torch.nn.Module
    | torch.optim.Optimizer
    | Mapping[str, Tensor]
    | Iterable[Tensor]
    | Iterable[tuple[str, Tensor]]
)
"""A tensor, an iterable of them, a module, an optimizer, `named_parameters()`, or a dict."""

# torch's own words, kept: people filter on them.
_EMPTY_GENERATOR = "`parameters` is an empty generator, no gradient clipping will occur."


def named(target: Target) -> tuple[list[str] | None, list[Tensor]]:
    """Return names (None where the target has none) and parameters, in order. An iterator is consumed once."""
    if isinstance(target, Tensor):
        return None, [target]
    if isinstance(target, torch.nn.Module):
        target = dict(target.named_parameters())
    if isinstance(target, torch.optim.Optimizer):
        return _of_groups(target.param_groups)
    if isinstance(target, Mapping):
        return [str(name) for name in target], [_parameter(p) for p in target.values()]
    try:
        entries: list[Any] = list(target)
    except TypeError as error:
        raise GradientTypeError(_not_a_parameter(target)) from error
    if not entries and not hasattr(target, "__len__"):
        _warn_exhausted(target)
    if entries and isinstance(entries[0], tuple):
        return [str(name) for name, _ in entries], [_parameter(p) for _, p in entries]
    if entries and isinstance(entries[0], Mapping):  # optimizer.param_groups
        return _of_groups(entries)
    return None, [_parameter(p) for p in entries]


def _of_groups(groups: list[dict[str, Any]]) -> tuple[list[str] | None, list[Tensor]]:
    parameters = [p for group in groups for p in group["params"]]
    if groups and all("param_names" in group for group in groups):  # the optimizer was given named parameters
        return [name for group in groups for name in group["param_names"]], parameters
    return None, parameters


def gradients(target: Target) -> tuple[list[Tensor], list[Tensor]]:
    """Return the parameters of a target, and their gradients: each once, however often its parameter is listed."""
    parameters, found = with_gradients(target)
    return parameters, present_once(found)


def with_gradients(target: Target) -> tuple[list[Tensor], list[Tensor | None]]:
    """Return the parameters of a target, and the gradient of each."""
    # The usual case, and the one that has to be fast, is a list of parameters.
    parameters = target if type(target) is list else named(target)[1]
    try:
        found = grads_of(parameters)
    except AttributeError:  # a list of pairs, of param groups, or of something else
        parameters = named(target)[1]
        found = grads_of(parameters)
    if not any(g is not None for g in found):
        warn_raw_gradients(parameters)
    return parameters, found


def present_once(found: list[Tensor | None]) -> list[Tensor]:
    """Return the gradients that there are, each once."""
    return unique([g for g in found if g is not None])


def live_names(parameters: Sequence[Tensor]) -> list[str]:
    """Return a name for each parameter: that of the live module that owns it, else its index in the list."""
    known = find_names()
    return [known.of(p) or f"parameter {i}" for i, p in enumerate(parameters)]


def unique(tensors: list[Tensor]) -> list[Tensor]:
    """Return each tensor object once, in order."""
    seen = {id(t): t for t in tensors}
    return tensors if len(seen) == len(tensors) else list(seen.values())


def _parameter(entry: Any) -> Tensor:
    if isinstance(entry, Tensor):
        return entry
    raise NotAParameterError(_not_a_parameter(entry))


def _not_a_parameter(found: object) -> str:
    return (
        f"a parameter was expected, found {type(found).__name__}: {found!r:.80}. Pass a tensor, an iterable of "
        "tensors, a module, an optimizer, `model.named_parameters()` or a dict of tensors."
    )


def _warn_exhausted(target: object) -> None:
    if isinstance(target, types.GeneratorType):
        warn(_EMPTY_GENERATOR, UserWarning)
        return
    warn(
        f"the {type(target).__name__} passed as parameters yields nothing, so no gradient was clipped. An iterator "
        "can be consumed only once: pass a list, or create a new one for each call.",
    )


def warn_raw_gradients(parameters: list[Tensor]) -> None:
    """Warn where nothing could be clipped because gradients were passed in place of parameters."""
    if parameters and not any(p.requires_grad or p.grad is not None for p in parameters):
        warn(
            f"none of the {len(parameters)} tensors passed requires a gradient or has one, so nothing was clipped. "
            "If these are gradients, pass the parameters they belong to (their `.grad` is what is clipped).",
        )
