"""Write the latest numbers as TensorBoard scalars: `Monitor(..., on_step=scalars(SummaryWriter()))`."""

from collections.abc import Callable
from typing import Any

from ._missing import missing
from ._scalars import named

try:
    from torch.utils.tensorboard import SummaryWriter
except ImportError as error:
    raise missing("tensorboard", "tensorboard") from error


def scalars(writer: SummaryWriter, prefix: str = "gradrein") -> Callable[[dict[str, float]], None]:
    """Return a function for `Monitor(on_step=...)` that writes loss, norm, update, clip and lr of each recorded step.

    Args:
        writer: The writer; it is not closed here.
        prefix: What the names of the scalars begin with.

    Returns:
        The function.
    """
    write: Any = writer.add_scalar

    def on_step(latest: dict[str, float]) -> None:
        step, numbers = named(latest, f"{prefix}/")
        for name, value in numbers.items():
            write(name, value, step)

    return on_step
