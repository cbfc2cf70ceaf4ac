import math
from statistics import median

from ...run.run import Run
from ..finding import Finding

_LEAST, _RECENT = 30, 200
_OF_MUON = 0.01  # its iteration multiplies small singular values by 485: only far below its eps do steps shrink
_SCALE_FREE = ("muon", "lion", "sign")
_ADVICE = (
    'Leave these parameters out of the clip: `gradrein.clip_(optimizer, {"group:0": None, "*": by_norm(1.0)})`, or '
    "pass only the others to it."
)


def clip_scale(run: Run) -> Finding | None:
    """Find a clip before an optimizer that divides by the gradient's scale: idle, or harmful below the optimizer's eps.

    Only where one fixed limit holds for all parameters: then each is multiplied by the recorded factor.
    """
    recent = [*zip(run.clip, run.max_norm, run.norms, strict=True)][-_RECENT:]
    rows = [(factor, norms) for factor, limit, norms in recent if factor < 1 and math.isfinite(limit)]
    if len(rows) < max(_LEAST, len(recent) / 2):
        return None
    factor, name = median(factor for factor, _ in rows), run.optimizer.lower()
    clipped = {i: median((norms[i] or 0.0) * factor for factor, norms in rows) for i in range(len(run.names))}
    floors = _floors(run)
    lost = [i for i, norm in clipped.items() if i in floors and norm < floors[i] <= norm / factor]
    if lost:
        largest = max(clipped, key=clipped.__getitem__)
        cause = run.names[largest] if clipped[largest] > recent[-1][1] / 4 else "not one of this optimizer"
        return Finding(
            name="clip_scale",
            title=f"clipping takes the gradients of {len(lost)} of {len(run.names)} parameters below the eps of "
            f"{run.optimizer}: they hardly move",
            weight=0.8,
            criterion="most steps are clipped by one fixed norm, and a gradient that would be above the optimizer's "
            "eps (root mean square; of Muon the norm, above a hundredth) is below it after",
            evidence={
                "median factor": factor,
                "parameters": [run.names[i] for i in lost[:5]],
                "largest gradient": cause,
            },
            advice=f"{run.optimizer} divides by the gradient's scale, but by no less than eps. One large gradient sets "
            f"the factor for all: {cause}. {_ADVICE} Or limit each by itself: `by_norm(1.0, "
            "per_parameter=True)`.",
            plain="one part of the model has so large gradients that clipping makes all others too small to be learned "
            "from",
        )
    if factor > 1 / 2 or not any(kind in name for kind in _SCALE_FREE):
        return None
    return Finding(
        name="clip_scale",
        title=f"clipping does not limit the steps of {run.optimizer}, whose length does not depend on the gradient's",
        weight=0.2,
        criterion="Muon, Lion or a sign method, and gradients are clipped to less than half by one fixed norm",
        evidence={"median factor": factor},
        advice=f"{_ADVICE} In a norm over all parameters they only shrink the others. A lower learning rate makes "
        "shorter steps.",
        plain="clipping has next to no effect with this optimizer",
    )


def _floors(run: Run) -> dict[int, float]:
    """Return the norm below which the step of each parameter shrinks, where the optimizer has one."""
    name, eps = run.optimizer.lower(), run.settings.get("eps")
    if "muon" in name:
        return dict.fromkeys(range(len(run.names)), _OF_MUON * (1e-7 if eps is None else eps))
    if "adam" in name:
        return {i: math.sqrt(size) * (1e-8 if eps is None else eps) for i, size in enumerate(run.sizes)}
    return {}
