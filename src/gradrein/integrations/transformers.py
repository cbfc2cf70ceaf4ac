"""A Transformers callback: `Trainer(..., callbacks=[MonitorCallback("run.jsonl")])`."""

import inspect
import os
from typing import Any

from ..watch import ClipOption, Monitor
from ._missing import missing
from ._scalars import named

try:
    from transformers import TrainerCallback
    from transformers.trainer_callback import CallbackHandler
except ImportError as error:
    raise missing("transformers", "transformers") from error


class MonitorCallback(TrainerCallback):
    """Record the training, clip if asked to, note the evaluation loss, and add `gradrein_...` to the logs.

    The logs reach every tracker of `report_to`: when training begins, this callback takes the first place among the
    trainer's, before the trackers.

    The trainer clips at `max_grad_norm=1.0` by default; the record shows the norms before that. To clip
    here instead, pass `max_grad_norm=0` to `TrainingArguments`.

    Args:
        record: The file to write; None for a temporary one.
        clip: As in `gradrein.Monitor`.
        every: Record every so many steps.

    Attributes:
        monitor: The `gradrein.Monitor`, once training has begun.
    """

    def __init__(
        self, record: str | os.PathLike[str] | None = None, *, clip: ClipOption = None, every: int = 1
    ) -> None:
        self._options: dict[str, Any] = {"record": record, "clip": clip, "every": every}
        self.monitor: Monitor | None = None
        self._model: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:  # noqa: ARG002
        """Start recording, or go on with the record of this model. Each of several processes records itself."""
        _put_first(self)
        if self.monitor is None or model is not self._model:
            self.monitor, self._model = Monitor(model, **self._options), model
        self.monitor.start()

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:  # noqa: ARG002
        """Note the evaluation loss, which the page draws as the test loss."""
        if self.monitor is not None and metrics and "eval_loss" in metrics:
            self.monitor.note("test", loss=float(metrics["eval_loss"]))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:  # noqa: ARG002
        """Add the latest numbers to a log of the loss."""
        if self.monitor is not None and logs is not None and "loss" in logs:
            logs.update(named(self.monitor.latest, "gradrein_")[1])

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Complete the record."""
        if self.monitor is not None:
            self.monitor.stop()


def _put_first(callback: TrainerCallback) -> None:
    """Move a callback before all others. The handler that calls it is not passed to it, so it is looked for."""
    frame = inspect.currentframe()
    while frame is not None and not isinstance(frame.f_locals.get("self"), CallbackHandler):
        frame = frame.f_back
    callbacks = frame.f_locals["self"].callbacks if frame is not None else []
    if callback in callbacks:
        callbacks.remove(callback)
        callbacks.insert(0, callback)
