"""Read the lines of a file that may be anything, in bounded time and memory."""

import json
import stat
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

from ...errors import RecordError
from ..format.schema import VERSION, Line

_MOST_BYTES = 1 << 29
_MOST_LINES = 2_000_000
_MOST_LINE_BYTES = 1 << 24
_MOST_DEPTH = 200  # many times that of a record
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def read_lines(path: Path) -> Iterator[tuple[int, Line]]:
    """Yield the number and content of each whole line; the first is the header of a record of this version.

    A last line without an end is left out: the run was killed while it was written, or goes on.

    Raises:
        RecordError: (a ValueError) the file cannot be read, is not a record, or is damaged in the middle.
    """
    found = 0
    try:
        state = path.stat()
        if not stat.S_ISREG(state.st_mode):
            raise RecordError(f"{path} cannot be read: it is {'a folder' if path.is_dir() else 'not a regular file'}.")
        if state.st_size > _MOST_BYTES:
            raise RecordError(
                f"{path} has {state.st_size >> 20} MB; a record of up to {_MOST_BYTES >> 20} MB can be read. Write "
                "less with `every` or `max_bytes`."
            )
        with path.open("rb") as file:
            while (data := file.readline(_MOST_LINE_BYTES)).endswith(b"\n"):
                found += 1
                line = _parse(path, found, data)
                if found == 1:
                    _require_header(path, line)
                yield found, line
    except (OSError, ValueError) as error:
        if isinstance(error, RecordError):
            raise
        raise RecordError(f"{path} cannot be read: {error}.") from error
    if len(data) == _MOST_LINE_BYTES:
        raise RecordError(f"line {found + 1} of {path} is not a line of a record: it is too long.")
    if found == 0:
        what = "its first line is incomplete" if data else f"version {VERSION} begins with a header: found no header"
        raise RecordError(f"{path} is not a record this gradrein reads: {what}.")


def _parse(path: Path, number: int, data: bytes) -> Line:
    if number > _MOST_LINES:
        raise RecordError(f"{path} has more than {_MOST_LINES} lines, which no record has.")
    if _is_deep(data):
        raise RecordError(f"line {number} of {path} is not a line of a record: it is nested too deeply.")
    try:
        line = json.loads(data)
    except ValueError as error:
        raise RecordError(f"line {number} of {path} is not JSON; only the last may be incomplete.") from error
    if not isinstance(line, dict):
        raise RecordError(f"line {number} of {path} is not a line of a record.")
    return line


def _is_deep(data: bytes) -> bool:
    """Return whether a line nests deeper than any of ours; how deep Python itself goes depends on its version."""
    if data.count(b"[") + data.count(b"{") <= _MOST_DEPTH:
        return False
    outside_strings = data.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')[::2]
    brackets = b"".join(outside_strings).translate(None, _NO_BRACKETS)
    depths = accumulate(1 if bracket in b"[{" else -1 for bracket in brackets)
    return any(depth > _MOST_DEPTH for depth in depths)


def _require_header(path: Path, line: Line) -> None:
    version = line.get("gradrein", line.get("bridle"))  # records from before the project had its name
    if version != VERSION:
        found = f"version {str(version)[:50]}" if version is not None else "no header"
        raise RecordError(f"{path} is not a record this gradrein reads (version {VERSION}): found {found}.")
