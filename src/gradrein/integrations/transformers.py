"""Transformers callbacks: `Trainer(..., callbacks=[ClipCallback(1.0)])`, `MonitorCallback("run.jsonl")`."""

import inspect
import os
from pathlib import Path
from typing import Any

import torch

from ..clip import Clipper, NonFinite
from ..errors import PrivacyError
from ..private import Private
from ..watch import ClipOption, Layers, Monitor
from ._clipping import ClipPolicy, policies_of
from ._missing import missing
from ._scalars import named

try:
    from transformers import Trainer, TrainerCallback
    from transformers.trainer_callback import CallbackHandler
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
        self._model: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:  # noqa: ARG002
        """Start recording, or go on with the record of this model. Each of several processes records itself."""
        _put_first(self)
        if self._options["clip"] is not None:
            args.max_grad_norm = 0.0
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


class ClipCallback(TrainerCallback):
    """Clip in place of the trainer, inside the step of the optimizer: once, also under DDP and FSDP2.

    The trainer's own `max_grad_norm` is switched off. `grad_norm` in its log is the norm before clipping, and
    `grad_norm_clipped` the one after. What policies have learned is saved in the trainer's checkpoints, and loaded from
    that of the step which training goes on from, in `output_dir`. After training the optimizer is as it was.

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

    def on_train_begin(
        self,
        args: Any,
        state: Any,
        control: Any,  # noqa: ARG002
        model: Any = None,
        optimizer: Any = None,
        **kwargs: Any,  # noqa: ARG002
    ) -> None:
        """Switch the trainer's own clipping off, and attach to its optimizer."""
        _put_first(self)
        args.max_grad_norm = 0.0
        inner = getattr(optimizer, "optimizer", optimizer)  # that of accelerate holds the one that steps
        if self.clipper is not None:
            self.clipper.remove()  # of training that failed
        self.clipper = Clipper(inner, self._policy, model=model, nonfinite=self._nonfinite)
        if _clipper_file(args, state).exists():
            self.clipper.load_state_dict(torch.load(_clipper_file(args, state), weights_only=True))

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Save what the policies have learned in the checkpoint; all processes have learned the same."""
        if self.clipper is not None and state.is_world_process_zero:
            torch.save(self.clipper.state_dict(), _clipper_file(args, state))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Leave the optimizer as it was."""
        if self.clipper is not None:
            self.clipper.remove()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:  # noqa: ARG002
        """Add the norms of the last step to a log of the loss."""
        report = None if self.clipper is None else self.clipper.report
        if report is not None and logs is not None and "loss" in logs:
            logs.setdefault("grad_norm", float(report.norm))  # the trainer's own, where it has measured it
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


def _clipper_file(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}" / "clipper.pt"


def _put_first(callback: TrainerCallback) -> None:
    """Move a callback before all others. The handler that calls it is not passed to it, so it is looked for."""
    frame = inspect.currentframe()
    while frame is not None and not isinstance(frame.f_locals.get("self"), CallbackHandler):
        frame = frame.f_back
    callbacks = frame.f_locals["self"].callbacks if frame is not None else []
    if callback in callbacks:
        callbacks.remove(callback)
        callbacks.insert(0, callback)
