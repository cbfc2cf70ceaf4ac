import math
from statistics import fmean

from ...run.run import Run
from ..finding import Finding

_LEAST = 20
_FACTOR = 10.0


def noise_scale(run: Run) -> Finding | None:
    """Find a batch that is too small for its noise; needs per-sample norms (McCandlish et al., arXiv 1812.06162).

    With batch size B, mean square S of the per-sample norms and squared norm G of the mean gradient, the variance is
    (S - G) B / (B - 1) and the squared true gradient G minus that over B; their ratio is the batch at which noise
    and gradient are equally large.
    """
    known = [
        (s[0], s[1], n * n) for s, n in zip(run.samples, run.norm, strict=True) if s is not None and s[0] > 1 and n > 0
    ]
    if len(known) < _LEAST:
        return None
    variance = fmean((s - g) * b / (b - 1) for b, s, g in known)
    signal = fmean(g - (s - g) / (b - 1) for b, s, g in known)
    batch = fmean(b for b, _, _ in known)
    scale = variance / signal if signal > 0 else math.inf
    if scale < _FACTOR * batch:
        return None
    return Finding(
        name="noise_scale",
        title=f"the gradient is mostly noise: noise scale {scale:.3g} at a batch of {batch:.0f}",
        weight=0.5,
        criterion=f"gradient noise scale (variance of a sample's gradient over the squared mean) above {_FACTOR:g} "
        "batches",
        evidence={"noise scale": scale, "batch size": batch, "variance": variance, "squared gradient": signal},
        advice="A larger batch, or gradients added up over several, makes each step better by nearly as much as it "
        "grows; a lower learning rate averages over more batches.",
        plain="each batch pulls the weights in another direction, so the batch may be too small for this learning rate",
    )
