"""A drop-in for `torch.autograd`: ours where we own the name, torch's for the rest.

``import bridle.autograd as autograd`` is enough to change over. `docs/autograd.md` says for each name whose
it is.
"""

from typing import Any

import torch.autograd as _theirs

from . import _torch
from ._backward import backward
from ._grad import grad
from ._records import ModuleSummary, NodeRecord, Trace
from ._replay import Edge, replay
from ._stats import Stats
from ._trace import trace
from ._unreached import unreached

__all__ = [
    "Edge",
    "ModuleSummary",
    "NodeRecord",
    "Stats",
    "Trace",
    "backward",
    "grad",
    "replay",
    "trace",
    "unreached",
]
__all__ += [name for name in _theirs.__all__ if name not in __all__]

_torch.stand_in_for(backward, "aten::backward")
_torch.stand_in_for(grad, "aten::grad")


def __getattr__(name: str) -> Any:
    """Return torch's own object for every name that is not ours."""
    return getattr(_theirs, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *dir(_theirs)})
