"""Show the current step in one line on the terminal, cleared before the script writes."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import time
from typing import Any, TextIO

_PERIOD = 0.2  # seconds between two updates


def is_available() -> bool:
    """Return whether stderr is a terminal, and rich is installed."""
    terminal = sys.stderr is not None and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    return terminal and importlib.util.find_spec("rich") is not None


class LiveLine:
    """Draws on stderr. The script's streams are wrapped so that the line is cleared before the script writes."""

    def __init__(self) -> None:
        # Not imported by name: the extra may not be installed, and a type checker then fails.
        self._rich = importlib.import_module("rich.text")
        self._console = importlib.import_module("rich.console").Console(stderr=True, soft_wrap=False)
        self._stderr: TextIO = sys.stderr
        self._shown = False
        self.at_margin = True
        self._drawn_at = 0.0
        self._streams = (sys.stdout, sys.stderr)
        sys.stdout, sys.stderr = _LineClearingStream(sys.stdout, self), _LineClearingStream(sys.stderr, self)

    def draw(self, latest: dict[str, float]) -> None:
        """Show the latest step, unless the script is in the middle of a line of its own."""
        now = time.monotonic()
        if now - self._drawn_at < _PERIOD or not self.at_margin or not latest:
            return
        parts = [("step ", "dim"), (f"{latest['step']:.0f}", "bold")]
        for name, style in (("loss", "cyan"), ("norm", "green"), ("lr", ""), ("update", ""), ("clip", "magenta")):
            if name in latest:
                parts += [(f"  {name} ", "dim"), (f"{latest[name]:.4g}", style)]
        text = self._rich.Text.assemble(("gradrein  ", "bold blue"), *parts)
        text.truncate(self._console.width - 1)
        with self._console.capture() as drawn:
            self._console.print(text, end="")
        self._shown, self._drawn_at = self._write(f"\r\x1b[2K{drawn.get()}"), now

    def _write(self, text: str) -> bool:
        """Return whether it could be written: a terminal may be gone, and the program goes on."""
        try:
            self._stderr.write(text)
            self._stderr.flush()
        except (OSError, ValueError):
            return False
        return True

    def clear(self) -> None:
        """Clear the line."""
        if self._shown:
            self._write("\r\x1b[2K")
            self._shown = False

    def close(self) -> None:
        """Clear the line, and restore the script's streams unless it has replaced them."""
        self.clear()
        for name, original in zip(("stdout", "stderr"), self._streams, strict=True):
            if isinstance(getattr(sys, name), _LineClearingStream):
                setattr(sys, name, original)


class _LineClearingStream:
    """A stream that clears the live line before it writes, and otherwise is the stream it wraps."""

    def __init__(self, stream: TextIO, line: LiveLine) -> None:
        self._stream = stream
        self._line = line

    def write(self, text: str) -> int:
        if text:
            self._line.clear()
            self._line.at_margin = text.endswith("\n")
        return self._stream.write(text)

    def writelines(self, lines: Any) -> None:
        for text in lines:
            self.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
