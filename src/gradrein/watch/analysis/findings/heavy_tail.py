import math

from ...run.run import Run
from ..finding import Chart, Finding
from ..losses import is_unsteady
from ..samples import look_first, samples_of
from ..statistics import hill, quantile, relative, slope

_LEAST = 100
_WIDTH = 101  # of the running median
_INDEX = 3.0
_SHARE = 0.2
_CALM_INDEX, _CALM_SHARE = 2.0, 0.35  # of a run whose loss does not suffer


def heavy_tail(run: Run) -> Finding | None:
    """Find gradients that are far larger in a few steps, beyond what the trend explains."""
    ratios = relative(run.norm, _WIDTH)
    over = _sizes(ratios)
    if len(over) < _LEAST:
        return None
    few, share, index = _tail(over)
    if index > _INDEX or share < _SHARE:
        return None
    if not is_unsteady(run) and not _is_heavy_later(ratios, share, index):
        return None
    related = loss_correlation(run)
    samples = samples_of(run, {s: r for s, r in zip(run.steps, ratios, strict=True) if r >= math.log(over[-few])})
    return Finding(
        name="heavy_tail",
        clipping_helps=True,
        title=f"gradients are heavy-tailed: {few} of {len(over)} steps make {share:.0%} of the sum of norms, each "
        "relative to its running median",
        weight=min(0.89, 0.5 + share),
        criterion=f"gradient norm over its running median (101 steps): the largest 5% make more than {_SHARE:.0%} of "
        f"the sum, and Hill's tail index over them is below {_INDEX:g} ({_CALM_SHARE:.0%} and {_CALM_INDEX:g} where no "
        "loss swings, also without the first steps). The index says how fast large values become rare; of a normal "
        "distribution it is 10 and more",
        evidence={
            "share of the sum from the largest 5% of steps": share,
            "tail index": index,
            "largest norm over its running median": over[-1],
            "99th percentile over median": quantile(over, 0.99) / quantile(over, 0.5),
            "correlation of a batch's loss and norm (logarithms)": related,
            **samples,
        },
        advice=f"This is what clipping by norm is for. {what_to_check(related)}",
        look=look_first(samples, max(zip(ratios, run.steps, strict=True), key=_ratio)[1]),
        plain=f"a few batches have far larger gradients than the rest ({few} of {len(over)} steps make {share:.0%} of "
        "the sum of gradient norms, each relative to the running median)",
        chart=Chart("gradient norm over its running median, steps sorted", {"ratio": over},
            [100 * i / len(over) for i in range(len(over))], log=True, x_label="% of steps"),
    )  # fmt: skip


def _ratio(pair: tuple[float, int]) -> float:
    return pair[0] if not math.isnan(pair[0]) else -math.inf


def _sizes(ratios: list[float]) -> list[float]:
    return sorted(math.exp(r) for r in ratios if not math.isnan(r))


def _tail(over: list[float]) -> tuple[int, float, float]:
    """Return how many the largest 5% are, their share of the sum, and Hill's tail index."""
    few = max(5, len(over) // 20)
    return few, sum(over[-few:]) / sum(over), hill(over, max(10, len(over) // 20))


def _is_heavy_later(ratios: list[float], share: float, index: float) -> bool:
    """Return whether the tail is one even for a run that is calm, with and without its first steps.

    Around these there are only later ones to take a median of. Norms that fall by orders of magnitude, as those of an
    exact fit do, are far above it there, and that is no tail.
    """
    later = _sizes(ratios[_WIDTH // 2 :])
    tails = [(share, index), *([_tail(later)[1:]] if later else [])]
    return all(share >= _CALM_SHARE and index <= _CALM_INDEX for share, index in tails)


def loss_correlation(run: Run) -> float:
    """Return how closely the norm of a batch follows its loss, both over their running medians."""
    losses = relative(run.loss, _WIDTH)
    pairs = [
        (a, b)
        for a, b in zip(losses, relative(run.norm, _WIDTH), strict=True)
        if not math.isnan(a) and not math.isnan(b)
    ]
    return slope([a for a, _ in pairs], [b for _, b in pairs])[1] if len(pairs) >= 30 else math.nan


def what_to_check(related: float) -> str:
    """Return where to look in the script."""
    if related > 0.6:
        return (
            "The batches with large gradients are those with a large loss, so look at how the loss weights single "
            "samples: a power above 1, a class weight, a logarithm near zero, a target or an input far outside the "
            "others."
        )
    return (
        "The loss of those batches is not larger in proportion: look at their inputs (scale, length, padding), and at "
        "recurrent or attention layers that amplify them."
    )
