import math
from statistics import median

from ...run.run import Run
from ..finding import Finding
from ..signs import is_clipped
from ..statistics import finite

_HALF = 0.5


def clip_decay(run: Run) -> Finding | None:
    """Find gradients that are clipped until weight decay, which is not clipped, moves the weights as far as they do."""
    decay, momentum = run.settings.get("weight_decay") or 0.0, run.settings.get("momentum") or 0.0
    if decay <= 0 or momentum >= 1 or not is_clipped(run):
        return None
    rows = zip(run.lr[-200:], run.update[-200:], strict=True)
    pulls = [lr * decay / (1 - momentum) / update for lr, update in rows if math.isfinite(lr) and update > 0]
    pull = median(pulls) if pulls else 0.0
    if pull <= _HALF:
        return None
    factor = median(finite(run.clip)[-200:])
    return Finding(
        name="clip_decay",
        title=f"weight decay is stronger than the clipped gradient: it makes {min(pull, 1.0):.0%} of each step",
        weight=0.88,
        criterion="most steps are clipped, and learning rate times weight decay is more than half of how far the "
        "weights move",
        evidence={"median factor": factor, "decay over movement": pull, "weight decay": decay},
        advice="The gradient is limited and the decay is not, so the weights shrink towards zero. Lower weight decay "
        f"by the factor that clipping takes away, from {decay:g} to {decay * factor:.2g}, or clip less.",
        plain="clipping makes the gradient so small that weight decay pulls the weights back towards zero",
    )
