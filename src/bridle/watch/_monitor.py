"""`Monitor`: the public face of the recorder."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from ..errors import ArgumentError
from . import _torch
from ._policy import Clip, policy_of
from ._ranks import place, rank_file
from ._record import VERSION, Writer, reason, rounded
from ._recorder import Recorder

if TYPE_CHECKING:
    from ._advice import Advice
    from ._finding import Finding
    from ._run import Run

__all__ = ["Monitor"]


class Monitor:
    """Record a training run: loss, gradient norms, updates, non-finite events; then say what was found.

    While it is on (inside a `with` block, or between `start` and `stop`) it hears every backward pass and every
    step of the optimizer, writes a line for each step, and clips if asked to. Nothing else in the program changes.
    Recording a step reads values, so on an accelerator it waits for the device: use `every` there.
    In a run of several processes each has a monitor and a file of its own, and nothing is sent between them.

    Args:
        model: the model, for the names of its parameters. None: those of all live modules.
        optimizer: the optimizer whose steps are recorded. None: every optimizer that steps.
        record: the file to write (JSON lines); of several processes each writes its own, `run.rank0.jsonl` for
            `run.jsonl`. None: a temporary file that lives as long as the monitor.
        clip: None to only watch; a number (the largest norm), a name ("auto", "zscore") or a policy of `bridle`.
        every: record every so many steps; clipping is done at each.
        max_bytes: about how large the record may grow; beyond it, steps are thinned out evenly.
        on_step: called after each recorded step with what `latest` holds.

    Raises:
        ArgumentError: (a ValueError) `every`, `clip` or `max_bytes` that cannot mean anything.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with bridle.Monitor(model, optimizer) as monitor:
        ...     for _ in range(3):
        ...         optimizer.zero_grad()
        ...         model(torch.ones(1, 2)).square().sum().backward()
        ...         _ = optimizer.step()
        >>> monitor.steps
        3
        >>> monitor.findings()
        []
    """

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        record: str | os.PathLike[str] | None = None,
        clip: Clip = None,
        every: int = 1,
        max_bytes: int = 32_000_000,
        on_step: Callable[[dict[str, float]], None] | None = None,
    ) -> None:
        if not isinstance(every, int) or every < 1:
            raise ArgumentError(f"`every` is a whole number of steps, 1 or more; found {every!r}.")
        if not isinstance(max_bytes, int) or max_bytes < 10_000:
            raise ArgumentError(f"`max_bytes` is a number of bytes, 10000 or more; found {max_bytes!r}.")
        policy_of(clip)  # a wrong one is refused here, not in the middle of the run
        here = place()
        self._is_rank = here is not None
        self._writer = Writer(
            record if record is None or here is None else rank_file(Path(record), here.rank), max_bytes
        )
        told = None if on_step is None else lambda: on_step(self.latest)
        self._recorder = Recorder(model, optimizer, clip, every, self._writer, told, here)
        self._header = {
            "bridle": VERSION,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "argv": sys.argv,
            "clip": clip if clip is None or isinstance(clip, (int, float, str)) else repr(clip),
            "every": every,
            **({} if here is None else here.header()),
        }

    @property
    def path(self) -> str:
        """Where the record is."""
        return str(self._writer.path)

    @property
    def steps(self) -> int:
        """How many optimizer steps were heard."""
        return self._recorder.steps

    @property
    def latest(self) -> dict[str, float]:
        """The last recorded step: `step`, `loss`, `norm`, `update`, `clip`, `lr`, as far as they are known."""
        line = self._recorder.latest
        found: dict[str, Any] = {k: line[k] for k in ("step", "loss", "norm", "update", "clip") if k in line}
        if line.get("lr"):
            found["lr"] = line["lr"][0]
        return {key: float(value) for key, value in found.items()}

    @property
    def stopped_because(self) -> str | None:
        """Why recording ended before its time, or None. The program goes on where recording it cannot."""
        return self._recorder.broken

    def start(self) -> Monitor:
        """Begin a new record, and to listen."""
        self._writer.open()
        self._writer.write(self._header)
        _torch.listen(self._recorder)
        return self

    def stop(self, because: str | None = None) -> None:
        """Stop listening and complete the record.

        Args:
            because: why the run ends before its time, if it does: said in the report of several ranks.
        """
        _torch.stop(self._recorder)
        self._writer.close({"ended": because, "after": self.steps} if self._is_rank else None)

    def note(self, kind: str, **values: Any) -> None:
        """Write a line of your own into the record, such as a test loss.

        Args:
            kind: what it is, such as "test". `monitor.note("test", loss=0.3)` is drawn beside the training loss.
            **values: numbers and words.
        """
        plain = {k: rounded([v], 9)[0] if isinstance(v, float) else v for k, v in values.items()}
        self._writer.write({"note": kind, "after": self.steps, **plain})

    def per_sample(self, norms: torch.Tensor) -> None:
        """Tell it the gradient norm of each sample of the coming step, for the noise scale.

        Args:
            norms: a vector with one norm for each sample, of the gradient of that sample's own loss.
        """
        self._recorder.heard_samples(norms)

    def findings(self) -> list[Finding]:
        """What the record so far shows, the most telling first; empty if nothing was found."""
        from .findings import find

        return find(self._read())

    def advice(self) -> Advice:
        """The clipping that the record so far speaks for, with the evidence."""
        from ._advice import advise

        return advise(self._read())

    def _read(self) -> Run:
        from ._run import read

        return read(self.path)

    def __enter__(self) -> Monitor:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop(None if error is None else reason(error))
