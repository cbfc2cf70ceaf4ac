import math

from ...run.run import Run
from ..finding import Finding


def nonfinite(run: Run) -> Finding | None:
    """Find gradients or losses that are NaN or infinite."""
    bad_losses = [s for s, loss in zip(run.steps, run.loss, strict=True) if math.isinf(loss)]
    origins = [n["anomaly"] for n in run.notes if "anomaly" in n]
    skipped = sum(1 for n in run.notes if n.get("note") == "scaler skipped")
    if not run.nonfinite and not bad_losses and not origins:
        return None
    evidence: dict[str, object] = {"steps with non-finite gradients": len(run.nonfinite)}
    where, look = "in the loss", ""
    if run.nonfinite:
        first = run.nonfinite[0]
        where = f"first at step {first.step}, in {_few(list(first.offenders))}"
        evidence["first step"] = first.step
        few = list(first.offenders.items())[:20]
        evidence["values not finite there"] = {name: count or "not counted" for name, count in few}
        evidence["loss there"] = first.loss
        look = f"the batch of step {first.step}"
    if skipped:
        evidence["steps a GradScaler left out"] = skipped
    if origins:
        evidence["origin"] = origins[0]
        where, look = origins[0].rstrip("."), ""
    known = (
        "The operation is named above: guard it (a small number under a root or logarithm, a maximum on an exponent)."
    )
    unknown = (
        "Run again with `gradrein watch --anomaly`: it names the operation, the module and the line of the first NaN. "
        'Clipping with `nonfinite="skip"` (as `--clip` does) leaves such a step out instead of spoiling every weight.'
    )
    return Finding(
        name="nonfinite",
        title=f"gradients were not finite: {where}",
        weight=1.0,
        criterion="any gradient or loss that is NaN or infinite",
        evidence=evidence,
        advice=known if origins else unknown,
        plain="the training broke down: gradients became infinite or NaN"
        + (f" at step {run.nonfinite[0].step}" if run.nonfinite else ""),
        look=look,
    )


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
