"""The arguments of `PerSample.clip_`, checked."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

import torch

from ..._validate import finite, real
from ...errors import ArgumentError
from .. import tracing

_MAX_NORM = "clip_: max_norm is one number, as in clip_(1.0)"


@dataclass(frozen=True)
class ClipSettings:
    """What every rank has to be given alike. Attributes are the arguments of `PerSample.clip_`."""

    max_norm: float
    per_parameter: bool
    gamma: float | None
    divide_by: float | None
    drop: bool

    @classmethod
    def checked(cls, max_norm: Any, per_parameter: Any, gamma: Any, divide_by: Any, nonfinite: Any) -> "ClipSettings":
        """Return the settings, or refuse them."""
        if nonfinite not in ("raise", "drop"):
            raise ArgumentError(f"clip_: nonfinite must be 'raise' or 'drop', found {nonfinite!r}.")
        is_traced = tracing.is_traced() and isinstance(max_norm, torch.Tensor)
        limit: Any = tracing.number(max_norm) if is_traced else real(max_norm, _MAX_NORM)
        if not tracing.all_hold(limit > 0):
            raise ArgumentError(f"clip_: max_norm must be positive, found {limit}.")
        gamma = None if gamma is None else finite(gamma, "clip_: gamma is a number")
        if divide_by is not None:
            divide_by = finite(divide_by, "clip_: divide_by is a number of samples", above_zero=True)
        if gamma is not None and not tracing.all_hold(limit < inf):
            raise ArgumentError("clip_: max_norm must be finite if gamma is given, found inf.")
        return cls(limit, bool(per_parameter), gamma, divide_by, nonfinite == "drop")

    def same(self) -> Mapping[str, float]:
        """Return the settings as numbers, for ranks to compare."""
        return {
            "max_norm": self.max_norm,
            "per_parameter": self.per_parameter,
            "gamma": -1 if self.gamma is None else self.gamma,
            "divide_by": -1 if self.divide_by is None else self.divide_by,
            "nonfinite": self.drop,
        }
