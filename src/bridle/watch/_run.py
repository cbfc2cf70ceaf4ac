"""A record, read back."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import RecordError
from ._merge import merged
from ._ranks import family, header_of
from ._record import VERSION

__all__ = ["Event", "Run", "read"]


@dataclass(frozen=True)
class Event:
    """A step with gradients that were not finite: how many values, by parameter."""

    step: int
    offenders: dict[str, int]
    loss: float


@dataclass(frozen=True)
class Run:
    """One optimizer's steps, as columns. NaN stands for a number that was not recorded.

    Attributes:
        path: the file.
        header: its first line.
        optimizer: the class of the optimizer.
        others: how many other optimizers the record holds; `number` is that of this one.
        names: parameters, in the optimizer's order; `sizes` their numbers of elements, `trained` if they should move.
        steps: the step each entry below belongs to.
        loss: what backward was called on.
        norm: the gradient norm before any clipping; `peak` the largest among the steps a thinned line stands for.
        norms: for each step that of each parameter, None where it had no gradient.
        lr: the learning rate of the first group.
        update: how far the weights moved, relative to their size.
        turn: the cosine between a step and the gradient after it.
        clip: the factor gradients were scaled by, NaN where nothing clips.
        limit: the threshold of the script's own clipping, NaN where unknown.
        of: how many steps the line stands for.
        unmoved: parameters that did not move.
        samples: size of the batch, mean square of its per-sample norms, where told.
        own: seconds before the step that were spent outside of backward passes, `back` those inside, `load` those of
            `own` for which data loaders were waited for.
        sums: what a rank adds to the sums that `update` and `turn` follow from, where parameters lie on several ranks.
        events: steps with non-finite gradients.
        notes: other lines.
        pieces: which piece of each parameter a rank has, None where it has all.
        ranks: where the run had several processes the run of each that left a record, in order; all other numbers are
            then those of the lowest, and norms are of whole gradients.
    """

    path: Path
    header: dict[str, Any]
    optimizer: str
    others: int
    names: list[str]
    sizes: list[int]
    trained: list[bool]
    number: int = 0
    steps: list[int] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    norm: list[float] = field(default_factory=list)
    peak: list[float] = field(default_factory=list)
    norms: list[list[float | None]] = field(default_factory=list)
    lr: list[float] = field(default_factory=list)
    update: list[float] = field(default_factory=list)
    turn: list[float] = field(default_factory=list)
    clip: list[float] = field(default_factory=list)
    limit: list[float] = field(default_factory=list)
    of: list[int] = field(default_factory=list)
    unmoved: list[set[int]] = field(default_factory=list)
    samples: list[tuple[int, float] | None] = field(default_factory=list)
    own: list[float] = field(default_factory=list)
    back: list[float] = field(default_factory=list)
    load: list[float] = field(default_factory=list)
    sums: list[list[float]] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    notes: list[dict[str, Any]] = field(default_factory=list)
    pieces: list[list[int] | None] = field(default_factory=list)
    ranks: tuple[Run, ...] = ()

    @property
    def rank(self) -> int:
        """Which of several processes; 0 where there is one."""
        return int(self.header.get("rank", 0))

    @property
    def end(self) -> str | None:
        """How a rank's run ended: "" in order, else why; None where its record does not say, as of a killed process."""
        return next((line["ended"] or "" for line in self.notes if "ended" in line), None)

    @property
    def missing(self) -> list[int]:
        """Ranks that left no record of this run."""
        there = {run.rank for run in self.ranks}
        return [rank for rank in range(self.header.get("world", 1)) if self.ranks and rank not in there]

    @property
    def unmeasured(self) -> dict[str, str]:
        """Parameters whose gradients could not be measured, and why."""
        return {line["unmeasured"]: line["because"] for line in self.notes if "unmeasured" in line}

    @property
    def modules(self) -> list[str]:
        """The module each parameter belongs to."""
        return [name.rpartition(".")[0] or name for name in self.names]

    @property
    def threshold(self) -> float | None:
        """The fixed threshold that was in force, of the script's own clipping or of ours; None if none or adaptive."""
        own = [limit for limit in self.limit if math.isfinite(limit)]
        try:
            return own[-1] if own else float(self.header.get("clip"))  # type: ignore[arg-type]  # None, a name, a number
        except (TypeError, ValueError):
            return None

    def by_module(self) -> dict[str, list[float]]:
        """The gradient norm of each module's own parameters, step by step."""
        places: dict[str, list[int]] = {}
        for i, module in enumerate(self.modules):
            places.setdefault(module, []).append(i)
        return {
            module: [math.hypot(*(row[i] or 0.0 for i in where)) for row in self.norms]
            for module, where in places.items()
        }

    def told(self, kind: str) -> list[tuple[int, float]]:
        """Losses noted by the script, such as on the test set: (after which step, loss)."""
        return [(n["after"], float(n["loss"])) for n in self.notes if n.get("note") == kind and "loss" in n]


def read(path: str | os.PathLike[str], opt: int | None = None) -> Run:
    """Read a record; that of one rank leads to those of the others beside it, and all are read as one run.

    Args:
        path: the file. Its last line may be incomplete: the run was killed while writing it.
        opt: which optimizer, by number. None: the one with the most steps.

    Raises:
        RecordError: it is not a record, is one of another version, or is damaged in the middle.
    """
    run = _read_one(Path(path), opt, strict=True)
    if "rank" not in run.header:
        return run
    launch = run.header["launch"]
    beside = [f for rank, f in family(Path(path)).items() if rank != run.rank and header_of(f).get("launch") == launch]
    others = [_read_one(file, run.number, strict=False) for file in beside]
    return merged(sorted([run, *others], key=lambda one: one.rank))


def _read_one(path: Path, opt: int | None, strict: bool) -> Run:
    """Read one file; where not `strict`, an optimizer that is not in it is one without steps."""
    lines = _lines(path)
    if not lines or lines[0].get("bridle") != VERSION:
        found = f"version {lines[0]['bridle']}" if lines and "bridle" in lines[0] else "no header"
        raise RecordError(f"{path} is not a record this bridle reads (version {VERSION}): found {found}.")
    steps = [line for line in lines if "step" in line]
    heads = {line["opt"]: line for line in lines if "optimizer" in line}
    if not heads or not strict:
        nothing = {"optimizer": "none", "names": [], "sizes": [], "trained": []}
        heads.setdefault(0 if strict else opt, nothing)
    counts = {index: sum(1 for line in steps if line["opt"] == index) for index in heads}
    chosen = max(counts, key=lambda index: counts[index]) if opt is None else opt
    if chosen not in heads:
        raise RecordError(f"{path} has no optimizer {chosen}; it has {', '.join(map(str, heads))}.")
    head = heads[chosen]
    notes = [line for line in lines[1:] if "step" not in line and "optimizer" not in line]
    run = Run(
        path,
        lines[0],
        head["optimizer"],
        len(heads) - 1,
        head["names"],
        head["sizes"],
        head["trained"],
        number=chosen,
        notes=notes,
        pieces=head.get("pieces", [None] * len(head["names"])),
    )
    for line in steps:
        if line["opt"] == chosen and len(line["norms"]) == len(run.names):
            _append(run, line)
    return run


def _append(run: Run, line: dict[str, Any]) -> None:
    def number(key: str) -> float:
        return float(line.get(key, "nan"))

    run.steps.append(line["step"])
    for name in ("loss", "norm", "peak", "update", "turn", "clip", "limit", "own", "back", "load"):
        getattr(run, name).append(number(name))
    run.norms.append([None if n is None else float(n) for n in line["norms"]])
    run.lr.append(float(line["lr"][0]) if line.get("lr") else math.nan)
    run.of.append(line["of"])
    run.sums.append([math.nan if v is None else float(v) for v in line.get("sums", ())])
    run.unmoved.append(set(line.get("unmoved", ())))
    run.samples.append((line["samples"], float(line["sample_square"])) if "samples" in line else None)
    if "bad" in line:
        run.events.append(Event(line["step"], line["bad"], number("loss")))


def _lines(path: Path) -> list[dict[str, Any]]:
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise RecordError(f"{path} cannot be read: {error}.") from error
    texts = text.split("\n")
    whole, last = texts[:-1], texts[-1]
    found = []
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
