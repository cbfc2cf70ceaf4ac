from ...run.run import Run
from ..finding import Chart, Finding
from ..losses import block_of, is_long_enough, levels_of, losses_of
from ..signs import end_of

_FACTOR = 1.1


def overfitting(run: Run) -> Finding | None:
    """Find a loss on other data that ends above its lowest while the training loss goes on falling."""
    *others, trained = losses_of(run)
    loss = next((loss for loss in others if is_long_enough(loss)), None)
    if loss is None or not is_long_enough(trained) or min(loss.values) <= 0:
        return None
    best = min(range(len(loss.values)), key=lambda i: loss.values[i])
    step, last, levels = loss.steps[best], end_of(loss.values), levels_of(trained)
    at = min(len(levels) - 1, sum(1 for s in trained.steps if s < step) // block_of(trained))
    if last < _FACTOR * loss.values[best] or levels[-1] >= levels[at]:
        return None
    return Finding(
        name="overfitting",
        title=f"the model overfits: the {loss.name} rises to {last / loss.values[best]:.3g} times its lowest, at step "
        f"{step}, while the training loss falls",
        weight=0.6,
        criterion=f"the last tenth of the loss on other data is above {_FACTOR:g} times its lowest, and the training "
        "loss is lower than it was there",
        evidence={
            "lowest": loss.values[best],
            "at step": step,
            "last": last,
            "training loss there": levels[at],
            "training loss at the end": levels[-1],
        },
        advice=f"Stop at about step {step}, or keep the weights of the lowest {loss.name}; more data, augmentation, "
        "weight decay or a smaller model move that point.",
        chart=Chart(loss.name, {loss.name: loss.values}, [float(s) for s in loss.steps], [float(step)]),
        plain=f"the model memorises its training data: after step {step} it gets worse on other data",
    )
