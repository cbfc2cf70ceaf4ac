"""The listener behind `Monitor`: hears a run, measures each step, clips if asked to, writes lines."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..clip import clip_
from ..policies import Policy
from ._clipping import Heard, before_clipping, done, refuse_flattened, sized
from ._clock import Clock
from ._policy import Clip, policy_of
from ._probe import Probe, Reading
from ._ranks import Place
from ._record import Writer, rounded

__all__ = ["Recorder"]


@dataclass
class _Watched:
    """One optimizer, and the step it is in."""

    optimizer: torch.optim.Optimizer
    index: int
    policy: Policy | None
    probe: Probe | None = None
    steps: int = 0
    inside: bool = False
    reading: Reading | None = None
    line: dict[str, Any] = field(default_factory=dict)


class Recorder:
    """Hears what the room's torch file tells, for one optimizer or for all."""

    def __init__(
        self,
        model: torch.nn.Module | None,
        only: torch.optim.Optimizer | None,
        clip: Clip,
        every: int,
        writer: Writer,
        on_step: Callable[[], None] | None = None,
        place: Place | None = None,
    ) -> None:
        self._model, self._only, self._clip, self._every, self._writer = model, only, clip, every, writer
        self.watched: dict[int, _Watched] = {}
        self._on_step = on_step
        self.broken: str | None = None
        self.latest: dict[str, Any] = {}
        self._loss: Tensor | None = None
        self._backwards = 0
        self._last_loss: float | None = None
        self._told_loss: set[int] = set()
        self._user_clip: Heard | None = None
        self._samples: dict[str, float] = {}
        self._names: dict[int, list[str]] = {}
        self._began = time.perf_counter()
        self._place = place
        self._clock = Clock()

    @property
    def steps(self) -> int:
        """How many optimizer steps were heard."""
        return sum(w.steps for w in self.watched.values())

    def heard_backward(self, loss: Tensor | None) -> None:
        """A backward pass begins."""
        if loss is not None:
            so_far = loss.new_zeros((), dtype=torch.float64) if self._loss is None else self._loss
            self._loss, self._backwards = so_far + loss, self._backwards + 1
        self._clock.enter()

    def heard_backward_end(self) -> None:
        """It is over."""
        self._clock.leave()

    def heard_loading(self, seconds: float) -> None:
        """A data loader took so long for a batch."""
        self._clock.loaded(seconds)

    def heard_failure(self, error: BaseException) -> None:
        """A backward pass failed: what anomaly detection says is the origin of a NaN."""
        if "returned nan values" in str(error):
            self._writer.write({"anomaly": str(error).splitlines()[0], "after": self.steps})

    def heard_clip(self, parameters: list[Tensor], limit: float, norm: Tensor, order: float) -> None:
        """The script clipped by itself."""
        self._user_clip = Heard(parameters, limit, norm, order)

    def heard_samples(self, norms: Tensor) -> None:
        """The gradient norm of each sample of the coming step."""
        squares = norms.detach().double().square()
        self._samples = {"samples": squares.numel(), "sample_square": float(squares.mean())}

    def heard_scaler_update(self) -> None:
        """A GradScaler that found a non-finite gradient has left the step out: that loss is not the next step's."""
        if self._loss is not None:
            self._loss, self._backwards = None, 0
            self._writer.write({"note": "scaler skipped", "after": self.steps})

    def before_step(self, optimizer: torch.optim.Optimizer, again: bool) -> None:
        """Measure the gradients, and clip them."""
        if (self._only is not None and optimizer is not self._only) or self._is_within_a_step(optimizer):
            return
        watched = self.watched.get(id(optimizer))
        if watched is None:
            watched = _Watched(optimizer, len(self.watched), policy_of(self._clip))
            self.watched[id(optimizer)] = watched
        if watched.inside and not again and self._loss is None:
            return  # the step of a subclass calls its parent's: heard twice, taken once
        if again:
            self._loss, self._backwards = None, 0
        else:
            watched.inside = True
            self._measure(watched)
        if watched.policy is not None:
            refuse_flattened(optimizer)
            report = clip_(optimizer, watched.policy, nonfinite="skip")
            if not again and watched.reading is not None:
                watched.line.update(done(report))
                if watched.reading.norm is None and watched.policy.p == 2.0:
                    watched.line.update(sized(report.norm))  # what no rank could measure by itself
        if watched.reading is not None and watched.probe is not None and not again:
            watched.probe.remember_weights()

    def _is_within_a_step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Does another optimizer use this one for its own step? ZeroRedundancyOptimizer does, with a rank's share."""
        outer = [w.optimizer for w in self.watched.values() if w.inside and w.optimizer is not optimizer]
        return any(_parameters(optimizer) <= _parameters(other) for other in outer)

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Measure the update, and write the line."""
        watched = self.watched.get(id(optimizer))
        if watched is None or not watched.inside:
            return
        watched.inside = False
        watched.steps += 1
        self._write(watched)
        self._clock.start()

    def _write(self, watched: _Watched) -> None:
        reading, watched.reading = watched.reading, None
        if reading is None or watched.probe is None or self.broken is not None:
            return
        try:
            watched.probe.read_update(reading)
            line = watched.line
            line["update"], line["unmoved"] = rounded([reading.update])[0], reading.unmoved
            if watched.probe.spread:
                line["sums"] = rounded(reading.sums, 9)
            self.latest = {k: v for k, v in line.items() if v is not None and v != []}
            self._writer.step(self.latest)
        except Exception as error:  # the program must not suffer from being watched
            self._give_up(error)
            return
        if self._on_step is not None:
            self._on_step()

    def _measure(self, watched: _Watched) -> None:
        watched.reading = None
        spent = self._clock.read()  # before measuring, whose time is nobody's
        loss, backwards = self._take_loss(watched)
        if self.broken is not None or watched.steps % self._every:
            self._user_clip = None
            if watched.probe is not None:
                watched.probe.forget()  # the next gradient it sees does not follow the last step it saw
            return
        try:
            if watched.probe is None or watched.probe.is_stale():
                watched.probe = Probe(watched.optimizer, self._place.rank if self._place else 0)
                self._introduce(watched, watched.probe)
            watched.reading = self._read(watched, watched.probe)
            watched.line = self._line(watched, watched.reading, loss, backwards)
            if self._place is not None and spent is not None:
                watched.line.update(zip(("own", "back", "load"), rounded(spent), strict=True))
        except Exception as error:
            watched.reading = None
            self._give_up(error)

    def _read(self, watched: _Watched, probe: Probe) -> Reading:
        known = set(probe.unmeasured)
        reading = probe.read_gradients()
        for i in probe.unmeasured.keys() - known:
            name = self._names[watched.index][i]
            self._writer.write({"unmeasured": name, "because": probe.unmeasured[i], "after": self.steps})
        return reading

    def _take_loss(self, watched: _Watched) -> tuple[float | None, int]:
        """What backward was called on since the last step: the sum, for that is what the gradient belongs to.

        Where two optimizers share a backward pass, the second is told the same loss.
        """
        count = self._backwards
        if self._loss is not None:
            self._last_loss = float(self._loss)
            self._told_loss.clear()
            self._loss, self._backwards = None, 0
        elif watched.index in self._told_loss:
            return None, 0
        self._told_loss.add(watched.index)
        return self._last_loss, count

    def _line(self, watched: _Watched, reading: Reading, loss: float | None, backwards: int) -> dict[str, Any]:
        heard, self._user_clip = self._user_clip, None
        norm, norms, clipping = before_clipping(watched.optimizer, reading, heard)
        lrs = [float(group["lr"]) for group in watched.optimizer.param_groups if "lr" in group]
        line = {
            "step": watched.steps,
            "opt": watched.index,
            "time": round(time.perf_counter() - self._began, 3),
            "loss": rounded([loss], 9)[0],
            "norms": rounded(norms),
            "lr": rounded(lrs),
            "turn": rounded([reading.turn], 4)[0],
            "of": 1,
            **sized(norm),
            **clipping,
            **self._samples,
        }
        self._samples = {}
        if backwards > 1:
            line["backwards"] = backwards
        if reading.bad:
            line["bad"] = {self._names[watched.index][i]: n for i, n in reading.bad.items()}
        return line

    def _introduce(self, watched: _Watched, probe: Probe) -> None:
        """A line that says what the numbers of this optimizer's lines belong to."""
        groups = watched.optimizer.param_groups
        names = probe.names(self._model)
        self._names[watched.index] = names
        self._writer.write(
            {
                "optimizer": type(watched.optimizer).__name__,
                "opt": watched.index,
                "names": names,
                "sizes": [p.numel() for p in probe.parameters],
                "groups": [len(group["params"]) for group in groups],
                "trained": [p.requires_grad for p in probe.parameters],
                "update_on_every": probe.stride,
                **({"pieces": probe.pieces} if any(probe.pieces) else {}),
            }
        )

    def _give_up(self, error: Exception) -> None:
        self.broken = f"{type(error).__name__}: {error}"
        self._writer.write({"stopped": self.broken, "after": self.steps})


def _parameters(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(p) for group in optimizer.param_groups for p in group["params"]}
