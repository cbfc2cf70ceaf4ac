"""Log the latest numbers to Weights & Biases: `Monitor(..., on_step=scalars(wandb.init()))`."""

from collections.abc import Callable
from typing import Any

from ._missing import missing
from ._scalars import named

try:
    from wandb.sdk.wandb_run import Run
except ImportError as error:
    raise missing("wandb", "wandb") from error


def scalars(run: Run, prefix: str = "gradrein", *, commit: bool = True) -> Callable[[dict[str, float]], None]:
    """Return a function for `Monitor(on_step=...)` that logs loss, norm, update, clip and lr of each recorded step.

    The numbers are drawn over `gradrein/step`, the optimizer's own count, whatever else the run logs.

    Args:
        run: What `wandb.init` returned; it is not finished here.
        prefix: What the names begin with.
        commit: As in `run.log`: whether each step is a row of its own. wandb counts rows, and drops what is logged with
            a smaller `step=` than its count. So pass False where the script calls `run.log(..., step=...)` itself: the
            numbers then join the row that is open, which changes no count; of several in one row the last stays.

    Returns:
        The function.
    """
    axis = f"{prefix}/step"
    run.define_metric(axis, hidden=True)
    run.define_metric(f"{prefix}/*", step_metric=axis)
    log: Any = run.log

    def on_step(latest: dict[str, float]) -> None:
        step, numbers = named(latest, f"{prefix}/")
        log({axis: step, **numbers}, commit=commit)

    return on_step
