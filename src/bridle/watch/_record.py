"""The record of a run: one JSON line for each step, whole at any moment, bounded in size."""

from __future__ import annotations

import json
import math
import os
import tempfile
import weakref
from collections.abc import Iterable
from io import FileIO
from pathlib import Path
from typing import Any

__all__ = ["VERSION", "Writer", "reason", "rounded"]

VERSION = 1


def rounded(values: Iterable[float | None], digits: int = 6) -> list[float | str | None]:
    """Values with that many significant digits. JSON has no NaN and no infinity: those become words."""
    return [None if v is None else float(f"{v:.{digits}g}") if math.isfinite(v) else str(v) for v in values]


def reason(error: BaseException) -> str:
    """An error in one line, as the end of a record."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")[:500]


class Writer:
    """Writes lines, each with a single call to the system, so that a killed process leaves whole lines behind.

    When the file has grown to `max_bytes`, every other step line is dropped and from then on only every other
    step is written (then every fourth, and so on). A line that stays says how many steps it stands for (`of`) and
    the largest norm among them (`peak`). Of two steps the one with non-finite gradients stays; lines of other
    kinds always do.
    """

    def __init__(self, path: str | os.PathLike[str] | None, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._stride = 1
        self._held: dict[int, dict[str, Any]] = {}
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
        self._file = open(self.path, "wb", buffering=0)  # noqa: SIM115  # open for as long as the run lasts

    def write(self, line: dict[str, Any]) -> None:
        """Write a line that is not a step's."""
        if self._file is not None:
            self._size += self._file.write(json.dumps(line, allow_nan=False).encode() + b"\n")

    def step(self, line: dict[str, Any]) -> None:
        """Write a step, or hold it until it has company."""
        held = self._held.get(line["opt"])
        line = line if held is None else _joined(held, line)
        if line["of"] < self._stride and "bad" not in line:
            self._held[line["opt"]] = line
            return
        self._held.pop(line["opt"], None)
        self.write(line)
        if self._size > self._max_bytes:
            self._thin()

    def close(self, last: dict[str, Any] | None = None) -> None:
        """Write what is held and the last line, if there is to be one, and close."""
        if self._file is not None:
            for line in [*self._held.values(), *([] if last is None else [last])]:
                self.write(line)
            self._held.clear()
            self._file.close()
            self._file = None

    def _thin(self) -> None:
        """Join pairs of step lines, into a new file that takes the old one's place at once."""
        self._stride *= 2
        waiting: dict[int, dict[str, Any]] = {}
        kept: list[dict[str, Any]] = []
        for text in self.path.read_text().splitlines():
            line = json.loads(text)
            if "step" not in line:
                kept.append(line)
                continue
            first = waiting.pop(line["opt"], None)
            line = line if first is None else _joined(first, line)
            if line["of"] < self._stride:
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


def _joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """The second line, or the one with non-finite gradients, standing for both."""
    if "bad" in first and "bad" not in second:
        first, second = second, first
    found = {**second, "of": first["of"] + second["of"]}
    peaks = [line["peak"] for line in (first, second) if isinstance(line.get("peak"), float)]
    return {**found, "peak": max(peaks)} if peaks else found
