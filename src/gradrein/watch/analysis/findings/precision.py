import math
from statistics import median

from ...run.run import Run
from ..finding import Finding
from ..statistics import finite

_LEAST = 30
_SETTLING = 30  # steps in which a scaler looks for its scale
_SKIPPED = 0.05
_BITS = {"bfloat16": 8, "float16": 11}


def precision(run: Run) -> Finding | None:
    """Find steps lost to a number format: left out by a loss scaler, or too small to change the weights."""
    steps = sum(run.n_steps)
    if steps < _LEAST:
        return None
    left_out = [n for n in run.notes if n.get("note") == "scaler skipped" and n["after"] > _SETTLING]
    if len(left_out) > _SKIPPED * steps and len(left_out) > 2:
        return _skipped(len(left_out), steps)
    kind = next((d for d in run.dtypes if d in _BITS), None)
    updates = finite(run.update)
    half_step = math.ldexp(1, -_BITS[kind]) / 2 if kind else 0.0
    if kind is None or len(updates) < _LEAST or not 0 < median(updates) < half_step / 4:
        return None
    return Finding(
        name="precision",
        title=f"updates are lost to rounding: {kind} weights change by {median(updates):.2g} of their size in a step",
        weight=0.7,
        criterion="the median update is below a quarter of half the distance between two neighbouring numbers of the "
        "type",
        evidence={"type": kind, "median relative update": median(updates), "half a rounding step": half_step},
        advice="Keep the weights in float32 and use autocast for the rest, or an optimizer that keeps a float32 copy.",
        plain=f"the weights are kept in {kind}, and most updates are too small to change them",
    )


def _skipped(count: int, steps: int) -> Finding:
    return Finding(
        name="precision",
        title=f"the loss scaler skipped {count} of {count + steps} steps: gradients overflow again and again",
        weight=0.7,
        criterion=f"after the first {_SETTLING} steps more than {_SKIPPED:.0%} of the steps were skipped",
        evidence={"left out": count, "taken": steps},
        advice="Use bfloat16, which has the range of float32, or keep the layer that overflows in float32; `gradrein "
        "watch --anomaly` names it. A lower learning rate or clipping helps where the activations grow.",
        plain="gradients overflow in float16 again and again, and those steps are skipped",
    )
