"""The observer behind `Monitor`: measures each step, attaches clipping where asked to, writes lines."""

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..._events import ClipEvent, Subscriber
from ..._torch.training import StepHook, is_stepping
from ...clip import Clipper
from ...errors import NonFiniteGradientError
from ...policies import Policy
from ..clip_option import LBFGS_CAUTION, ClipOption, policy_of
from ..format.rank_files import RankInfo
from ..format.schema import Line
from ..say import say
from . import hooks
from .batches import Batch, BatchTracker
from .call_sites import CallSites
from .clipping import ClipTracker, refuse_flattened, remaining_scale, undo_clipping
from .curves import CurveObserver
from .loss import LossTracker
from .measure import Measurement, Meter
from .step_timer import StepTimer
from .writer import Writer, reason, rounded


class _MonitorClipper(Clipper):
    """Clips after the clippers of the script, whatever they are for."""

    _beside_others = True


@dataclass
class _Watched:
    """One optimizer, and the step it is in."""

    optimizer: torch.optim.Optimizer
    opt: int
    policy: Policy | None
    hook: StepHook | None = None
    clipper: Clipper | None = None
    meter: Meter | None = None
    names: list[str] = field(default_factory=list)
    steps: int = 0
    ignored: bool = False
    measured: Measurement | None = None
    line: Line = field(default_factory=dict)


class Recorder(Subscriber):
    """Observes one optimizer, or all that step.

    Attributes:
        failure: Why recording stopped before the run did.
        latest: The last line of a step.
        backwards: The number of backward passes so far.
    """

    def __init__(
        self,
        model: torch.nn.Module | None,
        only: torch.optim.Optimizer | None,
        clip: ClipOption,
        every: int,
        writer: Writer,
        on_recorded: Callable[[], None] | None = None,
        rank: RankInfo | None = None,
    ) -> None:
        self._model, self._only, self._clip, self._every, self._writer = model, only, clip, every, writer
        self._on_recorded, self._rank = on_recorded, rank
        self._watched: dict[int, _Watched] = {}
        self._process = os.getpid()
        self._loss, self._clipping, self._timer = LossTracker(), ClipTracker(), StepTimer()
        self._batches = BatchTracker()
        self._samples: dict[str, Any] = {}
        self._began = time.perf_counter()
        self.failure: str | None = None
        self.latest: Line = {}
        self.backwards = 0
        self._curves = CurveObserver(writer.write, lambda: max((w.steps for w in self._watched.values()), default=0))
        self._sites = CallSites(writer.write)

    @property
    def steps(self) -> int:
        """The number of steps so far, of all optimizers."""
        return sum(w.steps for w in self._watched.values())

    def attach(self, empty: bool) -> None:
        """Observe, for the first time or again. `empty`: the record is, so that everything is to be introduced."""
        self._process = os.getpid()
        self._loss, self._clipping, self._timer = LossTracker(), ClipTracker(), StepTimer()
        self._batches = BatchTracker()
        self._samples, self.failure = {}, None
        for watched in self._watched.values():
            watched.meter = None if empty else watched.meter
        hooks.subscribe(self)
        self._curves.install()

    def detach(self) -> None:
        """Observe no more, and remove everything from the optimizers."""
        hooks.unsubscribe(self)
        self._curves.remove()
        for watched in self._watched.values():
            if watched.hook is not None:
                watched.hook.remove()
            if watched.clipper is not None:
                watched.clipper.remove()
            if watched.meter is not None:
                watched.meter.skip_step()  # a gradient after a pause does not follow the last step before it
            watched.hook = watched.clipper = watched.measured = None

    def fail(self, why: str) -> None:
        """Stop recording, and say so once. The program goes on."""
        if self.failure is None:
            self.failure = why
            self._writer.write({"stopped": why, "after": self.steps})
            say(f"gradrein: recording stopped at step {self.steps}, the program continues: {why}")

    def on_backward(self, tensors: Any) -> None:
        """Add to the loss of the coming step."""
        self.backwards += 1
        self._timer.enter_backward()
        self._sites.on_backward(tensors)
        self._batches.on_backward()
        with self._failing():
            if (loss := hooks.loss_of(tensors)) is not None:
                self._loss.add(loss)

    def on_backward_end(self, error: BaseException | None) -> None:
        """Note what `detect_nonfinite` says is the origin of a NaN."""
        self._timer.leave_backward()
        if isinstance(error, NonFiniteGradientError):
            self._writer.write({"anomaly": str(error).splitlines()[-1], "after": self.steps})

    def on_data_wait(self, seconds: float) -> None:
        """Add to the time spent waiting for data."""
        self._timer.add_data(seconds)

    def on_batch(self, batch: Batch | None) -> None:
        """Keep which samples were loaded last."""
        self._batches.on_batch(batch)

    def before_clip(self, parameters: list[Tensor]) -> None:
        """Measure gradients that are about to be clipped, if the step may be recorded."""
        due = not self._watched or any(self._is_due(watched) for watched in self._watched.values())
        if self.failure is None and due:
            with self._failing():
                self._clipping.before_clip(parameters)

    def after_clip(self, parameters: list[Tensor], event: ClipEvent) -> None:
        """Keep what clipping did."""
        with self._failing():
            self._clipping.after_clip(parameters, event)

    def on_samples(self, norms: Tensor) -> None:
        """Take the gradient norm of each sample of the coming step."""
        squares = norms.detach().double().square()
        self._samples = {"samples": squares.numel(), "sample_square": float(squares.mean())}
        if squares.numel():
            largest, middle = float(squares.max()), float(squares.median())
            share = math.sqrt(largest / middle) if middle > 0 else math.inf
            self._samples["sample_ratio"] = rounded([share])[0]

    def on_scaler_update(self) -> None:
        """Drop the loss of a step that a GradScaler has left out because of a non-finite gradient."""
        if self._loss.discard():
            self._writer.write({"note": "scaler skipped", "after": self.steps})

    def on_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Attach to an optimizer at its first step, and run after all its other hooks at each."""
        if self._only is not None and optimizer is not self._only:
            return
        inner = self._is_within_a_step(optimizer)
        watched = self._watched.get(id(optimizer))
        if watched is None:
            if inner:
                return
            policy = policy_of(self._clip)
            watched = self._watched[id(optimizer)] = _Watched(optimizer, len(self._watched), policy)
            if os.getpid() == self._process:
                self._sites.on_step(optimizer, watched.opt)
        if os.getpid() == self._process:
            self._curves.on_step()
        hook = watched.hook or self._hook(watched)
        watched.ignored = inner
        with self._failing():
            hook.move_last()

    def _hook(self, watched: _Watched) -> StepHook:
        """Attach to an optimizer. Only clipping may be refused here: that would change the run."""
        optimizer, policy = watched.optimizer, watched.policy
        if policy is not None:
            refuse_flattened(optimizer)
            if isinstance(optimizer, torch.optim.LBFGS):
                say(f"gradrein: {LBFGS_CAUTION}")
            watched.clipper = _MonitorClipper(optimizer, policy, nonfinite="skip")
        watched.hook = StepHook(
            optimizer, lambda again: self._on_gradients(watched, again), lambda: self._on_end(watched)
        )
        return watched.hook

    def _is_within_a_step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether another optimizer uses this one for its own step, as ZeroRedundancyOptimizer does."""
        others = [w.optimizer for w in self._watched.values() if w.optimizer is not optimizer]
        return any(is_stepping(other) and _parameters(optimizer) <= _parameters(other) for other in others)

    def _is_due(self, watched: _Watched) -> bool:
        return watched.steps % self._every == 0

    def _on_gradients(self, watched: _Watched, again: bool) -> None:
        """Measure the gradients as the optimizer gets them."""
        if watched.ignored or os.getpid() != self._process:
            return
        if again:  # a closure was evaluated once more: the step is recorded as it was the first time
            self._loss.discard()
            return
        watched.measured = None
        spent = self._timer.read()  # before measuring, whose time is nobody's
        loss, backwards = self._loss.take(watched.opt)
        self._batches.end_step()
        if self.failure is not None or not self._is_due(watched):
            if watched.meter is not None:
                watched.meter.skip_step()  # the next gradient does not follow the last step that was measured
            return
        with self._failing():
            self._measure(watched, loss, backwards, spent)

    def _measure(
        self, watched: _Watched, loss: float | None, backwards: int, spent: tuple[float, float, float] | None
    ) -> None:
        meter = watched.meter
        if meter is None or meter.is_stale():
            meter = watched.meter = Meter(watched.optimizer, self._rank.rank if self._rank else 0)
            watched.names = meter.names(self._model)
            self._writer.write(_optimizer_line(watched, meter))
        known, scale = set(meter.unmeasurable), remaining_scale(watched.optimizer)
        measured = meter.measure_step(scale)
        for i in meter.unmeasurable.keys() - known:
            line = {"unmeasured": watched.names[i], "reason": meter.unmeasurable[i], "after": self.steps}
            self._writer.write(line)
        clipped = self._clipping.take(meter.parameters)
        complete = not meter.is_sharded and not meter.unmeasurable
        clipping = undo_clipping(measured, clipped, meter.parameters, scale, complete)
        watched.line = self._line(watched, measured, loss, backwards, clipping)
        if self._rank is not None and spent is not None:
            watched.line.update(zip(("host_s", "backward_s", "data_s"), rounded(spent), strict=True))
        batch = self._batches.line(watched.opt, watched.steps, norm=measured.norm, loss=loss)
        if batch is not None:
            self._writer.write(batch)
        meter.hold_weights()
        watched.measured = measured

    def _on_end(self, watched: _Watched) -> None:
        """Measure the update, and write the line."""
        if watched.ignored or os.getpid() != self._process:
            return
        watched.steps += 1
        measured, watched.measured = watched.measured, None
        if measured is not None and watched.meter is not None and self.failure is None:
            with self._failing():
                self._write(watched.meter, measured, watched.line)
            if self._on_recorded is not None and self.failure is None:
                self._on_recorded()
        self._timer.start()

    def _write(self, meter: Meter, measured: Measurement, line: Line) -> None:
        meter.measure_update(measured)
        line["update"], line["unmoved"] = rounded([measured.update])[0], measured.unmoved
        if meter.is_sharded:
            line["partial_sums"] = rounded(measured.partial_sums, 9)
        self.latest = {k: v for k, v in line.items() if v is not None and v != []}
        self._writer.write_step(self.latest)

    def _line(
        self, watched: _Watched, measured: Measurement, loss: float | None, backwards: int, clipping: dict[str, Any]
    ) -> Line:
        norm = rounded([measured.norm], 9)[0]
        lrs = [float(group["lr"]) for group in watched.optimizer.param_groups if "lr" in group]
        line: Line = {
            "step": watched.steps,
            "opt": watched.opt,
            "time": round(time.perf_counter() - self._began, 3),
            "loss": rounded([loss], 9)[0],
            "norm": norm,
            "peak": norm,
            "norms": rounded(measured.norms),
            "lr": rounded(lrs),
            "step_grad_cosine": rounded([measured.step_grad_cosine], 4)[0],
            "n_steps": 1,
            **clipping,
            **self._samples,
        }
        self._samples = {}
        if backwards > 1:
            line["backwards"] = backwards
        if measured.nonfinite:
            line["nonfinite"] = {watched.names[i]: n for i, n in measured.nonfinite.items()}
        return line

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """Stop recording where an error is raised: the program must not suffer from being observed."""
        try:
            yield
        except Exception as error:
            self.fail(reason(error))
        if self._writer.failure is not None:
            self.fail(self._writer.failure)


def _optimizer_line(watched: _Watched, meter: Meter) -> Line:
    return {
        "optimizer": type(watched.optimizer).__name__,
        "opt": watched.opt,
        "names": watched.names,
        "sizes": [p.numel() for p in meter.parameters],
        "trained": [p.requires_grad for p in meter.parameters],
        "settings": _settings(watched.optimizer),
        "dtypes": sorted({str(p.dtype).removeprefix("torch.") for p in meter.parameters}),
        **({"shards": meter.shards} if any(meter.shards) else {}),
    }


def _settings(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the numbers that the first parameter group is set to, beside its learning rate."""
    group = {k: v for k, v in optimizer.param_groups[0].items() if k not in ("params", "lr", "initial_lr")}
    plain = {k: list(v) if isinstance(v, tuple) else v for k, v in group.items()}
    numbers = {k: v if isinstance(v, list) else [v] for k, v in plain.items()}
    return {
        k: plain[k] for k, vs in numbers.items() if all(isinstance(v, (int, float)) and math.isfinite(v) for v in vs)
    }


def _parameters(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(p) for group in optimizer.param_groups for p in group["params"]}
