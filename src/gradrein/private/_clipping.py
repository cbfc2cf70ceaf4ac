"""Thresholds: how much a sample may add to the sum of gradients, and one that is learned, with noise."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .._validate import finite, number
from ..errors import ArgumentError, UnusedInputError
from ..persample import per_sample


@dataclass(frozen=True)
class Quantile:
    """Learn the threshold while training: the norm that a share of the samples stays below (Andrew et al. 2021).

    The samples below are counted with noise of its own, and the noise on gradients is raised by as much as this costs:
    what is spent is what `noise_multiplier` says.

    Args:
        share: of the samples whose gradients are to stay as they are.
        rate: how fast the threshold follows; it changes by a factor of at most ``exp(rate)`` in a step.
        noise: standard deviation of the noise on the count. By default a twentieth of the batch size.

    Raises:
        ArgumentError: an argument has an invalid value.

    Examples:
        >>> gradrein.private.Quantile(0.5)
        Quantile(share=0.5, rate=0.2, noise=None)

    See Also:
        [`gradrein.private.Private`][]
    """

    share: float = 0.5
    rate: float = 0.2
    noise: float | None = None

    def __post_init__(self) -> None:
        number(self.share, "share", 0, 1)
        finite(self.rate, "`rate` is a number", above_zero=True)
        finite(self.noise or 1, "`noise` is a number of samples", above_zero=True)


class Thresholds:
    """The threshold of each group of parameters: one for all, or one for each of several patterns of names."""

    def __init__(self, model: nn.Module, parameters: Mapping[str, Tensor], max_norm: Any, **options: Any) -> None:
        self._model, self._options = model, options
        by_pattern = max_norm if isinstance(max_norm, Mapping) else {"*": max_norm}
        expected = "Private: max_norm is a number, or a dict of patterns and numbers"
        self.norms = {key: finite(c, expected, above_zero=True) for key, c in by_pattern.items()}
        first = {name: next((key for key in self.norms if fnmatchcase(name, key)), None) for name in parameters}
        groups = {key: {n: p for n, p in parameters.items() if first[n] == key} for key in self.norms}
        if None in first.values() or not all(groups.values()):
            raise ArgumentError(
                "Private: each parameter needs a pattern of max_norm that fits, and each pattern a parameter that no "
                f"earlier one has; found {first} for the patterns {list(self.norms)}."
            )
        self._groups: dict[str, Any] = groups if len(groups) > 1 else {next(iter(groups)): model}

    @property
    def sensitivity(self) -> float:
        """By how much, at most, the sum of clipped gradients changes with one sample."""
        return math.hypot(*self.norms.values())

    def clip(self, losses: Tensor, divide_by: float) -> Tensor:
        """Add the clipped gradients of the samples, divided, to ``.grad``; return the norms of the last group."""
        norms = losses.detach()
        process_group = self._model.process_group if isinstance(self._model, DistributedDataParallel) else None
        for key, members in self._groups.items():
            try:
                ps = per_sample(losses, members, process_group=process_group, retain_graph=len(self._groups) > 1)
                norms = ps.clip_(self.norms[key], divide_by=divide_by, **self._options)
            except UnusedInputError:
                if len(self._groups) == 1:
                    raise
        return norms


class Learned:
    """A threshold that follows a quantile of the norms, and what is left of the noise multiplier for gradients."""

    def __init__(self, thresholds: Thresholds, settings: Quantile, noise_multiplier: float, batch_size: int) -> None:
        self._thresholds, self._settings, self._batch_size = thresholds, settings, batch_size
        self._noise = settings.noise or batch_size / 20
        # The count of those below, less one half for each sample, changes by at most one half with a sample.
        rest = noise_multiplier**-2 - (2 * self._noise) ** -2 if noise_multiplier else math.inf
        if rest <= 0 or len(thresholds.norms) > 1:
            raise ArgumentError(
                "Private: a quantile needs one max_norm, to begin with, and noise of more than "
                f"{noise_multiplier / 2:g} on the count, or it would spend everything; found {len(thresholds.norms)} "
                f"and {self._noise:g}."
            )
        self.noise_multiplier = rest**-0.5
        self.below = 0.0

    def see(self, norms: Tensor) -> None:
        """Count samples."""
        (limit,) = self._thresholds.norms.values()
        self.below += float((norms <= limit).sum()) - len(norms) / 2

    def update(self, below: float, draw: float) -> None:
        """Move the threshold, by the count over all ranks and a normal number."""
        share = min(max((below + self._noise * draw) / self._batch_size + 0.5, 0.0), 1.0)
        (key,) = self._thresholds.norms
        self._thresholds.norms[key] *= math.exp(self._settings.rate * (self._settings.share - share))
        self.below = 0.0
