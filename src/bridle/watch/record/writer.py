"""Write the record of a run: one JSON line for each step, whole at any moment, bounded in size."""

import json
import math
import os
import tempfile
import weakref
from collections.abc import Iterable
from io import FileIO
from pathlib import Path
from typing import Any

from ..run.schema import Line, Number


def rounded(values: Iterable[float | None], digits: int = 6) -> list[Number]:
    """Round to significant digits. JSON has no NaN and no infinity: those become words."""
    return [None if v is None else float(f"{v:.{digits}g}") if math.isfinite(v) else str(v) for v in values]


def reason(error: BaseException) -> str:
    """Return an error as one line, for the end of a record."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")[:500]


class Writer:
    """Write lines, each with a single system call, so that a killed process leaves whole lines behind.

    When the file has grown to `max_bytes`, every other step line is dropped and from then on only every other step is
    written (then every fourth, and so on). A line that stays says how many steps it stands for (`n_steps`) and the
    largest norm among them (`peak`). Of two steps the one with non-finite gradients stays; lines of other kinds always
    do.
    """

    def __init__(self, path: str | os.PathLike[str] | None, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._stride = 1
        self._buffered: dict[int, Line] = {}
        if path is None:
            handle, name = tempfile.mkstemp(prefix="bridle-", suffix=".jsonl")
            os.close(handle)
            weakref.finalize(self, Path(name).unlink, missing_ok=True)
            path = name
        self.path = Path(path).absolute()  # the program may go to another folder
        self._file: FileIO | None = None
        self._size = 0

    def open(self) -> None:
        """Begin a new record, in place of what the file may hold."""
        self._stride, self._size = 1, 0
        self._file = open(self.path, "wb", buffering=0)  # noqa: SIM115  # open for as long as the run lasts

    def write(self, line: Line) -> None:
        """Write a line that is not a step's."""
        if self._file is not None:
            self._size += self._file.write(json.dumps(line, allow_nan=False).encode() + b"\n")

    def write_step(self, line: Line) -> None:
        """Write a step, or buffer it until it can be merged with the next."""
        buffered = self._buffered.get(line["opt"])
        line = line if buffered is None else _merged(buffered, line)
        if line["n_steps"] < self._stride and "nonfinite" not in line:
            self._buffered[line["opt"]] = line
            return
        self._buffered.pop(line["opt"], None)
        self.write(line)
        if self._size > self._max_bytes:
            self._thin()

    def close(self, last: Line | None = None) -> None:
        """Write what is buffered and the last line, if there is one, and close."""
        if self._file is not None:
            for line in [*self._buffered.values(), *([] if last is None else [last])]:
                self.write(line)
            self._buffered.clear()
            self._file.close()
            self._file = None

    def _thin(self) -> None:
        """Merge pairs of step lines, into a new file that replaces the old one atomically."""
        self._stride *= 2
        waiting: dict[int, Line] = {}
        kept: list[Line] = []
        for text in self.path.read_text().splitlines():
            line = json.loads(text)
            if "step" not in line:
                kept.append(line)
                continue
            first = waiting.pop(line["opt"], None)
            line = line if first is None else _merged(first, line)
            if line["n_steps"] < self._stride:
                waiting[line["opt"]] = line
            else:
                kept.append(line)
        kept.extend(waiting.values())
        new = self.path.with_name(self.path.name + ".thinner")
        new.write_bytes(b"".join(json.dumps(line).encode() + b"\n" for line in kept))
        os.replace(new, self.path)
        if self._file is not None:
            self._file.close()
        self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115
        self._size = self.path.stat().st_size


def _merged(first: Line, second: Line) -> Line:
    """Return the second line, or the one with non-finite gradients, in place of both."""
    if "nonfinite" in first and "nonfinite" not in second:
        first, second = second, first
    found: dict[str, Any] = {**second, "n_steps": first["n_steps"] + second["n_steps"]}
    peaks = [line["peak"] for line in (first, second) if isinstance(line.get("peak"), float)]
    return {**found, "peak": max(peaks)} if peaks else found
