"""`Monitor`: the public face of the recorder."""

from __future__ import annotations

import copy
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from .._notebook import card
from ..errors import ArgumentError, RecordError
from ..policies import Policy
from .analysis.advice import Advice
from .analysis.finding import Finding
from .arguments import ClipOption, check_arguments, check_layers, check_norms, plain_values, policy_of
from .format.rank_files import rank_file, rank_info
from .format.schema import VERSION, Line
from .record.claim import claim
from .record.layers import Layers
from .record.recorder import Recorder
from .record.writer import Writer, reason
from .report.report import Report, read_report
from .say import say


class Monitor:
    """Record a training run (loss, gradient norms, updates, non-finite steps) and report on it.

    While it is active (inside a `with` block, or between `start` and `stop`) it observes every backward pass, every
    clipping call and every step, writes a line for each step, and clips if `clip` is given, as `gradrein.Clipper` does.
    Nothing else in the program changes. On an accelerator what a step measures stays on the device, and is read and
    written every `flush_every` steps. With several processes each has its own monitor and file, and nothing is sent
    between them.

    Nothing is overwritten: if the file is not empty, the record gets a number (`run-2.jsonl` for `run.jsonl`), and a
    line on stderr says so. A monitor that is started again continues its record. If the record can no longer be
    written, recording stops (`stopped_because`, and a line on stderr), and the program continues.

    Args:
        model: The model, for the names of its parameters. None: those of all live modules.
        optimizer: The optimizer whose steps are recorded. None: every optimizer that steps.
        record: The file to write (JSON lines); missing folders are created. With several processes each
            writes its own, `run.rank0.jsonl` for `run.jsonl`. None: a temporary file that lives as long as the monitor.
        clip: None to only observe; a number (the largest norm), a name ("auto", "zscore") or a policy of `gradrein`. A
            step with non-finite gradients is then skipped.
        norms: Also measure by layer, for `on_step`: a name pattern such as "layers.*", for each parameter that matches;
            or patterns by label, `{"attention": "*.attn.*"}`, for all that match together. Of sharded parameters
            (FSDP2, tensor parallel) the ranks then add up their squares at every recorded step: give each rank the same
            monitor.
        every: Record every n-th step; clipping happens at every step.
        flush_every: Wait for an accelerator once in so many recorded steps. A process that is killed loses those that
            wait. What is on the CPU is written at once.
        max_bytes: Approximate limit on the size of the record; beyond it, steps are thinned out evenly.
        on_step: Called after each recorded step with the content of `latest`; its `close`, if it has one, at the end.

    Raises:
        ArgumentError: (a ValueError) an argument is invalid, or the optimizer has none of the model's parameters.

    Examples:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with gradrein.Monitor(model, optimizer) as monitor:
        ...     for _ in range(3):
        ...         optimizer.zero_grad()
        ...         model(torch.ones(1, 2)).square().sum().backward()
        ...         _ = optimizer.step()
        >>> monitor.steps
        3
        >>> monitor.findings()
        []

    See Also:
        [`gradrein.watch.Report`][], [`gradrein.watch.read_run`][], [`gradrein.Clipper`][]
    """

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        record: str | os.PathLike[str] | None = None,
        clip: ClipOption = None,
        norms: Layers | None = None,
        every: int = 1,
        flush_every: int = 50,
        max_bytes: int = 32_000_000,
        on_step: Callable[[dict[str, float]], None] | None = None,
    ) -> None:
        check_arguments(model, optimizer, record, clip, every, flush_every, max_bytes, on_step)
        check_layers(norms, model)
        rank = self._rank = rank_info()
        self._record = None if record is None else Path(record).absolute()  # the program may go to another folder
        file = self._record if self._record is None or rank is None else rank_file(self._record, rank.rank)
        self._writer = Writer(file, max_bytes)
        self._started, self._on, self._depth, self._on_step = False, False, 0, on_step
        on_recorded = None if on_step is None else lambda line: on_step(_numbers(line))
        given = [policy_of(clip)]
        spare = copy.deepcopy(given[0])  # a second optimizer has norms of its own

        def new_policy() -> Policy | None:
            return given.pop() if given else copy.deepcopy(spare)

        self._recorder = Recorder(
            model, optimizer, new_policy, every, self._writer, on_recorded, rank, flush_every, norms
        )
        self._header: dict[str, Any] = {
            "gradrein": VERSION,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "argv": sys.argv,
            "clip": clip if clip is None or isinstance(clip, (int, float, str)) else repr(clip),
            "every": every,
            **(vars(rank) if rank is not None else {}),
        }

    @property
    def path(self) -> str:
        """The file of the record. Before the first start it is the requested file, which may already be taken."""
        return str(self._writer.path)

    @property
    def steps(self) -> int:
        """The number of optimizer steps so far."""
        return self._recorder.steps

    @property
    def backwards(self) -> int:
        """The number of backward passes so far."""
        return self._recorder.backwards

    @property
    def latest(self) -> dict[str, float]:
        """The last recorded step: `step`, `loss`, `norm`, `update`, `clip`, `lr`, as far as known.

        For a second optimizer also its number, `opt`. With `norms` also `norm/NAME` (the gradient's, before clipping),
        `weight/NAME` and `update/NAME` (how far it moved, relative to its norm) of each layer; the last from a sample
        of large tensors, rough where few rows move, as of an embedding. Reading it waits for an accelerator.
        """
        self._recorder.flush()
        return _numbers(self._recorder.latest)

    @property
    def stopped_because(self) -> str | None:
        """Why recording stopped before the run did, or None. The program continues without recording."""
        return self._recorder.failure

    def start(self) -> Monitor:
        """Begin to observe, or continue the same record. Does nothing if the monitor is already active.

        Raises:
            ArgumentError: (a ValueError) `record` is a folder, or something else that is not a file.
            RecordWriteError: (a ValueError and an OSError) the record cannot be written.
        """
        if self._on:
            return self
        if self._record is not None and not self._started:
            self._claim(self._record)
        empty = self._writer.open()
        self._started = True
        self._writer.write(self._header if empty else {"note": "resumed", "after": self.steps})
        self._recorder.attach(empty)
        self._on = True
        return self

    def _claim(self, record: Path) -> None:
        wanted, self._writer.path = self._writer.path, claim(record, self._rank)
        if self._writer.path != wanted and (self._rank is None or self._rank.rank == 0):
            say(f"gradrein: {wanted} is not empty: this run is recorded in {self._writer.path}.")

    def stop(self, because: str | None = None) -> None:
        """Stop observing and complete the record.

        Args:
            because: Why the run ends early, if it does, for the report of several ranks.
        """
        if not self._on:
            return
        self._on = False
        try:
            self._recorder.detach()
            if (close := getattr(self._on_step, "close", None)) is not None:
                close()
        finally:  # `on_step` may raise
            self._writer.close({"ended": because, "after": self.steps} if self._rank is not None else None)
        if self._writer.failure is not None:
            self._recorder.fail(self._writer.failure)

    def note(self, kind: str, **values: Any) -> None:
        """Write your own line into the record, such as a test loss; also works after `stop`.

        Args:
            kind: What it is, such as "test". `monitor.note("test", loss=0.3)` is plotted beside the training loss.
            **values: Numbers (tensors of one element as well) and strings.

        Raises:
            ArgumentError: (a ValueError) a value has another type, or the monitor was never started.
        """
        line = {"note": str(kind), "after": self.steps, **plain_values(values)}
        if not self._started:
            raise ArgumentError("note: there is no record yet to write into; call `start` first.")
        self._writer.write_late(line)

    def per_sample(self, norms: torch.Tensor) -> None:
        """Pass the gradient norm of each sample of the coming step, for the noise scale.

        Args:
            norms: A vector with one norm for each sample, of the gradient of that sample's own loss.
        """
        check_norms(norms)
        self._recorder.on_samples(norms)

    def report(self) -> Report:
        """Return a report on the record so far, for every optimizer.

        Raises:
            RecordError: (a ValueError) the monitor was never started.
        """
        if not self._started:
            raise RecordError(
                "this monitor was never started, so there is no record to report on. Train inside `with monitor:`, or "
                "between monitor.start() and monitor.stop()."
            )
        self._recorder.flush()
        return read_report(self.path)

    def findings(self) -> list[Finding]:
        """Return the findings of `report()`, the most important first; empty if there are none."""
        return self.report().findings

    def advice(self) -> Advice:
        """Return the clipping that `report()` recommends, with the evidence."""
        return self.report().advice

    def _repr_html_(self) -> str:
        return self.report()._repr_html_() if self._started else card("A monitor that was not started yet.")

    def __enter__(self) -> Monitor:
        """Start."""
        self.start()
        self._depth += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop, at the end of the outermost block."""
        self._depth -= 1
        if self._depth <= 0:
            self.stop(None if error is None else reason(error))


def _numbers(line: Line) -> dict[str, float]:
    known: dict[str, Any] = {k: line[k] for k in ("step", "loss", "norm", "update", "clip") if k in line}
    if line.get("opt"):
        known["opt"] = line["opt"]
    if line.get("lr"):
        known["lr"] = line["lr"][0]
    return {key: float(value) for key, value in (known | line.get("layers", {})).items()}
