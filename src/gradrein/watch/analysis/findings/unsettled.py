import math

from ...run.run import Run
from ..calibrated import MEASURED
from ..finding import Chart, Finding
from ..losses import losses_of
from ..signs import Signs, signs_of
from .nonfinite import nonfinite
from .oscillation import oscillation
from .overfitting import overfitting
from .rising import rising

_SAID_ELSEWHERE = (nonfinite, oscillation, rising, overfitting)
# What the sign that weighs most says; those of losses and norms are logarithms of factors.
_WORDS = {
    "test loss, end over lowest": "the test loss ends {:.2g} times above its lowest",
    "test loss, height above the lowest so far": "the test loss is {:.2g} times above its lowest so far, on average",
    "training loss, end over lowest": "the training loss ends {:.2g} times above its lowest",
    "training loss, height above the lowest so far": "the training loss is {:.2g} times above its lowest so far, on "
    "average",
    "gradient norms, largest over usual": "one gradient in a hundred is {:.2g} times larger than usual",
    "steps that overshoot": "{:.0%} of the steps go too far: the next gradient points back",
}


def unsettled(run: Run) -> Finding | None:
    """Find a run that looks like those which a simple change has made better, where no other symptom says so."""
    signs = signs_of(run)
    if not signs.speak or any(check(run) is not None for check in _SAID_ELSEWHERE):
        return None
    first = _strongest(signs)
    tasks, alarms = MEASURED["tasks"], MEASURED["false alarms"]
    loss = losses_of(run)[0]
    return Finding(
        name="unsettled",
        clipping_helps=True,
        title=f"the run could be better: {_words(signs, first)}",
        weight=0.86,
        criterion=f"a weighted sum of the numbers below, above what {1 - alarms:.0%} of those runs stay below that no "
        f"simple change improves; weights from {tasks:g} random training tasks (`make calibrate`)",
        evidence={**signs.values, "sum over its limit": signs.score},
        advice="Shorten the steps: clip, or lower the learning rate. One run cannot tell which of them helps: "
        "`gradrein watch --try` measures it.",
        chart=Chart(loss.name, {loss.name: loss.values}, [float(s) for s in loss.steps], log=min(loss.values) > 0),
        plain=f"the run has not settled: {_words(signs, first)}",
    )


def _strongest(signs: Signs) -> str:
    return max(signs.parts, key=lambda name: signs.parts[name])


def _words(signs: Signs, name: str) -> str:
    value = signs.values[name]
    return _WORDS[name].format(value if name == "steps that overshoot" else math.exp(value))
