"""Copy and pickle optimizers together with what clips at their steps.

torch leaves the hooks of an optimizer out of its copies, so a copy would go on without clipping and without a word. An
optimizer with a clipper is therefore reduced by a function of its own, an attribute of that one object, which `copy`
and `pickle` look for before they ask its class.
"""

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch

from ..errors import ArgumentError

_T = TypeVar("_T")


class Attachable(Protocol):
    """Something that hooks itself into an optimizer."""

    def _attach(self, optimizer: torch.optim.Optimizer) -> None: ...


def refuse_shallow(kind: str) -> ArgumentError:
    """Return the error for `copy.copy`, after which one clipper would stand for two optimizers."""
    return ArgumentError(
        f"a shallow copy of {kind} would share its policy and gradients with the original, and clip them twice. Use "
        "copy.deepcopy."
    )


def carry(optimizer: Any, clipper: Attachable) -> None:
    """Make copies of the optimizer have a copy of the clipper."""
    vars(optimizer).setdefault("_gradrein_clippers", []).append(clipper)
    optimizer.__reduce_ex__ = lambda protocol: _reduce(optimizer, protocol)


def attached(optimizer: Any, kind: type[_T]) -> list[_T]:
    """Return the clippers of a class that copies of the optimizer would have, too."""
    return [clipper for clipper in vars(optimizer).get("_gradrein_clippers", []) if isinstance(clipper, kind)]


def drop(optimizer: Any, clipper: Attachable) -> None:
    """Leave the clipper out of copies again."""
    clippers = vars(optimizer).get("_gradrein_clippers", [])
    if clipper in clippers:
        clippers.remove(clipper)
        if not clippers:
            del optimizer._gradrein_clippers, optimizer.__reduce_ex__


def _reduce(optimizer: Any, protocol: int) -> tuple[Any, ...]:
    kind: Any = type(optimizer)
    make, args, state, *items = kind.__reduce_ex__(optimizer, max(2, protocol))
    return _blank, (make, args), (state, list(optimizer._gradrein_clippers)), *items


def _blank(make: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Return an optimizer without its state, that takes on the clippers when it is given one."""
    optimizer = make(*args)

    def restore(saved: tuple[Any, list[Attachable]]) -> None:
        del optimizer.__setstate__
        state, clippers = saved
        if any(vars(clipper).get("_step") is not None for clipper in clippers):
            raise refuse_shallow("an optimizer with a Clipper")
        optimizer.__setstate__(state)
        for clipper in clippers:
            clipper._attach(optimizer)

    optimizer.__setstate__ = restore
    return optimizer
