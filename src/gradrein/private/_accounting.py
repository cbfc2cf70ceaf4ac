"""What is spent, and how much noise a budget needs: by `dp-accounting`."""

import functools
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias

from .._validate import count, finite, number
from ..errors import ArgumentError, MissingDependencyError

Accountant: TypeAlias = Literal["pld", "rdp", "unamplified"]


def epsilon(
    *, noise_multiplier: float, sample_rate: float, steps: int, delta: float, accountant: Accountant = "pld"
) -> float:
    """Return the epsilon of so many steps of private training.

    Args:
        noise_multiplier: standard deviation of the noise over the sensitivity of the summed gradients.
        sample_rate: how likely a sample is in a batch: batch size over number of samples.
        steps: how many steps are taken.
        delta: the delta of the guarantee.
        accountant: "pld" (privacy loss distributions, the tightest) or "rdp" (Renyi divergences, faster): for Poisson
            sampling, where neighbours differ in one added or removed sample. "unamplified": for shuffled batches of
            a fixed size, each sample in one of them in each epoch; neighbours differ in one replaced sample.

    Raises:
        ArgumentError: an argument has an invalid value.
        MissingDependencyError: `dp-accounting` is not installed.

    Examples:
        >>> settings = {"sample_rate": 0.01, "steps": 1000, "delta": 1e-5, "accountant": "rdp"}
        >>> print(f"{gradrein.private.epsilon(noise_multiplier=1.0, **settings):.2f}")
        2.10

    See Also:
        [`gradrein.private.noise_multiplier`][], [`gradrein.private.Private`][]
    """
    noise = finite(noise_multiplier, "`noise_multiplier` is a number")
    rate, small = number(sample_rate, "sample_rate", 0, 1), number(delta, "delta", 0, 1)
    if not (rate and 0 < small < 1 and accountant in ("pld", "rdp", "unamplified")):
        raise ArgumentError(
            "`sample_rate` must be above 0, `delta` between 0 and 1, and `accountant` 'pld', 'rdp' or 'unamplified'; "
            f"found {rate:g}, {small:g} and {accountant!r}."
        )
    if not count(steps, "steps", 0) or not noise:
        return math.inf if steps else 0.0
    try:
        import dp_accounting as dp
    except ImportError as error:
        raise MissingDependencyError(
            "gradrein.private needs the package dp-accounting, which is not installed: pip install 'gradrein[private]'."
        ) from error
    if accountant == "unamplified":  # a sample that is replaced moves the sum by twice the threshold, once in an epoch
        epochs = math.ceil(steps / steps_in_epoch(rate))
        return float(dp.get_epsilon_gaussian(noise / (2 * epochs**0.5), small))
    event = dp.SelfComposedDpEvent(dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(noise)), steps)
    with _quiet():
        counting = dp.rdp.RdpAccountant() if accountant == "rdp" else dp.pld.PLDAccountant()
        return float(counting.compose(event).get_epsilon(small))


def noise_multiplier(
    *, epsilon: float, sample_rate: float, steps: int, delta: float, accountant: Accountant = "pld"
) -> float:
    """Return a noise multiplier with which so many steps spend no more than `epsilon`, and at most 0.1% less.

    Args:
        epsilon: the budget.
        sample_rate: as in `epsilon`, like the others.
        steps: at least one.
        delta: the delta of the guarantee.
        accountant: which of them counts.

    Raises:
        ArgumentError: an argument has an invalid value, or no noise up to a multiplier of a million is enough.
        MissingDependencyError: `dp-accounting` is not installed.

    Examples:
        >>> settings = {"sample_rate": 0.01, "steps": 1000, "delta": 1e-5, "accountant": "rdp"}
        >>> print(f"{gradrein.private.noise_multiplier(epsilon=2.0, **settings):.2f}")
        1.02

    See Also:
        [`gradrein.private.epsilon`][]
    """
    target = finite(epsilon, "`epsilon` is a number", above_zero=True)
    settings: dict[str, Any] = {"sample_rate": sample_rate, "steps": count(steps, "steps"), "delta": delta}

    def least(by: Accountant, start: float, factor: float) -> float:
        spent = functools.cache(lambda noise: _epsilon(noise_multiplier=noise, accountant=by, **settings))
        return _least(spent, target, start, factor)

    if accountant != "pld":
        return least(accountant, 1.0, 2.0)
    return least("pld", least("rdp", 1.0, 2.0), 1.2)  # it is slower, and never needs more


_epsilon = epsilon


def steps_in_epoch(sample_rate: float) -> int:
    """Return how many batches it takes for each sample to be drawn once on average; a last one may be smaller."""
    return math.ceil(1 / sample_rate - 1e-9)


def _least(spent: Callable[[float], float], target: float, high: float, factor: float) -> float:
    """Return where a falling function is at most the target and at least 99.9% of it: by interpolated bisection."""
    while spent(high) > target:
        high *= factor
        if high > 1e6:
            raise ArgumentError("no noise multiplier up to 1e6 is enough for this epsilon.")
    low = high / factor
    while spent(low) <= target and low > 1e-3:
        high, low = low, low / factor
    aim = 0.9995 * target
    while spent(high) < 0.999 * target and spent(low) > target and high / low > 1 + 1e-6:
        above, below = (abs(math.log(min(max(spent(x), 1e-9), 1e9) / aim)) for x in (low, high))
        middle = low * (high / low) ** (above / (above + below))
        low, high = (middle, high) if spent(middle) > target else (low, middle)
    return high


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep remarks about orders that were left out, one for each number that is tried, from the terminal."""
    logger = logging.getLogger("absl")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before
