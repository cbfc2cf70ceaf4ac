"""Read records."""

import json
import math
import os
from pathlib import Path
from typing import Any

from ...errors import RecordError
from .merge import merge_ranks
from .rank_files import header_of, rank_files
from .run import NonfiniteStep, Run
from .schema import VERSION, Line

_NO_STEPS: Line = {"optimizer": "none", "names": [], "sizes": [], "trained": []}
_NUMBERS = (
    "loss",
    "norm",
    "peak",
    "update",
    "step_grad_cosine",
    "clip",
    "max_norm",
    "host_s",
    "backward_s",
    "data_s",
    "sample_ratio",
)


def read_run(path: str | os.PathLike[str], optimizer: int | None = None) -> Run:
    """Read the record of a run. The file of one rank leads to those of the others beside it.

    Args:
        path: The file. Its last line may be incomplete: the run was killed while writing it.
        optimizer: Which optimizer, by number. None: the one with the most steps.

    Returns:
        The steps of that optimizer, as columns; of several ranks merged into one run.

    Raises:
        RecordError: (a ValueError) The file is not a record, is one of another version, or is damaged in the middle.

    Example:
        >>> weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        >>> optimizer = torch.optim.SGD([weight], lr=0.1)
        >>> with bridle.Monitor(optimizer=optimizer) as monitor:
        ...     (weight.square().sum() / 2).backward()
        ...     _ = optimizer.step()
        >>> bridle.watch.read_run(monitor.path).norm
        [5.0]
    """
    return read_runs(path, optimizer)[0]


def read_runs(path: str | os.PathLike[str], optimizer: int | None = None) -> list[Run]:
    """Read the record as `read_run` does, of all optimizers or of one; the one with the most steps comes first."""
    file = _File(Path(path))
    files = [file, *_files_of_other_ranks(file)]
    if optimizer is not None and optimizer not in file.optimizers:
        known = ", ".join(map(str, file.optimizers))
        raise RecordError(f"{path} has no optimizer {optimizer}; it has {known}.")
    chosen = file.by_steps() if optimizer is None else [optimizer]
    if "rank" not in file.header:
        return [file.run(opt) for opt in chosen]
    return [merge_ranks(sorted((f.run(opt) for f in files), key=lambda run: run.rank)) for opt in chosen]


class _File:
    """The lines of one file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        lines = _lines(path)
        if not lines or lines[0].get("bridle") != VERSION:
            found = f"version {lines[0]['bridle']}" if lines and "bridle" in lines[0] else "no header"
            raise RecordError(f"{path} is not a record this bridle reads (version {VERSION}): found {found}.")
        self.header = lines[0]
        self.optimizers: dict[int, Line] = {line["opt"]: line for line in lines if "optimizer" in line} or {
            0: _NO_STEPS
        }
        self._steps: dict[int, list[Line]] = {opt: [] for opt in self.optimizers}
        for line in lines:
            if "step" in line:
                self._steps.setdefault(line["opt"], []).append(line)
        self._notes = [line for line in lines[1:] if "step" not in line and "optimizer" not in line]

    def by_steps(self) -> list[int]:
        """Return the optimizers, the one with the most steps first."""
        return sorted(self.optimizers, key=lambda opt: -len(self._steps[opt]))

    def run(self, opt: int) -> Run:
        """Return the steps of an optimizer; none of one that this rank did not get to."""
        head = self.optimizers.get(opt, _NO_STEPS)
        shards = head.get("shards", [None] * len(head["names"]))
        optimizer = (head["optimizer"], head["names"], head["sizes"], head["trained"])
        run = Run(self.path, self.header, *optimizer, opt, len(self.optimizers), shards=shards, notes=self._notes)
        run.settings.update(head.get("settings", {}))
        run.dtypes.extend(head.get("dtypes", ()))
        for line in self._steps.get(opt, ()):
            if len(line["norms"]) == len(run.names):
                _append(run, line)
        return run


def _files_of_other_ranks(file: _File) -> list[_File]:
    if "rank" not in file.header:
        return []
    launch, rank = file.header["launch"], file.header["rank"]
    beside = rank_files(file.path)
    return [_File(path) for r, path in beside.items() if r != rank and header_of(path).get("launch") == launch]


def _append(run: Run, line: Line) -> None:
    def number(key: str) -> float:
        return float(line.get(key, "nan"))

    run.steps.append(line["step"])
    for name in _NUMBERS:
        getattr(run, name).append(number(name))
    run.norms.append([None if n is None else float(n) for n in line["norms"]])
    run.lr.append(float(line["lr"][0]) if line.get("lr") else math.nan)
    run.n_steps.append(line["n_steps"])
    run.partial_sums.append([math.nan if v is None else float(v) for v in line.get("partial_sums", ())])
    run.unmoved.append(set(line.get("unmoved", ())))
    run.samples.append((line["samples"], float(line["sample_square"])) if "samples" in line else None)
    if "nonfinite" in line:
        run.nonfinite.append(NonfiniteStep(line["step"], line["nonfinite"], number("loss")))


def _lines(path: Path) -> list[Line]:
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise RecordError(f"{path} cannot be read: {error}.") from error
    texts = text.split("\n")
    whole, last = texts[:-1], texts[-1]
    found: list[dict[str, Any]] = []
    for i, one in enumerate(whole):
        try:
            line = json.loads(one)
        except ValueError as error:
            raise RecordError(f"line {i + 1} of {path} is not JSON; only the last may be incomplete.") from error
        if not isinstance(line, dict):
            raise RecordError(f"line {i + 1} of {path} is not a line of a record.")
        found.append(line)
    if last and not found:
        raise RecordError(f"{path} is not a record: its first line is incomplete.")
    return found
