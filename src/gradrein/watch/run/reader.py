"""One file of a record, line by line, as runs."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import RecordError
from ..format.schema import Line, is_step
from ..format.thin import merge_pairs
from .lines import read_lines
from .run import NonfiniteStep, Run
from .values import LARGEST, list_of, number, size, sizes, text, whole

_MOST_NUMBERS = 6_000_000  # norms to hold in memory; of more, steps are merged as the recorder does
_MOST_NOTES = 100_000
_MOST_RANKS = 1_000_000
_NUMBERS = ("loss", "step_grad_cosine", "clip", "max_norm", "host_s", "backward_s", "data_s", "sample_ratio")
_SIZES = ("norm", "peak", "update")


@dataclass(frozen=True)
class _Head:
    """What an optimizer line says."""

    optimizer: str
    names: list[str]
    sizes: list[int]
    trained: list[bool]
    shards: list[list[int] | None]
    settings: dict[str, Any] = field(default_factory=dict)
    dtypes: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, line: Line) -> "_Head | None":
        """Return what a line says; None where it is damaged."""
        names = list_of(str, line.get("names"))
        count = len(names or ())
        elements, trained = list_of(int, line.get("sizes"), count), list_of(bool, line.get("trained"), count)
        if whole(line.get("opt")) is None or names is None or elements is None or trained is None:
            return None
        shards: list[list[int] | None] = [None] * count
        given = line.get("shards")
        if isinstance(given, list) and len(given) == count and all(map(_is_shard, given)):
            shards = given
        settings, dtypes = line.get("settings"), list_of(str, line.get("dtypes"), count) or []
        about = (settings if isinstance(settings, dict) else {}, [*map(text, dtypes)])
        return cls(text(line["optimizer"]), [*map(text, names)], elements, trained, shards, *about)


_NO_STEPS = _Head("none", [], [], [], [])


def _is_shard(value: Any) -> bool:
    return value is None or (len(list_of(int, value) or ()) == 2 and 0 <= value[0] <= value[1])


class RecordReader:
    """The lines of one file.

    Attributes:
        path: The file.
        header: Its first line.
        optimizers: The optimizers it introduces, by number, as they were last.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.optimizers: dict[int, _Head] = {}
        self._steps: dict[int, list[Line]] = {}
        self._notes: list[Line] = []
        self._damaged: list[int] = []
        self._numbers = self._huge = self._more_notes = 0
        lines = read_lines(path)
        self.header = _header(path, next(lines)[1])
        for i, line in lines:
            if not self._take(line):
                self._damaged.append(i)
        if not self.optimizers:
            self.optimizers[0] = _NO_STEPS

    def by_steps(self) -> list[int]:
        """Return the optimizers, the one with the most steps first."""
        return sorted(self.optimizers, key=lambda opt: -len(self._steps.get(opt, ())))

    def run(self, opt: int) -> Run:
        """Return the steps of an optimizer; none of one that this rank did not get to."""
        head = self.optimizers.get(opt, _NO_STEPS)
        about = (head.optimizer, head.names, head.sizes, head.trained)
        notes = list(self._notes)
        run = Run(self.path, self.header, *about, opt, len(self.optimizers), shards=head.shards, notes=notes)
        run.settings.update(head.settings)
        run.dtypes.extend(head.dtypes)
        run.warnings.extend(self._warnings())
        places: dict[int, list[int | None] | None] = {}
        for line in self._steps.get(opt, ()):
            then = line["head"]
            if id(then) not in places:
                places[id(then)] = _places(then.names, head.names)
            _append(run, line, places[id(then)])
        return run

    def _take(self, line: Line) -> bool:
        """Take a line; return False where it is damaged."""
        if "optimizer" in line and "note" not in line:
            head = _Head.of(line)
            if head is not None:
                self.optimizers[line["opt"]] = head
            return head is not None
        if is_step(line):
            return self._take_step(line)
        if len(self._notes) < _MOST_NOTES:
            self._notes.append(_note(line))
        else:
            self._more_notes += 1
        return True

    def _take_step(self, line: Line) -> bool:
        opt, norms = whole(line.get("opt")), line.get("norms")
        head = None if opt is None else self.optimizers.get(opt)
        known = whole(line.get("step")) is not None and whole(line.setdefault("n_steps", 1), least=1) is not None
        if opt is None or head is None or not known or not isinstance(norms, list) or len(norms) != len(head.names):
            return False
        self._huge += _is_huge(line.get("loss")) or _is_huge(line.get("norm"))
        line["norms"], line["head"] = sizes(norms), head
        self._steps.setdefault(opt, []).append(line)
        self._numbers += len(norms) + 10
        if self._numbers > _MOST_NUMBERS:
            self._steps = {opt: merge_pairs(lines) for opt, lines in self._steps.items()}
            self._numbers = sum(len(line["norms"]) + 10 for lines in self._steps.values() for line in lines)
        return True

    def _warnings(self) -> Iterator[str]:
        if n := len(self._damaged):
            lines = f"line {self._damaged[0]} is" if n == 1 else f"{n} lines are"
            first = "" if n == 1 else f" (the first is line {self._damaged[0]})"
            yield f"{lines} damaged and left out{first}: keys are missing, or their values are of another type."
        if self._more_notes:
            yield f"Of {_MOST_NOTES + self._more_notes} notes the first {_MOST_NOTES} are read."
        if self._huge:
            yield f"In {self._huge} steps loss or norm exceeds {LARGEST:g}: that counts as infinite."


def _header(path: Path, line: Line) -> Line:
    """Return the header, with what is used of it in the types it should have."""
    argv = line.get("argv")
    header = {**line, "argv": [*map(text, argv)] if isinstance(argv, list) else []}
    if "rank" not in line and "world" not in line:
        return header
    rank, world, launch = whole(line.get("rank")), whole(line.get("world"), least=1), line.get("launch")
    if rank is None or world is None or not rank < world <= _MOST_RANKS or not isinstance(launch, str):
        found = text(f"rank {line.get('rank')!r} of {line.get('world')!r}, launch {launch!r}")
        raise RecordError(f"{path} is not a record this gradrein reads: its header says it is {found}.")
    return header


def _note(line: Line) -> Line:
    """Return a line of another kind, with what is used of it in the types it should have."""
    found = {text(k): text(v) if isinstance(v, str) else v for k, v in line.items()}
    found["after"] = whole(found.get("after")) or 0
    for key in ("note", "anomaly", "stopped", "unmeasured", "reason"):
        if key in found:
            found[key] = text(found[key])
    if "unmeasured" in found:
        found.setdefault("reason", "not said")
    if found.get("ended") is not None:
        found["ended"] = text(found["ended"])
    return found


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
    norms, unmoved = line["norms"], {i for i in _items(line.get("unmoved")) if type(i) is int}
    if places is not None:
        norms = [None if i is None else norms[i] for i in places]
        unmoved = {i for i, was in enumerate(places) if was in unmoved}
    run.norms.append(norms)
    run.unmoved.append({i for i in unmoved if 0 <= i < len(norms)})
    run.lr.append(number(next(iter(_items(line.get("lr"))), None)))
    run.n_steps.append(line["n_steps"])
    run.partial_sums.append([number(v) for v in _items(line.get("partial_sums"))])
    samples, square = whole(line.get("samples"), least=1), size(line.get("sample_square"))
    run.samples.append(None if samples is None or not math.isfinite(square) else (samples, square))
    offenders = line.get("nonfinite")
    if isinstance(offenders, dict):
        counts = {text(name): n for name, n in itertools.islice(offenders.items(), 10_000) if whole(n) is not None}
        run.nonfinite.append(NonfiniteStep(line["step"], counts, number(line.get("loss"))))


def _items(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
