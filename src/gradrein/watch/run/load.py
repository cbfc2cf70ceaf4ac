"""Load the lines of a record. A file may be anything: what is too large or is no record is refused, by line."""

import json
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...errors import RecordError
from ..format.schema import KEYS, VERSION, Line
from .values import text

_MOST_BYTES = 1 << 29
_MOST_LINE_BYTES = 1 << 24
_MOST_RANKS = 1_000_000
_MOST_STEPS = 2**53
_INTEGERS = ("step", "opt", "n_steps", "samples", "after", "dataset", "line", "rank", "world")
_LISTS = {"norms": object, "lr": object, "partial_sums": object, "unmoved": int, "names": str, "sizes": int,
          "trained": bool, "dtypes": str, "batch": int, "shards": object}  # fmt: skip
_STRINGS = ("file", "text", "library", "optimizer")
_REQUIRED = {
    "step": ("step", "opt", "norms"),
    "optimizer": ("optimizer", "opt", "names", "sizes", "trained"),
    "site": ("file", "line", "text"),
    "batch": ("batch", "dataset", "opt", "after"),
    "unmeasured": ("unmeasured", "reason"),
}


def load(path: Path) -> Iterator[Line]:
    """Yield each whole line, checked; the first is the header of a record of this version.

    A last line without an end is left out: the run was killed while it was written, or goes on.

    Raises:
        RecordError: (a ValueError) the file cannot be read, is too large, is not a record, or is damaged.
    """
    i, data = 0, b""
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
                i += 1
                yield _header(path, _parsed(path, i, data)) if i == 1 else _checked(path, i, _parsed(path, i, data))
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {error}.") from error
    if len(data) == _MOST_LINE_BYTES:
        raise RecordError(f"line {i + 1} of {path} is not a line of a record: it is too long.")
    if i == 0:
        what = "its first line is incomplete" if data else f"version {VERSION} begins with a header: found no header"
        raise RecordError(f"{path} is not a record this gradrein reads: {what}.")


def _parsed(path: Path, i: int, data: bytes) -> Line:
    try:
        line = json.loads(data)
    except RecursionError:
        raise RecordError(f"line {i} of {path} is not a line of a record: it is nested too deeply.") from None
    except ValueError as error:
        raise RecordError(f"line {i} of {path} is not JSON; only the last may be incomplete.") from error
    if not isinstance(line, dict):
        raise RecordError(f"line {i} of {path} is not a line of a record.")
    return line


def _header(path: Path, line: Line) -> Line:
    version = line.get("gradrein")
    if version != VERSION:
        what = f"version {text(version)[:50]}" if version is not None else "no header"
        raise RecordError(f"{path} is not a record this gradrein reads (version {VERSION}): found {what}.")
    argv = line.get("argv")
    line["argv"] = [text(word) for word in argv] if isinstance(argv, list) else []
    if "rank" in line or "world" in line:
        rank, world, launch = line.get("rank"), line.get("world"), line.get("launch")
        known = all(map(_is_whole, (rank, world))) and isinstance(launch, str)
        if not known or not rank < world <= _MOST_RANKS:  # type: ignore[operator]
            what = text(f"rank {rank!r:.50} of {world!r:.50}")
            raise RecordError(f"{path} is not a record this gradrein reads: its header says it is {what}.")
    return line


def _checked(path: Path, i: int, line: Line) -> Line:
    """Return a line of another kind, of which everything that is used later has the type that it should have."""
    kind = next((kind for kind in KEYS if kind in line), "")
    missing = [key for key in _REQUIRED.get(kind, ()) if key not in line]
    wrong = [key for key in line if key in KEYS.get(kind, ()) and not _is_right(kind, key, line[key])]
    if missing or wrong:
        what = f"{missing[0]!r} is missing" if missing else f"{wrong[0]!r} is {text(repr(line[wrong[0]]))[:60]}"
        raise RecordError(f"line {i} of {path} is damaged: {what}.")
    if kind == "step":
        line.setdefault("n_steps", 1)
        return line
    line = {text(key): _clean(value) for key, value in line.items()}
    return line if kind == "optimizer" else {**line, "after": line.get("after", 0)}


def _is_right(kind: str, key: str, value: Any) -> bool:
    if (kind, key) == ("site", "names"):
        return isinstance(value, dict)
    if key in _INTEGERS:
        return _is_whole(value) and (key != "n_steps" or value > 0)
    if key in _LISTS:
        return isinstance(value, list) and all(_LISTS[key] is object or type(v) is _LISTS[key] for v in value)
    if key in _STRINGS:
        return isinstance(value, str)
    if key in ("nonfinite", "settings", "loss_graph"):
        return isinstance(value, dict) and (key != "nonfinite" or all(map(_is_whole, value.values())))
    return not isinstance(value, (list, dict))


def _is_whole(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MOST_STEPS


def _clean(value: Any) -> Any:
    """Return a value whose strings can be printed."""
    if isinstance(value, list):
        return [_clean(v) for v in value]
    return text(value) if isinstance(value, str) else value
