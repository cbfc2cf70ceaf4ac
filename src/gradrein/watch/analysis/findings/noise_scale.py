import math
from statistics import fmean

from ...run.run import Run
from ..finding import Finding
from ..losses import is_unsteady
from ..statistics import finite

_LEAST = 20
_FACTOR = 10.0
_LEAST_COSINES, _AGREEMENT = 100, 0.04


def noise_scale(run: Run) -> Finding | None:
    """Find a batch that is too small for its noise.

    With per-sample norms by the noise scale (McCandlish et al., arXiv 1812.06162); without them, in a run of plain SGD
    that swings, by the cosine between a step and the next gradient.
    """
    return _by_samples(run) or _by_cosine(run)


def _by_samples(run: Run) -> Finding | None:
    """Judge by per-sample norms.

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
    return _finding(
        f"noise scale {scale:.3g} at a batch of {batch:.0f}",
        f"gradient noise scale (variance of a sample's gradient over the squared mean) above {_FACTOR:g} batches",
        {"noise scale": scale, "batch size": batch, "variance": variance, "squared gradient": signal},
    )


def _by_cosine(run: Run) -> Finding | None:
    """Judge by what two batches in a row agree on.

    Of plain SGD the cosine between a step and the next gradient is minus the share of the squared norm that both agree
    on; noise of independent batches averages out.
    """
    cosines = finite(run.step_grad_cosine)[10:]
    if run.optimizer != "SGD" or run.settings.get("momentum") or len(cosines) < _LEAST_COSINES:
        return None
    agreement, positive = -fmean(cosines), sum(1 for c in cosines if c > 0) / len(cosines)
    if abs(agreement) > _AGREEMENT or not 0.3 < positive < 0.7 or not is_unsteady(run):
        return None
    return _finding(
        f"two batches in a row agree on {max(agreement, 0.0):.1%} of its square",
        f"the run swings, and the cosine between a step and the next gradient is within {_AGREEMENT:g} of 0 in the "
        "mean (plain SGD only)",
        {"mean cosine": -agreement, "steps": len(cosines)},
    )


def _finding(how: str, criterion: str, evidence: dict[str, object]) -> Finding:
    return Finding(
        name="noise_scale",
        title=f"the gradient is mostly noise: {how}",
        weight=0.5,
        criterion=criterion,
        evidence=evidence,
        advice="A larger batch, or gradients added up over several, makes each step better by nearly as much as it "
        "grows; a lower learning rate averages over more batches.",
        plain="each batch pulls the weights in another direction, so the batch may be too small for this learning rate",
    )
