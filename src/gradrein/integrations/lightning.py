"""Lightning callbacks: `Trainer(callbacks=[ClipCallback(1.0)])`, `MonitorCallback("run.jsonl")`."""

import copy
import os
from collections.abc import Mapping
from typing import Any

from ..clip import Clipper, NonFinite
from ..errors import PrivacyError
from ..private import Private
from ..watch import ClipOption, Layers, Monitor
from ._clipping import ClipPolicy, Meanwhile, policies_of
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
        clip: As in `gradrein.Monitor`, instead of the trainer's `gradient_clip_val`, which is switched off.
        norms: As in `gradrein.Monitor`: numbers by layer for the logs.
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
        norms: Layers | None = None,
        every: int = 1,
        validation_loss: str | None = None,
    ) -> None:
        self._options: dict[str, Any] = {"record": record, "clip": clip, "norms": norms, "every": every}
        self._validation_loss = validation_loss
        self.monitor: Monitor | None = None
        self._module: Any = None
        self._latest: dict[int, dict[str, float]] = {}
        self._own = Meanwhile()

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Start recording, or go on with the record of this module. Each of several processes records itself."""
        if self._options["clip"] is not None:
            self._own.set(trainer, "gradient_clip_val", None)
        if self.monitor is None or pl_module is not self._module:
            self._latest = {}
            self.monitor, self._module = Monitor(pl_module, **self._options, on_step=self._keep), pl_module
        self.monitor.start()

    def _keep(self, line: dict[str, float]) -> None:
        self._latest[int(line.get("opt", 0))] = line

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Log the latest numbers of each optimizer, if the trainer has a logger."""
        if self.monitor is not None and trainer.logger is not None and trainer._logger_connector.should_update_logs:
            _ = self.monitor.latest  # what is still on a device is read
            for line in self._latest.values():
                pl_module.log_dict(named(line, "gradrein/")[1], rank_zero_only=True, batch_size=1)

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
        self._own.restore()
        if self.monitor is not None:
            self.monitor.stop(because)


class ClipCallback(Callback):
    """Clip in place of the trainer, inside the step of each optimizer: once, also under DDP and FSDP2.

    The trainer's own `gradient_clip_val` is off meanwhile; a module that calls `clip_gradients` itself clips as well.
    The norms before and after, of all that a policy is for, are logged as `grad_norm` and `grad_norm_clipped`, those of
    a second optimizer as `grad_norm/1` and so on. What policies have learned is saved and loaded with Lightning's
    checkpoints, and goes on in a second fit of the module. After a fit trainer and optimizers are as they were.

    Args:
        policy: The largest norm; or a policy or its name; or a mapping from name patterns to those, None for what is
            not clipped: `{"*embed*": None, "*": 1.0}`.
        nonfinite: As in `gradrein.clip_`.

    Attributes:
        clippers: A `gradrein.Clipper` for each optimizer, once the fit has begun.
    """

    def __init__(self, policy: ClipPolicy, *, nonfinite: NonFinite = "raise") -> None:
        self._policy, self._nonfinite = policy, nonfinite
        policies_of(policy)  # a mistake is an error here
        self.clippers: list[Clipper] = []
        self._saved: list[dict[str, Any]] = []
        self._module: Any = None
        self._own = Meanwhile()

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach to the optimizers, each with policies of its own, which go on from where they were."""
        self._own.set(trainer, "gradient_clip_val", None)
        names = pl_module if isinstance(self._policy, Mapping) else None  # an optimizer may have more than the module
        self.clippers = [
            Clipper(one, policies_of(copy.deepcopy(self._policy)), model=names, nonfinite=self._nonfinite)
            for one in trainer.optimizers
        ]
        if self._module not in (None, pl_module):
            self._saved = []
        self._module = pl_module
        if self._saved:
            for clipper, state in zip(self.clippers, self._saved, strict=True):
                clipper.load_state_dict(state)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """Leave trainer and optimizers as they were."""
        self._own.restore()
        self._saved = self.state_dict()["clippers"]
        for clipper in self.clippers:
            clipper.remove()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:  # noqa: ARG002
        """Leave the optimizers of a fit that failed as they were."""
        self.on_fit_end(trainer, pl_module)

    def state_dict(self) -> dict[str, Any]:
        """Return what the policies of each optimizer have learned."""
        return {"clippers": [clipper.state_dict() for clipper in self.clippers]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint, once the fit begins."""
        self._saved, self._module = state_dict["clippers"], None

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Log the norms of the last step, if the trainer has a logger."""
        if trainer.logger is None or not trainer._logger_connector.should_update_logs:
            return
        for i, clipper in enumerate(self.clippers):
            if clipper.report is not None:
                end = f"/{i}" if i else ""
                norms = {f"grad_norm{end}": clipper.report.norm, f"grad_norm_clipped{end}": clipper.report.norm_after}
                pl_module.log_dict(norms, rank_zero_only=True, batch_size=1)


class PrivateCallback(Callback):
    """Private training of a module that optimizes by hand: its `training_step` calls `run.step(losses)`.

    Fit it with `run.loader`. The state of the run is saved and loaded with Lightning's checkpoints.

    Args:
        run: The run, made with the module and its optimizer, and without `max_physical_batch`.
    """

    def __init__(self, run: Private) -> None:
        if run.loader.max_physical_batch is not None:
            raise PrivacyError(
                "PrivateCallback: with max_physical_batch the number of batches is not known, and Lightning fetches "
                "one ahead, which is not accounted for. Leave it out."
            )
        self._run = run

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Refuse a fit that is not that of the run."""
        fits = trainer.train_dataloader is self._run.loader and pl_module is self._run.model
        if not fits or pl_module.automatic_optimization or trainer.world_size > 1:
            raise PrivacyError(
                "PrivateCallback: fit the module of the run, with run.loader, in one process, and set "
                "self.automatic_optimization = False in it; its training_step calls run.step(losses)."
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the run."""
        return self._run.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the run; the module was loaded before."""
        self._run.load_state_dict(state_dict)
