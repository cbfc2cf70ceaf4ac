from statistics import fmean, median

from ...run.run import Run
from ..finding import Chart, Finding
from ..statistics import finite, quantile

_LEAST = 30
_RATE = 0.9
_FACTOR = 0.2


def clip_tight(run: Run) -> Finding | None:
    """Find clipping that is always on and strong: it has become a different learning rate."""
    factors = finite(run.clip)
    # Thresholds that adapt are meant to follow the norms; only a fixed one can be too tight.
    if len(factors) < _LEAST or run.threshold is None:
        return None
    rate, middle = sum(1 for f in factors if f < 1) / len(factors), median(factors)
    if rate < _RATE or middle > _FACTOR:
        return None
    norms = finite(run.norm)
    return Finding(
        name="clip_tight",
        title=f"clipping is too tight: it changes {rate:.0%} of the steps, by a factor of {middle:.3g} in the median",
        weight=0.5,
        criterion=f"a fixed threshold changes more than {_RATE:.0%} of the steps, by less than {_FACTOR:g} in the "
        "median",
        evidence={
            "clipped": rate,
            "median factor": middle,
            "mean factor": fmean(factors),
            "share of the gradient taken away": 1
            - sum(n * f for n, f in zip(norms, factors, strict=False)) / sum(norms),
            "median norm before clipping": median(norms),
        },
        advice="Every step has the same length now, whatever the gradient says, and large batches count as much as "
        f"small ones. Raise the threshold to about {quantile(norms, 0.9):.3g} (what 90% of these norms were below). "
        "If steps of one length are what you want, a sign-based optimizer makes them by design.",
        chart=Chart("factor", {"factor": run.clip}, [float(s) for s in run.steps], log=True),
    )
