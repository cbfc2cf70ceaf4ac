from statistics import median

from ...run.run import Run
from ..finding import Chart, Finding
from ..losses import Loss, losses_of, swing_of

_FACTOR = 1.15
_LEAST_FACTOR = 1.1
_SINCE = 0.15  # of the points come after the best one


def overfitting(run: Run) -> Finding | None:
    """Find a loss on other data that rises for good while the training loss goes on falling."""
    *others, trained = losses_of(run)
    for loss in others:
        found = overfits(loss, trained) if loss.is_long_enough and trained.is_long_enough else None
        if found is not None and swing_of(run, loss) is None:
            return found
    return None


def overfits(loss: Loss, trained: Loss) -> Finding | None:
    """Return the finding for a loss on other data that ends above its lowest, if the training loss fell since."""
    best = min(range(len(loss.values)), key=lambda i: loss.values[i])
    tail = loss.values[-max(2, len(loss.values) // 5) :]
    last = median(tail)
    around = median(loss.values[max(0, best - 1) : best + 2])  # one low value among others is no best
    is_late = len(loss.values) - 1 - best < _SINCE * len(loss.values)
    if min(loss.values) <= 0 or is_late or last < _FACTOR * around or min(tail) < _LEAST_FACTOR * around:
        return None
    then = [v for s, v in zip(trained.steps, trained.values, strict=True) if s <= loss.steps[best]]
    if not then or trained.level(-1) > trained.level(len(then) - 1):
        return None
    step = loss.steps[best]
    return Finding(
        name="overfitting",
        title=f"the model overfits: the {loss.name} rises to {last / loss.values[best]:.3g} times its lowest, at step "
        f"{step}, while the training loss falls",
        weight=0.6,
        criterion=f"the loss on other data ends above {_FACTOR:g} times its lowest, without swinging, and the "
        "training loss is lower than it was there",
        evidence={
            "lowest": loss.values[best],
            "at step": step,
            "last": last,
            "training loss there": trained.level(len(then) - 1),
            "training loss at the end": trained.level(-1),
        },
        advice=f"Stop at about step {step}, or keep the weights of the lowest {loss.name}; more data, augmentation, "
        "weight decay or a smaller model move that point. Clipping does not.",
        chart=Chart(loss.name, {loss.name: loss.values}, [float(s) for s in loss.steps], [float(step)]),
        plain=f"the model memorises its training data: after step {step} it gets worse on other data",
    )
