"""Transformers callbacks: `Trainer(..., callbacks=[ClipCallback(1.0)])`, `MonitorCallback("run.jsonl")`."""

import copy
import inspect
import os
import warnings
from pathlib import Path
from typing import Any

import torch

from ..clip import Clipper, NonFinite
from ..errors import GradreinWarning, PrivacyError
from ..private import Private
from ..watch import ClipOption, Layers, Monitor
from ._clipping import ClipPolicy, Meanwhile, policies_of
from ._missing import missing
from ._scalars import named

try:
    from transformers import Trainer, TrainerCallback
except ImportError as error:
    raise missing("transformers", "transformers") from error


class MonitorCallback(TrainerCallback):
    """Record the training, clip if asked to, note the evaluation loss, and add `gradrein_...` to the logs.

    The logs reach every tracker of `report_to`: when training begins, this callback takes the first place among the
    trainer's, before the trackers.

    The trainer clips at `max_grad_norm=1.0` by default; the record shows the norms before that. With `clip=` its own
    clipping is switched off.

    Args:
        record: The file to write; None for a temporary one.
        clip: As in `gradrein.Monitor`.
        norms: As in `gradrein.Monitor`: numbers by layer for the logs.
        every: Record every so many steps.

    Attributes:
        monitor: The `gradrein.Monitor`, once training has begun.
    """

    def __init__(
        self,
        record: str | os.PathLike[str] | None = None,
        *,
        clip: ClipOption = None,
        norms: Layers | None = None,
        every: int = 1,
    ) -> None:
        self._options: dict[str, Any] = {"record": record, "clip": clip, "norms": norms, "every": every}
        self.monitor: Monitor | None = None
        self._watched: tuple[Any, Any] = None, None
        self._test_loss: str | None = None
        self._own = Meanwhile()

    def on_train_begin(
        self,
        args: Any,
        state: Any,  # noqa: ARG002
        control: Any,  # noqa: ARG002
        model: Any = None,
        optimizer: Any = None,
        **kwargs: Any,  # noqa: ARG002
    ) -> None:
        """Start recording, or go on with the record of these. Each of several processes records itself."""
        trainer, _ = _called_by(self)
        if self._options["clip"] is not None:
            _switch_off(self._own, trainer, args)
        inner = getattr(optimizer, "optimizer", optimizer)  # that of accelerate holds the one that steps
        watched = model, inner if isinstance(inner, torch.optim.Optimizer) else None
        if self.monitor is None or any(a is not b for a, b in zip(watched, self._watched, strict=True)):
            if self.monitor is not None:
                self.monitor.stop()  # of training that failed
            self.monitor, self._watched = Monitor(*watched, **self._options), watched
        self.monitor.start()

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:  # noqa: ARG002
        """Note the evaluation loss, which the page draws as the test loss."""
        names = [name for name in metrics or () if name.startswith("eval_") and name.endswith("loss")]
        self._test_loss = self._test_loss or min(names, key=len, default=None)  # of several datasets the first
        if self.monitor is not None and self._test_loss in names:
            self.monitor.note("test", loss=float(metrics[self._test_loss]))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:  # noqa: ARG002
        """Add the latest numbers to a log of the loss."""
        if self.monitor is not None and logs is not None and "loss" in logs:
            logs.update(named(self.monitor.latest, "gradrein_")[1])

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Complete the record."""
        self._own.restore()
        if self.monitor is not None:
            self.monitor.stop()


class ClipCallback(TrainerCallback):
    """Clip in place of the trainer, inside the step of the optimizer: once, also under DDP and FSDP2.

    The trainer's own `max_grad_norm` is off meanwhile. `grad_norm` in its log is the norm before clipping, of all that
    a policy is for, and `grad_norm_clipped` the one after. What policies have learned is saved in the trainer's
    checkpoints and loaded from the one that training is resumed from; another model begins anew. After training
    trainer and optimizer are as they were.

    Args:
        policy: The largest norm; or a policy or its name; or a mapping from name patterns to those, None for what is
            not clipped: `{"*embed*": None, "*": 1.0}`.
        nonfinite: As in `gradrein.clip_`.

    Attributes:
        clipper: The `gradrein.Clipper`, once training has begun.
    """

    def __init__(self, policy: ClipPolicy, *, nonfinite: NonFinite = "raise") -> None:
        self._policy, self._nonfinite = policies_of(policy), nonfinite
        self.clipper: Clipper | None = None
        self._model: Any = None
        self._folder = ""
        self._own = Meanwhile()

    def on_train_begin(
        self,
        args: Any,
        state: Any,  # noqa: ARG002
        control: Any,  # noqa: ARG002
        model: Any = None,
        optimizer: Any = None,
        **kwargs: Any,  # noqa: ARG002
    ) -> None:
        """Switch the trainer's own clipping off, and attach to its optimizer."""
        trainer, local = _called_by(self)
        _switch_off(self._own, trainer, args)
        self._folder = args.output_dir if trainer is None else trainer._get_output_dir(local.get("trial"))
        inner = getattr(optimizer, "optimizer", optimizer)  # that of accelerate holds the one that steps
        if self.clipper is not None:
            self.clipper.remove()  # of training that failed
        goes_on = self.clipper is not None and model is self._model
        policy = self.clipper.policy if goes_on else copy.deepcopy(self._policy)  # type: ignore[union-attr]
        self.clipper, self._model = Clipper(inner, policy, model=model, nonfinite=self._nonfinite), model
        resumed = local.get("resume_from_checkpoint")
        if resumed is not None and self.clipper.state_dict():
            file = Path(resumed) / _FILE
            if file.exists():
                self.clipper.load_state_dict(torch.load(file, weights_only=True))
            else:
                warnings.warn(
                    f"ClipCallback: {file} does not exist, so the policy begins to learn anew.",
                    GradreinWarning,
                    stacklevel=2,
                )

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Save what the policies have learned in the checkpoint; all processes have learned the same."""
        if self.clipper is not None and state.is_world_process_zero:
            torch.save(self.clipper.state_dict(), Path(self._folder) / f"checkpoint-{state.global_step}" / _FILE)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Leave trainer and optimizer as they were."""
        self._own.restore()
        if self.clipper is not None:
            self.clipper.remove()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:  # noqa: ARG002
        """Add the norms of the last step to a log of the loss."""
        report = None if self.clipper is None else self.clipper.report
        if report is not None and logs is not None and "loss" in logs:
            logs["grad_norm"] = float(report.norm)
            logs["grad_norm_clipped"] = float(report.norm_after)


class PrivateTrainer(Trainer):
    """A trainer whose steps are those of a private run. A subclass says what the loss of each sample is.

    The state of the run is saved and loaded with the trainer's checkpoints. Evaluation is the trainer's own.

    Args:
        run: The run, made with model, optimizer and training data.
        kwargs: As for `Trainer`, without these three.
    """

    def __init__(self, run: Private, **kwargs: Any) -> None:
        self._run = run
        super().__init__(model=run.model, optimizers=(run.optimizer, None), train_dataset=run.loader.dataset, **kwargs)
        if (
            self.args.gradient_accumulation_steps > 1
            or self.args.fp16
            or self.args.world_size > 1
            or self.args.n_gpu > 1
        ):
            raise PrivacyError(
                "PrivateTrainer: pass max_physical_batch to Private instead of gradient_accumulation_steps, use bf16 "
                "instead of fp16, and train in one process."
            )
        self.args.ignore_data_skip = True  # the loader goes on where the run was

    def losses(self, model: Any, inputs: Any) -> torch.Tensor:
        """Return one loss for each sample."""
        raise NotImplementedError(
            "PrivateTrainer: write a method losses(self, model, inputs), one loss for each sample."
        )

    def get_train_dataloader(self) -> Any:
        """Return the loader of the run."""
        return self._run.loader

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:  # noqa: ARG002
        """Take a step of the run. The one that the trainer takes afterwards finds no gradients."""
        model.train()
        with self.compute_loss_context_manager():
            losses = self.losses(self._run.model, self._prepare_inputs(inputs))
        self._run.step(losses)
        return losses.detach().mean()

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        torch.save(self._run.state_dict(), Path(output_dir) / "private.pt")

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self._run.load_state_dict(torch.load(Path(checkpoint) / "private.pt", weights_only=True))


_FILE = "clipper.pt"


def _switch_off(own: Meanwhile, trainer: Any, args: Any) -> None:
    """Switch the trainer's own clipping off, and its measuring, which makes all gradients NaN where one is."""
    own.set(args, "max_grad_norm", 0.0)
    if trainer is not None:
        own.set(trainer, "_get_grad_norm", lambda model, grad_norm=None: grad_norm)  # noqa: ARG005


def _called_by(callback: TrainerCallback) -> tuple[Any, dict[str, Any]]:
    """Return the trainer that calls a callback and does not pass itself, and the names there. Move it before others."""
    frame = inspect.currentframe()
    while frame is not None and not isinstance(frame.f_locals.get("self"), Trainer):
        frame = frame.f_back
    if frame is None:
        return None, {}
    trainer, callbacks = frame.f_locals["self"], frame.f_locals["self"].callback_handler.callbacks
    if callback in callbacks:
        callbacks.remove(callback)
        callbacks.insert(0, callback)
    return trainer, dict(frame.f_locals)
