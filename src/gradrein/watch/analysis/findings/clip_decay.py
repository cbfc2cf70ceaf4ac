import math
from statistics import median

from ...run.run import Run
from ..finding import Finding
from ..statistics import finite

_LEAST = 30
_RATE, _FACTOR = 0.8, 0.3
_PULL = 0.3


def clip_decay(run: Run) -> Finding | None:
    """Find gradients that are clipped until weight decay, which is not clipped, moves the weights as far as they do."""
    decay = run.settings.get("weight_decay") or 0.0
    factors = finite(run.clip)[-200:]
    if decay <= 0 or len(factors) < _LEAST:
        return None
    rate, factor = sum(1 for f in factors if f < 1) / len(factors), median(factors)
    momentum = run.settings.get("momentum") or 0.0
    pulls = [
        lr * decay / (1 - momentum) / update
        for lr, update in zip(run.lr[-200:], run.update[-200:], strict=True)
        if math.isfinite(lr) and update > 0 and momentum < 1
    ]
    pull = median(pulls) if pulls else 0.0
    if rate < _RATE or factor > _FACTOR or pull < _PULL:
        return None
    return Finding(
        name="clip_decay",
        title=f"weight decay is stronger than the clipped gradient: it makes {min(pull, 1.0):.0%} of each step",
        weight=0.88,
        criterion=f"clipping leaves less than {_FACTOR:g} of the gradient in {_RATE:.0%} of the last 200 steps, and "
        f"learning rate times weight decay is more than {_PULL:.0%} of how far the weights move",
        evidence={"clipped": rate, "median factor": factor, "decay over movement": pull, "weight decay": decay},
        advice="The gradient is limited and the decay is not, so the weights shrink towards zero. Clip less, at the "
        "median norm or above, or lower weight decay by the factor that clipping takes away.",
        plain="clipping makes the gradient so small that weight decay pulls the weights back towards zero",
    )
