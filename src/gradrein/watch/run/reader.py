"""Read records: one file, or those of all ranks, as runs."""

import math
import os
from pathlib import Path
from typing import Any

from ...errors import RecordError
from ..format.rank_files import header_of, rank_files
from ..format.schema import Line, is_step
from ..format.thin import merge_pairs
from .load import load
from .merge import merge_ranks
from .run import NonfiniteStep, Run
from .values import LARGEST, number, size, text

_MOST_NUMBERS = 6_000_000  # norms to hold in memory; of more, steps are merged as the recorder does
_NUMBERS = ("loss", "step_grad_cosine", "clip", "max_norm", "sample_ratio")
_SIZES = ("norm", "peak", "update")
_NO_STEPS: Line = {"optimizer": "none", "names": [], "sizes": [], "trained": []}


class RecordReader:
    """The lines of one file.

    Attributes:
        path: The file.
        header: Its first line.
        optimizers: The optimizers it introduces, by number, as they were last.

    Raises:
        RecordError: (a ValueError) as `load`, and where the lines do not fit together.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.optimizers: dict[int, Line] = {}
        self._steps: dict[int, list[Line]] = {}
        self._notes: list[Line] = []
        self._numbers = self._huge = 0
        lines = load(path)
        self.header = next(lines)
        for i, line in enumerate(lines, start=2):
            if is_step(line):
                self._take_step(i, line)
            elif "optimizer" in line and "note" not in line:
                self._take_optimizer(i, line)
            else:
                self._notes.append(line)
        if not self.optimizers:
            self.optimizers[0] = _NO_STEPS

    def by_steps(self) -> list[int]:
        """Return the optimizers, the one with the most steps first."""
        return sorted(self.optimizers, key=lambda opt: -len(self._steps.get(opt, ())))

    def run(self, opt: int) -> Run:
        """Return the steps of an optimizer; none of one that this rank did not get to."""
        head = self.optimizers.get(opt, _NO_STEPS)
        run = Run(
            self.path,
            self.header,
            text(head["optimizer"]),
            head["names"],
            head["sizes"],
            head["trained"],
            opt,
            len(self.optimizers),
            shards=head.get("shards") or [None] * len(head["names"]),
            notes=list(self._notes),
            settings=head.get("settings", {}),
            dtypes=head.get("dtypes", []),
        )
        if self._huge:
            run.warnings.append(f"In {self._huge} steps loss or norm exceeds {LARGEST:g}: that counts as infinite.")
        places: dict[int, list[int | None] | None] = {}
        for line in self._steps.get(opt, ()):
            then = line["head"]
            if id(then) not in places:
                places[id(then)] = _places(then["names"], head["names"])
            _append(run, line, places[id(then)])
        return run

    def _take_optimizer(self, i: int, line: Line) -> None:
        lists = [line[key] for key in ("sizes", "trained", "shards") if key in line]
        if any(len(one) != len(line["names"]) for one in lists) or not all(map(_is_shard, line.get("shards", ()))):
            raise RecordError(f"line {i} of {self.path} is damaged: its lists do not fit its parameters.")
        self.optimizers[line["opt"]] = line

    def _take_step(self, i: int, line: Line) -> None:
        head, norms = self.optimizers.get(line["opt"]), line["norms"]
        if head is None or len(norms) != len(head["names"]):
            raise RecordError(f"line {i} of {self.path} is damaged: its norms do not fit an optimizer of the record.")
        self._huge += _is_huge(line.get("loss")) or _is_huge(line.get("norm"))
        if not all(type(v) is float and 0.0 <= v <= LARGEST for v in norms):
            line["norms"] = [None if v is None else size(v) for v in norms]
        line["head"] = head
        self._steps.setdefault(line["opt"], []).append(line)
        self._numbers += len(norms) + 10
        if self._numbers > _MOST_NUMBERS:
            self._steps = {opt: merge_pairs(lines) for opt, lines in self._steps.items()}
            self._numbers = sum(len(line["norms"]) + 10 for lines in self._steps.values() for line in lines)


def _is_shard(value: Any) -> bool:
    pair = isinstance(value, list) and len(value) == 2 and all(type(v) is int for v in value)
    return value is None or (pair and 0 <= value[0] <= value[1])


def _is_huge(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isinf(number(value)) and value not in (math.inf, -math.inf)


def _places(then: list[str], now: list[str]) -> list[int | None] | None:
    """Return where each parameter of now was before others were added or removed; None where nothing changed."""
    if then == now:
        return None
    index = {name: i for i, name in enumerate(then)}
    return [index.get(name) for name in now]


def _append(run: Run, line: Line, places: list[int | None] | None) -> None:
    run.steps.append(line["step"])
    for name in _NUMBERS:
        getattr(run, name).append(number(line.get(name)))
    for name in _SIZES:
        getattr(run, name).append(size(line.get(name)))
    norms, unmoved = line["norms"], set(line.get("unmoved", ()))
    if places is not None:
        norms = [None if i is None else norms[i] for i in places]
        unmoved = {i for i, was in enumerate(places) if was in unmoved}
    run.norms.append(norms)
    run.unmoved.append({i for i in unmoved if 0 <= i < len(norms)})
    run.lr.append(number(next(iter(line.get("lr", ())), None)))
    run.n_steps.append(line["n_steps"])
    run.partial_sums.append([number(v) for v in line.get("partial_sums", ())])
    samples, square = line.get("samples", 0), size(line.get("sample_square"))
    run.samples.append((samples, square) if samples and math.isfinite(square) else None)
    if "nonfinite" in line:
        counts = {text(name): n for name, n in line["nonfinite"].items()}
        run.nonfinite.append(NonfiniteStep(line["step"], counts, number(line.get("loss"))))


def read_run(path: str | os.PathLike[str], optimizer: int | None = None) -> Run:
    """Read the record of a run. Given the file of one rank, also read those of the other ranks beside it.

    Args:
        path: The file. Its last line may be incomplete, if the run was killed while writing it.
        optimizer: Which optimizer, by number. None: the one with the most steps.

    Returns:
        The steps of that optimizer, as columns; several ranks are merged into one run.

    Raises:
        RecordError: (a ValueError) The file is not a record, has another version, or is damaged in the middle.

    Examples:
        >>> weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        >>> optimizer = torch.optim.SGD([weight], lr=0.1)
        >>> with gradrein.Monitor(optimizer=optimizer) as monitor:
        ...     (weight.square().sum() / 2).backward()
        ...     _ = optimizer.step()
        >>> gradrein.watch.read_run(monitor.path).norm
        [5.0]

    See Also:
        [`gradrein.watch.Run`][], [`gradrein.watch.read_report`][]
    """
    return read_runs(path, optimizer)[0]


def read_runs(path: str | os.PathLike[str], optimizer: int | None = None) -> list[Run]:
    """Read the record as `read_run` does, of all optimizers or of one; the one with the most steps comes first."""
    file = RecordReader(Path(path))
    files = [file, *_files_of_other_ranks(file)]
    if optimizer is not None and optimizer not in file.optimizers:
        known = ", ".join(map(str, file.optimizers))
        raise RecordError(f"{path} has no optimizer {optimizer}; it has {known}.")
    chosen = file.by_steps() if optimizer is None else [optimizer]
    if "rank" not in file.header:
        return [file.run(opt) for opt in chosen]
    return [merge_ranks(sorted((f.run(opt) for f in files), key=lambda run: run.rank)) for opt in chosen]


def _files_of_other_ranks(file: RecordReader) -> list[RecordReader]:
    if "rank" not in file.header:
        return []
    launch, rank = file.header["launch"], file.header["rank"]
    beside = rank_files(file.path)
    return [RecordReader(path) for r, path in beside.items() if r != rank and header_of(path).get("launch") == launch]
