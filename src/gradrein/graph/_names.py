"""Names of tensors: given by the user, found in live modules, or found in the caller's variables.

The search of the whole process takes milliseconds, so it runs only after something has gone wrong.
"""

import gc
import inspect
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType

from torch import Tensor, nn


@dataclass(frozen=True, eq=False)
class Names:
    """Names of parameters and buffers, by identity.

    A tensor with several names gets the first one.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 1))
        >>> names = gradrein.graph.find_names(model)
        >>> names.of(model[0].bias), names.module_of(model[0].bias)
        ('0.bias', '0')

    See Also:
        [`gradrein.graph.find_names`][]
    """

    # The tensors are held as well, so that their ids are not reused.
    _by_id: Mapping[int, tuple[str, Tensor]]

    def of(self, tensor: Tensor) -> str | None:
        """Return the name of this tensor (by identity), or None."""
        return self._by_id[id(tensor)][0] if id(tensor) in self._by_id else None

    def module_of(self, tensor: Tensor) -> str | None:
        """Return the path of the module that owns this tensor, '' for the model itself, None if it has no name."""
        name = self.of(tensor)
        return None if name is None else name.rpartition(".")[0]


def find_names(model: nn.Module | None = None) -> Names:
    """Return names for parameters and buffers.

    Args:
        model: the model. Without it, search every live module of the process; names then begin with the class of
            the outermost module. That takes milliseconds and is meant for error reporting.

    Returns:
        The names.

    Examples:
        >>> import torch
        >>> from gradrein import graph
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2))
        >>> graph.find_names(model).of(model[0].bias)
        '0.bias'
        >>> graph.find_names().of(model[0].bias)
        'Sequential.0.bias'

    See Also:
        [`gradrein.graph.variable_name`][], [`gradrein.graph.locate_nodes`][]
    """
    pairs = [] if model is None else _named(model, "")
    for root in live_models() if model is None else ():
        with suppress(Exception):  # its class overrides what names are read with, and raises
            pairs += _named(root, type(root).__name__)
    return Names({id(tensor): (name, tensor) for name, tensor in reversed(pairs)})


def variable_name(tensor: Tensor) -> str | None:
    """Return the name of a variable in the calling code that holds this tensor, or None.

    Examples:
        >>> gradrein.graph.variable_name(torch.zeros(4)) is None  # no variable holds it
        True

    See Also:
        [`gradrein.graph.find_names`][]
    """
    frame = sys._getframe().f_back
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        name = None if module.partition(".")[0] in ("gradrein", "torch") else _name_in(frame, tensor)
        if name is not None:
            return name
        frame = frame.f_back
    return None


def live_tensors() -> list[Tensor]:
    """Return every live tensor whose autograd metadata can be read.

    Examples:
        >>> x = torch.zeros(4)
        >>> any(found is x for found in gradrein.graph.live_tensors())
        True

    See Also:
        [`gradrein.graph.variable_name`][]
    """
    return [o for o in gc.get_objects() if issubclass(type(o), Tensor) and _is_readable(o)]


def live_models() -> list[nn.Module]:
    """Return every live module that is not part of another module, the largest first.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2))
        >>> any(found is model for found in gradrein.graph.live_models())
        True

    See Also:
        [`gradrein.graph.find_names`][]
    """
    # By type, not isinstance: that would trigger lazy proxies.
    live = {id(o): (o, _parts(o)) for o in gc.get_objects() if issubclass(type(o), nn.Module)}
    inside = {id(part) for model, parts in live.values() for part in parts if part is not model}
    outermost = [(model, len(parts)) for i, (model, parts) in live.items() if i not in inside and parts]
    return [model for model, _ in sorted(outermost, key=lambda one: -one[1])]


def _parts(model: nn.Module) -> list[nn.Module]:
    """Return the model and every module inside it; nothing for one that cannot be read, such as in its `__init__`."""
    try:
        return list(model.modules())
    except Exception:
        return []


def _is_readable(tensor: Tensor) -> bool:
    """Return whether the metadata can be read; torch refuses for some views, and a subclass may do anything."""
    try:
        _ = tensor.grad_fn, tensor.requires_grad, tensor.output_nr, tensor.shape
    except Exception:
        return False
    return True


def _name_in(frame: FrameType, tensor: Tensor) -> str | None:
    variables = frame.f_locals
    # A debugger or a test runner adds names that are not identifiers.
    name = next((name for name, value in variables.items() if value is tensor and str(name).isidentifier()), None)
    if sys.version_info < (3, 13) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        # `f_locals` is a copy that the frame would keep, and with it everything its variables hold now.
        variables.clear()
    return name


def _named(root: nn.Module, prefix: str) -> list[tuple[str, Tensor]]:
    return [*root.named_parameters(prefix), *root.named_buffers(prefix)]
