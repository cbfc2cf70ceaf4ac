"""The arguments of `Monitor`: what has no meaning is refused before the run, with the call that has."""

import contextlib
import os
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from .._validate import count
from ..errors import ArgumentError, ArgumentTypeError
from ..policies import Policy, by_norm
from ..policies.base import refuse_no_policy
from ..policies.named import build
from .record.writer import rounded

ClipOption: TypeAlias = float | str | Policy | None
"""The largest norm, "auto", the name of a policy, a policy, or None for no clipping.

See Also:
    [`gradrein.Monitor`][]
"""

_CALL = "gradrein.Monitor(model, optimizer)"
_LEAST_BYTES = 10_000
_LINE_KEYS = {"note", "after", "rank"}


def check_arguments(
    model: Any, optimizer: Any, record: Any, clip: Any, every: Any, flush_every: Any, max_bytes: Any, on_step: Any
) -> None:
    """Refuse arguments of `Monitor` that cannot mean anything."""
    if model is not None and not isinstance(model, nn.Module):
        raise ArgumentTypeError(
            f"`model` is a module, or None; found {_kind(model)}. Call {_CALL}, or {_CALL.replace('model', 'None')}."
        )
    if optimizer is not None and not _is_optimizer(optimizer):
        raise ArgumentTypeError(f"`optimizer` is an optimizer, or None; found {_kind(optimizer)}. Call {_CALL}.")
    if model is not None and optimizer is not None:
        _check_together(model, optimizer)
    if record is not None and not isinstance(record, str | os.PathLike):
        raise ArgumentTypeError(f"`record` is the path of a file, as in record='run.jsonl'; found {_kind(record)}.")
    if on_step is not None and not callable(on_step):
        raise ArgumentTypeError(
            f"`on_step` is a function that takes the content of `latest`, as in on_step=print; found {_kind(on_step)}."
        )
    count(every, "every")
    count(flush_every, "flush_every")
    count(max_bytes, "max_bytes", _LEAST_BYTES)
    check_clip(clip)


def check_clip(clip: Any) -> None:
    """Refuse what `clip=` cannot be."""
    if isinstance(clip, type):
        refuse_no_policy(clip)
    known = clip is None or isinstance(clip, int | float | str | Policy | Tensor)
    if not known or isinstance(clip, bool):
        raise ArgumentTypeError(
            f'`clip` is a largest norm such as 1.0, "auto", the name of a policy such as "zscore", or a policy such as '
            f"gradrein.by_norm(1.0); found {_kind(clip)}."
        )
    policy_of(clip)


def policy_of(clip: ClipOption) -> Policy | None:
    """Return a new policy for each call: those that adapt remember the norms of one optimizer.

    Raises:
        ArgumentError: (a ValueError) not a number above 0, nor the name of a policy.
    """
    if clip is None or isinstance(clip, Policy):
        return clip
    number = _number(clip) if isinstance(clip, str) else clip
    return build(str(clip)) if number is None else by_norm(number)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def check_layers(norms: Any, model: nn.Module | None) -> None:
    """Refuse what chooses no layers."""
    if norms is None:
        return
    patterns = list(norms.values()) if isinstance(norms, Mapping) else [norms]
    if not patterns or not all(isinstance(pattern, str) for pattern in patterns):
        raise ArgumentTypeError(
            '`norms` is a name pattern such as "layers.*", or patterns by label such as {"attention": "*.attn.*"}; '
            f"found {_kind(norms)}."
        )
    names = [] if model is None else [name for name, _ in model.named_parameters()]
    unmatched = [pattern for pattern in patterns if names and not any(fnmatchcase(name, pattern) for name in names)]
    if unmatched:
        raise ArgumentError(
            f"no parameter of the model matches the pattern {unmatched[0]!r} of `norms`; its parameters are "
            f"{', '.join(names[:3])}{' ...' if len(names) > 3 else ''}."
        )


def check_norms(norms: Any) -> None:
    """Refuse what is not a vector with one norm for each sample."""
    if not isinstance(norms, Tensor):
        raise ArgumentTypeError(f"per_sample: `norms` is a tensor, as of `ps.norms()`; found {_kind(norms)}.")
    if norms.dim() != 1 or not norms.numel() or norms.is_complex():
        raise ArgumentError(
            f"per_sample: `norms` has one real number for each sample, as of `ps.norms()`; found {norms.dtype} of "
            f"shape {tuple(norms.shape)}."
        )


def plain_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return numbers and strings as JSON has them.

    Raises:
        ArgumentError: (a ValueError) something else, or a name that the line needs itself.
    """
    if taken := _LINE_KEYS & values.keys():
        raise ArgumentError(f"note: the record itself uses the name {min(taken)!r}; give the value another.")
    return {name: _plain(name, value) for name, value in values.items()}


def _plain(name: str, value: Any) -> Any:
    if hasattr(value, "item"):  # of torch and numpy
        with contextlib.suppress(ValueError, RuntimeError):  # several elements
            value = value.item()
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return rounded([value], 9)[0]
    raise ArgumentError(
        f"note: {name!r} has to be a number or a string; found {type(value).__name__}. For a tensor with several "
        "elements, pass its mean or one of them."
    )


def _check_together(model: nn.Module, optimizer: Any) -> None:
    stepped = [p for group in optimizer.param_groups for p in group["params"]]
    held = {id(p) for p in model.parameters()}
    if held and stepped and not any(id(p) in held for p in stepped):
        raise ArgumentError(
            f"the optimizer has none of the model's parameters: {type(optimizer).__name__} has {len(stepped)}, "
            f"{type(model).__name__} has {len(held)} others. Pass the model that the optimizer was built for, or None "
            "to search for names."
        )


def _is_optimizer(found: Any) -> bool:
    return isinstance(found, torch.optim.Optimizer) or (hasattr(found, "param_groups") and hasattr(found, "step"))


def _kind(found: Any) -> str:
    return f"{type(found).__name__}: {found!r:.60}".replace("\n", " ")
