"""The arguments of `PerSample.clip_`, checked."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

import torch

from ..._validate import finite, real
from ...errors import ArgumentError, ArgumentTypeError
from .. import tracing

_MAX_NORM = "clip_: max_norm is one number, as in clip_(1.0)"


@dataclass(frozen=True)
class ClipSettings:
    """What every rank has to be given alike. Attributes are the arguments of `PerSample.clip_`."""

    max_norm: float
    per_parameter: bool
    gamma: float | None
    divide_by: float | None
    noise_multiplier: float
    drop: bool

    @classmethod
    def checked(
        cls,
        max_norm: Any,
        per_parameter: Any,
        gamma: Any,
        divide_by: Any,
        noise_multiplier: Any,
        generator: Any,
        nonfinite: Any,
    ) -> "ClipSettings":
        """Return the settings, or refuse them."""
        if nonfinite not in ("raise", "drop"):
            raise ArgumentError(f"clip_: nonfinite must be 'raise' or 'drop', found {nonfinite!r}.")
        if generator is not None and not isinstance(generator, torch.Generator):
            raise ArgumentTypeError(
                f"clip_: generator must be a torch.Generator, found {generator!r:.80}. Pass "
                "torch.Generator().manual_seed(0)."
            )
        is_traced = tracing.is_traced() and isinstance(max_norm, torch.Tensor)
        limit: Any = tracing.number(max_norm) if is_traced else real(max_norm, _MAX_NORM)
        if not tracing.all_hold(limit > 0):
            raise ArgumentError(f"clip_: max_norm must be positive, found {limit}.")
        gamma = None if gamma is None else finite(gamma, "clip_: gamma is a number")
        if divide_by is not None:
            divide_by = finite(divide_by, "clip_: divide_by is a number of samples", above_zero=True)
        noise = finite(noise_multiplier, "clip_: noise_multiplier is a number")
        if (gamma is not None or noise) and not tracing.all_hold(limit < inf):
            raise ArgumentError("clip_: max_norm must be finite if gamma or noise_multiplier is given, found inf.")
        return cls(limit, bool(per_parameter), gamma, divide_by, noise, nonfinite == "drop")

    def same(self) -> Mapping[str, float]:
        """Return the settings as numbers, for ranks to compare."""
        return {
            "max_norm": self.max_norm,
            "per_parameter": self.per_parameter,
            "gamma": -1 if self.gamma is None else self.gamma,
            "divide_by": -1 if self.divide_by is None else self.divide_by,
            "noise_multiplier": self.noise_multiplier,
            "nonfinite": self.drop,
        }

    def deviation(self, parameters: int, scale: float) -> float:
        """Return the standard deviation of the noise, given how many parameters there are and the sum's scale."""
        found = self.noise_multiplier * self.max_norm * (parameters**0.5 if self.per_parameter else 1) * scale
        if self.noise_multiplier and not (tracing.all_hold(found > 0) and tracing.all_hold(found < inf)):
            raise ArgumentError(
                f"clip_: noise of standard deviation {found} cannot be drawn: noise_multiplier is "
                f"{self.noise_multiplier:g} and max_norm {self.max_norm:g}."
            )
        return found if self.noise_multiplier else 0.0
