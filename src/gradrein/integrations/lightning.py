"""A Lightning callback: `Trainer(callbacks=[MonitorCallback("run.jsonl")])`."""

import os
from typing import Any

from ..watch import ClipOption, Monitor
from ._missing import missing
from ._scalars import named

try:
    from lightning.pytorch.callbacks import Callback
except ImportError as error:
    raise missing("lightning", "lightning") from error


class MonitorCallback(Callback):
    """Record the fit, clip if asked to, note the validation loss, and log the latest numbers as `gradrein/...`.

    Args:
        record: The file to write; None for a temporary one.
        clip: As in `gradrein.Monitor`, instead of the trainer's `gradient_clip_val`; with both, both clip.
        every: Record every so many steps.
        validation_loss: The name under which the module logs its validation loss, which becomes the test loss of the
            page. None: the first logged name that has both "val" and "loss" in it.

    Attributes:
        monitor: The `gradrein.Monitor`, once the fit has begun.
    """

    def __init__(
        self,
        record: str | os.PathLike[str] | None = None,
        *,
        clip: ClipOption = None,
        every: int = 1,
        validation_loss: str | None = None,
    ) -> None:
        self._options: dict[str, Any] = {"record": record, "clip": clip, "every": every}
        self._validation_loss = validation_loss
        self.monitor: Monitor | None = None
        self._module: Any = None

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """Start recording, or go on with the record of this module. Each of several processes records itself."""
        if self.monitor is None or pl_module is not self._module:
            self.monitor, self._module = Monitor(pl_module, **self._options), pl_module
        self.monitor.start()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Log the latest numbers, if the trainer has a logger."""
        if self.monitor is not None and trainer.logger is not None:
            pl_module.log_dict(named(self.monitor.latest, "gradrein/")[1], rank_zero_only=True, batch_size=1)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """Note the validation loss of a fit, which the page draws and the report judges."""
        if self.monitor is None or trainer.sanity_checking or trainer.state.fn != "fit":
            return
        found = trainer.callback_metrics
        name = self._validation_loss or next((n for n in found if "val" in n.lower() and "loss" in n.lower()), None)
        if name in found:
            self.monitor.note("val", loss=float(found[name]))

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """Complete the record."""
        self._stop()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:  # noqa: ARG002
        """Complete the record of a fit that failed."""
        self._stop(f"{type(exception).__name__}: {exception}")

    def _stop(self, because: str | None = None) -> None:
        if self.monitor is not None:
            self.monitor.stop(because)
