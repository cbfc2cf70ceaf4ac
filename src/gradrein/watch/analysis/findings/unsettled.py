from ...run.run import Run
from ..calibrated import WEIGHTS
from ..divergence import divergence
from ..finding import Finding
from ..losses import judged_loss, story_of
from ..signs import measure, rule_of, score_of


def unsettled(run: Run) -> Finding | None:
    """Find a run that a simple change would have made better, by the rule that `make calibrate` fits."""
    score = score_of(run)
    if score <= 0 or run.nonfinite or divergence(run) is not None:
        return None
    values, loss = measure(run), judged_loss(run)
    weights = WEIGHTS[rule_of(run)]
    parts = {name: weight * values[name] for name, weight in weights.items() if values.get(name)}
    largest = max(parts, key=lambda name: parts[name], default="")
    story = story_of(loss)
    return Finding(
        name="unsettled",
        title=f"this run could end lower: {story}",
        weight=0.98,
        criterion="a weighted sum of a few numbers of the run, fitted to random training runs, is above the limit that "
        "few runs exceed which nothing improves",
        evidence={**values, "sum over its limit": score, "weighs most": largest,
                  "where the loss was seen": loss.origin},
        advice="The causes that were found are listed with this finding; what helped runs like this one is under what "
        "to change.",
        plain=story,
    )  # fmt: skip
