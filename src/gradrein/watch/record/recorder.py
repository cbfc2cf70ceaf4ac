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

from ..._devices import accumulation_dtype
from ..._events import ClipEvent, Subscriber
from ..._torch.training import StepHook, is_stepping
from ...clip import Clipper
from ...errors import NonFiniteGradientError
from ...policies import Policy
from ..format.rank_files import RankInfo
from ..format.schema import Line
from ..say import say
from . import hooks
from .batches import Batch, BatchTracker
from .call_sites import backward_sites, step_sites
from .clipping import ClipTracker, refuse_flattened, remaining_scale, restore_norms, unscaled
from .curves import CurveObserver
from .layers import LayerNorms, Layers
from .loss import LossTracker
from .measure import Meter
from .readback import Numbers, Readback, Values
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
    pending: tuple[Values, Tensor | None, Callable[[Numbers], None]] | None = None


class Recorder(Subscriber):
    """Observes one optimizer, or all that step.

    Attributes:
        failure: Why recording stopped before the run did.
        latest: The last line of a step, with norms by layer under `layers`.
        backwards: The number of backward passes so far.
    """

    def __init__(
        self,
        model: torch.nn.Module | None,
        only: torch.optim.Optimizer | None,
        new_policy: Callable[[], Policy | None],
        every: int,
        writer: Writer,
        on_recorded: Callable[[Line], None] | None = None,
        rank: RankInfo | None = None,
        flush_every: int = 1,
        layers: Layers | None = None,
    ) -> None:
        self._model, self._only, self._new_policy, self._every, self._writer = model, only, new_policy, every, writer
        self._on_recorded, self._rank = on_recorded, rank
        self._watched: dict[int, _Watched] = {}
        self._readback, self._layers = Readback(flush_every), layers
        self._began = time.perf_counter()
        self._begin()
        self.latest: Line = {}
        self._written: list[Line] = []
        self.backwards = 0
        self._curves = CurveObserver(writer.write, lambda: max((w.steps for w in self._watched.values()), default=0))

    @property
    def steps(self) -> int:
        """The number of steps so far, of all optimizers."""
        return sum(w.steps for w in self._watched.values())

    def attach(self, empty: bool) -> None:
        """Observe, for the first time or again. `empty`: the record is, so that everything is to be introduced."""
        self._begin()
        for watched in self._watched.values():
            watched.meter = None if empty else watched.meter
        hooks.subscribe(self)
        self._curves.install()

    def _begin(self) -> None:
        """Forget what belongs to a step that was not taken, and why recording stopped."""
        self._process = os.getpid()
        self._loss, self._clipping, self._batches = LossTracker(), ClipTracker(), BatchTracker()
        self._sample_norms: Tensor | None = None
        self.failure: str | None = None

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
            watched.hook = watched.clipper = watched.pending = None
        self.flush()  # last: a function of the program may raise

    def flush(self) -> None:
        """Read and write the steps that are still on a device."""
        if self.failure is None and os.getpid() == self._process:
            with self._failing():
                self._readback.flush()
            self._call_back()

    def fail(self, why: str) -> None:
        """Stop recording, and say so once. The program goes on."""
        if self.failure is None:
            self.failure = why
            self._writer.write({"stopped": why, "after": self.steps})
            say(f"gradrein: recording stopped at step {self.steps}, the program continues: {why}")

    def on_backward(self, tensors: Any) -> None:
        """Add to the loss of the coming step."""
        self.backwards += 1
        if self.backwards == 1:
            self._write_all(backward_sites(tensors))
        self._batches.on_backward()
        with self._failing():
            if (loss := hooks.loss_of(tensors)) is not None:
                self._loss.add(loss)

    def on_backward_end(self, error: BaseException | None) -> None:
        """Note what `detect_nonfinite` says is the origin of a NaN."""
        if isinstance(error, NonFiniteGradientError):
            self._writer.write({"anomaly": str(error).splitlines()[-1], "after": self.steps})

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
        self._sample_norms = norms.detach()

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
            watched = self._watched[id(optimizer)] = _Watched(optimizer, len(self._watched), self._new_policy())
            if os.getpid() == self._process:
                self._write_all(step_sites(optimizer, watched.opt))
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
        watched.pending = None
        loss, backwards = self._loss.take(watched.opt)
        batches = self._batches.end_step()
        # Other ranks may wait for what this one measures by layer: that goes on where it can no longer be written.
        if (self.failure is not None and self._layers is None) or not self._is_due(watched):
            if watched.meter is not None:
                watched.meter.skip_step()  # the next gradient does not follow the last step that was measured
            return
        with self._failing():
            line = self._line(watched, backwards)
            self._measure(watched, line, [] if loss is None else [loss], batches)

    def _line(self, watched: _Watched, backwards: int) -> Line:
        """Return what is known of a step without measuring."""
        lrs = [float(group["lr"]) for group in watched.optimizer.param_groups if "lr" in group]
        line: Line = {
            "step": watched.steps,
            "opt": watched.opt,
            "time": round(time.perf_counter() - self._began, 3),
            "lr": rounded(lrs),
            "n_steps": 1,
        }
        if backwards > 1:
            line["backwards"] = backwards
        return line

    def _meter(self, watched: _Watched) -> Meter:
        """Return what measures the optimizer's parameters, anew where it has others than before."""
        meter = watched.meter
        if meter is None or meter.is_stale():
            self._readback.flush()  # the steps before belong to what the optimizer had then
            meter = watched.meter = Meter(watched.optimizer, self._rank.rank if self._rank else 0)
            watched.names = meter.names(self._model)
            if self._layers is not None:
                meter.layers = LayerNorms(self._layers, watched.names, meter.parameters)
            self._writer.write(_optimizer_line(watched, meter))
        return meter

    def _measure(self, watched: _Watched, line: Line, loss: list[Tensor], batches: list[Batch]) -> None:
        """Measure what is on devices, to be read later."""
        meter, names, scale = self._meter(watched), watched.names, remaining_scale(watched.optimizer)
        known = set(meter.unmeasurable)
        gradients, values = meter.measure_gradients()
        for i in meter.unmeasurable.keys() - known:
            self._writer.write({"unmeasured": names[i], "reason": meter.unmeasurable[i], "after": self.steps})
        clipped = self._clipping.take(meter.parameters)
        clipping, restore = restore_norms(clipped, meter.parameters, not meter.is_sharded and not meter.unmeasurable)
        values |= {"loss": loss, "scale": scale, **clipping, **self._take_samples()}
        counts = gradients.nonfinite | {i: one.nonfinite for i, one in clipped.items() if one.nonfinite}
        meter.hold_weights()
        layered = None
        if meter.layers is not None:
            before = {i: one.norm for i, one in clipped.items() if one.norm is not None}
            layered = gradients.vector(len(meter.parameters), before) / (scale[0] if scale else 1)

        def finish(numbers: Numbers) -> None:
            norms = gradients.each(unscaled(numbers)["norms"], len(meter.parameters))
            line.update(restore(numbers, norms), norms=rounded(norms), **_entries(numbers))
            bad = [i for i, n in enumerate(norms) if n and not math.isfinite(n) and i not in gradients.unmeasurable]
            if bad:
                line["nonfinite"] = {names[i]: counts.get(i, 0) for i in bad}
            line["unmoved"] = meter.unmoved(numbers)
            batch = self._batches.line(batches, line)
            if batch is not None:
                self._writer.write(batch)
            entries = meter.layers.entries(numbers["layers"]) if meter.layers is not None else {}
            self._write({key: value for key, value in line.items() if value is not None and value != []}, entries)

        watched.pending = values, layered, finish

    def _take_samples(self) -> Values:
        """Return the mean, the largest and the middle of the squared norms that were given for this step."""
        norms, self._sample_norms = self._sample_norms, None
        if norms is None:
            return {"samples": []}
        squares = norms.to(accumulation_dtype(norms.device)).square()
        return {"samples": [torch.full_like(squares[0], len(squares)), squares.mean(), squares.max(), squares.median()]}

    def _on_end(self, watched: _Watched) -> None:
        """Measure the update, and write the line when it is read."""
        if watched.ignored or os.getpid() != self._process:
            return
        watched.steps += 1
        pending, watched.pending = watched.pending, None
        if pending is not None and watched.meter is not None:
            values, layered, finish = pending
            with self._failing():
                self._readback.add({**values, **watched.meter.measure_update(layered)}, finish)
            self._call_back()

    def _write_all(self, lines: list[Line]) -> None:
        for line in lines:
            self._writer.write(line)

    def _write(self, line: Line, by_layer: dict[str, float]) -> None:
        self._writer.write_step(line)
        self._written.append({**line, "layers": by_layer})

    def _call_back(self) -> None:
        """Pass on the steps that were written. An error of that function is the program's own."""
        written, self._written = self._written, []
        for self.latest in written:
            if self._on_recorded is not None and self.failure is None:
                self._on_recorded(self.latest)

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """Stop recording where an error is raised: the program must not suffer from being observed."""
        try:
            yield
        except Exception as error:
            self.fail(reason(error))
        if self._writer.failure is not None:
            self.fail(self._writer.failure)


def _entries(numbers: Numbers) -> Line:
    """Return the entries of a step's line that follow from numbers alone."""
    value = {key: next(iter(numbers.get(key, ())), None) for key in ("loss", "cosine", "update")}
    finite = {key: n if n is not None and math.isfinite(n) else None for key, n in value.items()}
    entries: Line = {
        "loss": rounded([value["loss"]], 9)[0],
        "step_grad_cosine": rounded([finite["cosine"]], 4)[0],
        "update": rounded([finite["update"]])[0],
    }
    if "update_sums" in numbers or "cosine_sums" in numbers:
        sums = [*numbers.get("update_sums", [None] * 2), *numbers.get("cosine_sums", [None] * 3)]
        entries["partial_sums"] = rounded(sums, 9)
    if numbers["samples"]:
        count, mean, largest, middle = numbers["samples"]
        ratio = math.sqrt(largest / middle) if middle > 0 else math.inf
        entries |= {"samples": int(count), "sample_square": mean, "sample_ratio": rounded([ratio])[0]}
    return entries


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
