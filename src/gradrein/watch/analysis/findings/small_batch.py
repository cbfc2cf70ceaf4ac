from statistics import fmean

from ...run.run import Run
from ..finding import Finding
from ..losses import is_unsteady
from ..statistics import finite

_LEAST = 100
_SIGNAL = 0.04


def small_batch(run: Run) -> Finding | None:
    """Find, in a run that swings, gradients with nothing in common from one batch to the next.

    Of plain SGD the cosine between a step and the next gradient is minus the share of the squared norm that two
    batches agree on; noise of independent batches averages out.
    """
    if run.optimizer != "SGD" or run.settings.get("momentum"):
        return None
    cosines = finite(run.step_grad_cosine)[10:]
    if len(cosines) < _LEAST:
        return None
    signal, positive = -fmean(cosines), sum(1 for c in cosines if c > 0) / len(cosines)
    if abs(signal) > _SIGNAL or not 0.3 < positive < 0.7 or not is_unsteady(run):
        return None
    return Finding(
        name="small_batch",
        title=f"the gradient is mostly noise: two batches in a row agree on {max(signal, 0.0):.1%} of its square",
        weight=0.5,
        test=f"the run swings, and the cosine between a step and the next gradient is within {_SIGNAL:g} of 0 in the "
        "mean (plain SGD only)",
        evidence={"mean cosine": -signal, "steps": len(cosines)},
        advice="A larger batch, or gradients added up over several, makes steps that agree; a smaller learning rate "
        "averages over more of them.",
        plain="each batch pulls the weights in another direction, so the batch may be too small for this learning rate",
    )
