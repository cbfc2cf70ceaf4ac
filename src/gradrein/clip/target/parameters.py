"""Whatever is passed where parameters are expected, as a list of parameters with names where there are any."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..._warn import warn
from ...errors import GradientTypeError, NotAParameterError
from ...graph import find_names

Target: TypeAlias = (
    Tensor
    | torch.nn.Module
    | torch.optim.Optimizer
    | Mapping[str, Tensor]
    | Iterable[Tensor]
    | Iterable[tuple[str, Tensor]]
)
"""A tensor, an iterable of them, a module, an optimizer, `named_parameters()`, or a dict."""

GROUP = "group:"  # how a pattern for an optimizer's parameter group begins


def named(target: Target) -> tuple[list[str] | None, list[Tensor]]:
    """Return names (None where the target has none) and parameters, in order. An iterator is consumed once."""
    if isinstance(target, Tensor):
        return None, [target]
    if isinstance(target, torch.nn.Module):
        target = dict(target.named_parameters())
    if isinstance(target, torch.optim.Optimizer):
        return _of_groups(target.param_groups)
    if isinstance(target, Mapping):
        return [str(name) for name in target], _parameters(list(target.values()))
    try:
        entries: list[Any] = list(target)
    except TypeError as error:
        raise GradientTypeError(_not_a_parameter(target)) from error
    if not entries and not hasattr(target, "__len__"):
        # torch's own words, also of other iterators: people filter on them.
        warn("`parameters` is an empty generator, no gradient clipping will occur.")
    if entries and isinstance(entries[0], tuple):
        return [str(name) for name, _ in entries], _parameters([p for _, p in entries])
    if entries and isinstance(entries[0], Mapping):  # optimizer.param_groups
        return _of_groups(entries)
    return None, _parameters(entries)


def _of_groups(groups: list[dict[str, Any]]) -> tuple[list[str] | None, list[Tensor]]:
    parameters = [p for group in groups for p in group["params"]]
    if groups and all("param_names" in group for group in groups):  # the optimizer was given named parameters
        return [name for group in groups for name in group["param_names"]], parameters
    return None, parameters


def group_labels(target: Any) -> list[str] | None:
    """Return `group:0` and so on for each parameter of an optimizer, by its parameter group; None for other targets."""
    groups = target.param_groups if isinstance(target, torch.optim.Optimizer) else target
    if type(groups) is not list or not groups or not all(isinstance(group, Mapping) for group in groups):
        return None
    return [f"{GROUP}{k}" for k, group in enumerate(groups) for _ in group["params"]]


def parameters_of(target: Target) -> list[Tensor]:
    """Return the parameters of a target."""
    return named(target)[1]


def once(grads: list[Tensor | None]) -> tuple[list[int], list[Any]]:
    """Return where the gradients are that there are, each where it is listed first, and these."""
    first = {id(g): i for i, g in reversed(list(enumerate(grads))) if g is not None}
    where = sorted(first.values())
    return where, [grads[i] for i in where]


def live_names(parameters: Sequence[Tensor]) -> list[str]:
    """Return a name for each parameter: that of the live module that owns it, else its index in the list."""
    known = find_names()
    return [known.of(p) or f"parameter {i}" for i, p in enumerate(parameters)]


def _parameters(entries: list[Any]) -> list[Tensor]:
    for entry in entries:
        if not isinstance(entry, Tensor):
            raise NotAParameterError(_not_a_parameter(entry))
    return entries


def _not_a_parameter(given: object) -> str:
    return (
        f"a parameter was expected, found {type(given).__name__}: {given!r:.80}. Pass a tensor, an iterable of "
        "tensors, a module, an optimizer, `model.named_parameters()` or a dict of tensors."
    )


def warn_raw_gradients(parameters: list[Tensor]) -> None:
    """Warn where nothing could be clipped because gradients were passed in place of parameters."""
    if parameters and not any(p.requires_grad or p.grad is not None for p in parameters):
        warn(
            f"none of the {len(parameters)} tensors passed requires a gradient or has one, so nothing was clipped. "
            "If these are gradients, pass the parameters they belong to (their `.grad` is what is clipped).",
        )
