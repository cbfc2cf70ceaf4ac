"""Names for tensors: those the user gave, those of live modules, those of the caller's variables."""

import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from types import FrameType
from typing import TypeAlias

from torch import Tensor, nn

from ._live import live_models, tensors_of

NameSource: TypeAlias = nn.Module | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]


@dataclass(frozen=True, eq=False)
class Names:
    """Names of parameters and buffers, by identity.

    A tensor known by several names goes by the first.
    """

    # The tensors are held as well, so that an id stays theirs.
    _by_id: Mapping[int, tuple[str, Tensor]]

    def of(self, tensor: Tensor) -> str | None:
        """Return the name of this very tensor, or None."""
        return self._by_id[id(tensor)][0] if id(tensor) in self._by_id else None

    def module_of(self, tensor: Tensor) -> str | None:
        """Return the path of the module that owns this tensor, '' for the model itself."""
        name = self.of(tensor)
        return None if name is None else name.rpartition(".")[0]


def find_names(source: NameSource | None = None) -> Names:
    """Return names for parameters and buffers.

    Args:
        source: a model, a mapping from names to tensors, or pairs such as `named_parameters()`. Without it
            every module alive in the process is looked through, and names begin with the class of the
            outermost module. That takes milliseconds: meant for the moment after something has gone wrong.

    Returns:
        The names.

    Example:
        >>> import torch
        >>> from bridle import graph
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2))
        >>> graph.find_names(model).of(model[0].bias)
        '0.bias'
        >>> graph.find_names().of(model[0].bias)
        'Sequential.0.bias'
    """
    if source is None:
        pairs = [pair for root in live_models() for pair in _named(root, type(root).__name__)]
    elif isinstance(source, nn.Module):
        pairs = list(_named(source, ""))
    else:
        pairs = list(source.items() if isinstance(source, Mapping) else source)
    return Names({id(tensor): (name, tensor) for name, tensor in reversed(pairs)})


def variable_name(tensor: Tensor) -> str | None:
    """Return the name of a variable of the calling code that holds this very tensor, or None."""
    frame = sys._getframe().f_back
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        name = None if module.partition(".")[0] in ("bridle", "torch") else _name_in(frame, tensor)
        if name is not None:
            return name
        frame = frame.f_back
    return None


def _name_in(frame: FrameType, tensor: Tensor) -> str | None:
    variables = frame.f_locals
    # A debugger or a test runner adds names that nobody could have written.
    name = next((name for name, value in variables.items() if value is tensor and str(name).isidentifier()), None)
    if sys.version_info < (3, 13) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        # A copy that the frame would keep, and with it everything its variables held at this moment.
        variables.clear()
    return name


def _named(root: nn.Module, prefix: str) -> Iterator[tuple[str, Tensor]]:
    return chain(tensors_of(root, "_parameters", prefix), tensors_of(root, "_buffers", prefix))
