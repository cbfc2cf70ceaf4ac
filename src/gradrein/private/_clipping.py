"""Thresholds: how much a sample may add to the sum of gradients, and one that is learned, with noise."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .._validate import finite, number
from ..clip.target.patterns import match_names
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


def by_pattern(
    parameters: Mapping[str, Tensor], max_norm: float | Mapping[str, float]
) -> tuple[dict[str, float], dict[str, dict[str, Tensor]]]:
    """Return the threshold, and the parameters, of each pattern of names; "*" is that of all."""
    expected = "Private: max_norm is a number, or a dict of patterns and numbers"
    given = max_norm if isinstance(max_norm, Mapping) else {"*": max_norm}
    norms = {key: finite(c, expected, above_zero=True) for key, c in given.items()}
    pattern_of = match_names(norms, list(parameters), None, [True] * len(parameters), all_here=True)
    pairs = list(zip(parameters.items(), pattern_of, strict=True))
    groups = {key: {n: p for (n, p), pattern in pairs if pattern == key} for key in norms}
    return norms, groups


def clip_groups(
    losses: Tensor, model: nn.Module, groups: Mapping[str, Any], max_norms: Mapping[str, float], **options: Any
) -> Tensor:
    """Add the clipped gradients of the samples to ``.grad``, group by group; return the norms of the last one."""
    norms, several = losses.detach(), len(groups) > 1
    process_group = model.process_group if isinstance(model, DistributedDataParallel) else None
    for key, members in groups.items():
        try:
            ps = per_sample(losses, members if several else model, process_group=process_group, retain_graph=several)
            norms = ps.clip_(max_norms[key], **options)
        except UnusedInputError:
            if not several:
                raise
    return norms


def beside_count(noise_multiplier: float, count_noise: float, groups: int) -> float:
    """Return the noise multiplier of gradients with which they and a count spend what the given one says."""
    # The count of those below, less one half for each sample, changes by at most one half with a sample.
    rest = noise_multiplier**-2 - (2 * count_noise) ** -2 if noise_multiplier else math.inf
    if rest <= 0 or groups > 1:
        raise ArgumentError(
            "Private: a quantile needs one max_norm, to begin with, and noise of more than "
            f"{noise_multiplier / 2:g} on the count, or it would spend everything; found {groups} and {count_noise:g}."
        )
    return float(rest**-0.5)
