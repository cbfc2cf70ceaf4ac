"""Read what the script prints, as it prints it.

`write` of `sys.stdout` and `sys.stderr` is shadowed on the stream itself: it stays the same object, and writes and
returns what it would have. An error while reading ends the reading, never the writing.
"""

import contextlib
import sys
from collections.abc import Callable
from typing import Any

from .lines import Reading, TableReader, heading_of, read_line

_LONGEST = 4000  # of an incomplete line


class PrintedLines:
    """Calls a function with the losses in each line that is printed, and whether it is printed over the one before."""

    def __init__(self, on_reading: Callable[[Reading, bool], None]) -> None:
        self._on_reading = on_reading
        self._table = TableReader()
        self._heading: str | None = None
        self._streams: list[tuple[Any, Any, Any]] = []
        self._on = False

    def install(self) -> None:
        """Begin to read."""
        self._on = True
        for stream in dict.fromkeys(filter(None, (sys.stdout, sys.stderr))):
            with contextlib.suppress(Exception):  # a stream that cannot be shadowed is not read
                before, tee = vars(stream).get("write"), self._tee(stream.write)
                stream.write = tee
                self._streams.append((stream, before, tee))

    def remove(self) -> None:
        """Stop, and leave the streams as they were."""
        self._on = False
        for stream, before, tee in self._streams:
            if vars(stream).get("write") is not tee:  # what somebody else has put there since is theirs to undo
                continue
            if before is None:
                del stream.write
            else:
                stream.write = before
        self._streams.clear()

    def _tee(self, write: Callable[[str], Any]) -> Callable[[str], Any]:
        incomplete = ""

        def tee(text: str, /) -> Any:
            nonlocal incomplete
            result = write(text)
            if self._on:
                try:
                    incomplete = self._read(incomplete + text)
                except Exception:
                    self._on = False
            return result

        return tee

    def _read(self, text: str) -> str:
        """Read all complete lines; return the incomplete one."""
        if "\n" not in text and "\r" not in text:
            return text if len(text) < _LONGEST else ""
        *lines, last = text.replace("\r", "\n\r").split("\n")
        for line in lines:
            for reading in read_line(line, self._heading) or self._table.read(line):
                self._on_reading(reading, line.startswith("\r"))
            self._heading = heading_of(line)
        return last
