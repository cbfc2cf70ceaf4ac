"""Write the record of a run: one JSON line for each step, whole at any moment, bounded in size."""

import json
import math
import os
import tempfile
import weakref
from collections.abc import Iterable
from pathlib import Path

from ...errors import RecordWriteError
from ..format.schema import Line, Number, is_step
from ..format.thin import merged
from .file import RecordFile


def rounded(values: Iterable[float | None], digits: int = 6) -> list[Number]:
    """Round to significant digits. JSON has no NaN and no infinity: those become words."""
    return [None if v is None else float(f"{v:.{digits}g}") if math.isfinite(v) else str(v) for v in values]


def reason(error: BaseException) -> str:
    """Return an error as one line, for the end of a record."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")[:500]


class Writer:
    """Write lines. Once a line cannot be written none is any more, and nothing is raised: see `failure`.

    When the file has grown to `max_bytes`, every other step line is dropped and from then on only every other step is
    written (then every fourth, and so on). A line that stays says how many steps it stands for (`n_steps`) and the
    largest norm among them (`peak`). Of two steps the one with non-finite gradients stays; lines of other kinds always
    do.

    Attributes:
        path: The file.
        failure: Why it cannot be written any more; None while it can.
    """

    def __init__(self, path: str | os.PathLike[str] | None, max_bytes: int) -> None:
        self._max_bytes = self._limit = max_bytes
        self._stride = 1
        self._buffered: dict[int, Line] = {}
        if path is None:
            handle, name = tempfile.mkstemp(prefix="gradrein-", suffix=".jsonl")
            os.close(handle)
            weakref.finalize(self, Path(name).unlink, missing_ok=True)
            path = name
        self.path = Path(path).absolute()  # the program may go to another folder
        self.failure: str | None = None
        self._file: RecordFile | None = None
        self._process = 0

    def open(self) -> bool:
        """Open the file, and go on with what it holds. Return whether it is empty.

        Raises:
            RecordWriteError: (a ValueError and an OSError) it cannot be written.
        """
        try:
            self._file = RecordFile(self.path)
        except OSError as error:
            raise RecordWriteError(f"the record {self.path} cannot be written: {why(error)}.") from error
        self.failure, self._process = None, os.getpid()
        return self._file.size == 0

    def write(self, line: Line) -> None:
        """Write a line that is not a step's."""
        data = json.dumps(line, allow_nan=False).encode() + b"\n"
        if self._file is None or self.failure is not None or os.getpid() != self._process:
            return
        try:
            self._file.append(data)
        except OSError as error:
            self._fail(error)

    def write_step(self, line: Line) -> None:
        """Write a step, or buffer it until it can be merged with the next."""
        buffered = self._buffered.get(line["opt"])
        line = line if buffered is None else merged(buffered, line)
        if line["n_steps"] < self._stride and "nonfinite" not in line:
            self._buffered[line["opt"]] = line
            return
        self._buffered.pop(line["opt"], None)
        self.write(line)
        if self.failure is None and self._file is not None and self._file.size > self._limit:
            try:
                self._thin(self._file)
            except OSError as error:
                self._fail(error)

    def write_late(self, line: Line) -> None:
        """Write a line, also after `close`."""
        closed = self._file is None and self.failure is None
        if closed:
            self.open()
        self.write(line)
        if closed:
            self.close()

    def close(self, last: Line | None = None) -> None:
        """Write what is buffered and the last line, if there is one, and close."""
        if self._file is None:
            return
        for line in [*self._buffered.values(), *([] if last is None else [last])]:
            self.write(line)
        self._buffered.clear()
        try:
            if self.failure is None:
                with self._file.opened():  # is it still there?
                    pass
        except OSError as error:
            self._fail(error)
        self._file = None

    def _fail(self, error: OSError) -> None:
        self.failure = f"the record {self.path} cannot be written: {why(error)}"

    def _thin(self, file: RecordFile) -> None:
        """Merge pairs of step lines, into a new file that replaces the old one atomically."""
        self._stride *= 2
        waiting: dict[int, Line] = {}
        kept: list[Line] = []
        for text in file.read().splitlines():
            line = json.loads(text)
            if not is_step(line):
                kept.append(line)
                continue
            first = waiting.pop(line["opt"], None)
            line = line if first is None else merged(first, line)
            if line["n_steps"] < self._stride:
                waiting[line["opt"]] = line
            else:
                kept.append(line)
        kept.extend(waiting.values())
        file.rewrite(b"".join(json.dumps(line).encode() + b"\n" for line in kept))
        self._limit = max(self._max_bytes, 3 * file.size // 2)  # where notes fill it, do not rewrite it at each step


def why(error: OSError) -> str:
    """Return what the system says, without its number and the name of the file."""
    return error.strerror or str(error)
