"""What was done in a run that rarely is what was meant."""

from ..clip_option import LBFGS_CAUTION
from ..run.run import Run


def cautions(*runs: Run) -> list[str]:
    """Return sentences about the way optimizers were used."""
    clipped = any(run.optimizer == "LBFGS" and any(factor < 1 for factor in run.clip) for run in runs)
    return [LBFGS_CAUTION] if clipped else []
