from ...run.run import Run
from ..divergence import GROWTH, divergence
from ..finding import Finding
from ..statistics import finite


def diverged(run: Run) -> Finding | None:
    """Find a training loss or gradient norm that grows without end."""
    lost = divergence(run)
    if lost is None:
        return None
    what, lowest, at = lost
    values = run.loss if what == "training loss" else run.norm
    last, begins = finite(values)[-1], run.steps[min(at, len(run.steps) - 1)]
    return Finding(
        name="diverged",
        title=f"the {what} diverges: from {lowest:.3g} at its lowest to {last:.3g} at the end, for good from step "
        f"{begins}",
        weight=0.99,
        criterion=f"the last value is more than {GROWTH:.0e} times the lowest level, however short the run",
        evidence={"lowest level": lowest, "last value": last, "grows from step": begins},
        advice="Every step makes the next one larger: lower the learning rate, or clip, from the start. Nothing after "
        f"step {begins} can be used.",
        plain=f"the training diverges: the {what} grows from {lowest:.2g} to {last:.2g}",
    )
