"""A drop-in for `torch.autograd`: our functions where we define the name, torch's own for the rest.

``import gradrein.autograd as autograd`` is enough to switch. `docs/autograd.md` lists every name and whose it
is.
"""

from typing import Any

import torch.autograd as _theirs

from .._torch.modes import script_as as _script_as
from ._backward import backward
from ._engine import explain_saved as explain_saved
from ._find_unused import find_unused_parameters
from ._grad import grad
from ._nonfinite import detect_nonfinite
from ._replay import Edge, replay
from ._trace import GradStats, ModuleSummary, NodeRecord, Trace, trace

__all__ = [
    "Edge",
    "GradStats",
    "ModuleSummary",
    "NodeRecord",
    "Trace",
    "backward",
    "detect_nonfinite",
    "find_unused_parameters",
    "grad",
    "replay",
    "trace",
]
__all__ += [name for name in _theirs.__all__ if name not in __all__]

_script_as(backward, "aten::backward")
_script_as(grad, "aten::grad")


def __getattr__(name: str) -> Any:
    """Return torch's own object for every name that is not ours."""
    return getattr(_theirs, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *dir(_theirs)})
