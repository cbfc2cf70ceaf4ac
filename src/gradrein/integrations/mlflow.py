"""Log the latest numbers to MLflow: `Monitor(..., on_step=scalars())` inside a run."""

from collections.abc import Callable

from ._missing import missing
from ._scalars import named

try:
    import mlflow
except ImportError as error:
    raise missing("mlflow", "mlflow") from error


def scalars(run_id: str | None = None, prefix: str = "gradrein") -> Callable[[dict[str, float]], None]:
    """Return a function for `Monitor(on_step=...)` that logs loss, norm, update, clip and lr of each recorded step.

    Args:
        run_id: The run; None for the active one.
        prefix: What the names of the metrics begin with.

    Returns:
        The function.
    """

    def on_step(latest: dict[str, float]) -> None:
        step, numbers = named(latest, f"{prefix}/")
        mlflow.log_metrics(numbers, step=step, run_id=run_id)

    return on_step
