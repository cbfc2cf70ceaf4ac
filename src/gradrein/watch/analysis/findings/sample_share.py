from statistics import median

from ...run.run import Run
from ..finding import Finding
from ..statistics import finite

_LEAST = 20
_RATIO = 20.0


def sample_share(run: Run) -> Finding | None:
    """Find batches in which one sample outweighs the others, as by a power in the loss; needs per-sample norms."""
    ratios = finite(run.sample_ratio)
    if len(ratios) < _LEAST or median(ratios) < _RATIO:
        return None
    return Finding(
        name="sample_share",
        title=f"single samples outweigh the rest: the largest gradient of a sample is {median(ratios):.3g} times the "
        "median one",
        weight=0.84,
        criterion=f"largest per-sample gradient norm of a batch over the median one above {_RATIO:g} in half of the "
        "batches",
        evidence={"median ratio": median(ratios), "largest ratio": max(ratios), "batches": len(ratios)},
        advice="Look for a power above 1, a class weight or a logarithm near zero in the loss. Clip each sample before "
        "they are added up (`gradrein.per_sample(...).clip_`), or use a loss that grows linearly (Huber, power 1).",
        plain="single samples outweigh all others in their batch, for example because of a power or a weight in the "
        "loss",
    )
