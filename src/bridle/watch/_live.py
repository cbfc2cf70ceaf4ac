"""One line on the terminal that says how the run is doing, and gets out of the way of the script's own output."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import time
from typing import Any, TextIO

__all__ = ["LiveLine", "possible"]

_PERIOD = 0.2  # seconds between two drawings


def possible() -> bool:
    """Is there a terminal to draw on, and rich to draw with?"""
    terminal = sys.stderr is not None and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    return terminal and importlib.util.find_spec("rich") is not None


class LiveLine:
    """Draws on stderr. The script's streams are wrapped so that the line is wiped before the script writes."""

    def __init__(self) -> None:
        # Not imported by name: the extra may not be there, and type checkers then know nothing of it.
        self._rich = importlib.import_module("rich.text")
        self._console = importlib.import_module("rich.console").Console(stderr=True, soft_wrap=False)
        self._stderr: TextIO = sys.stderr
        self._shown = False
        self.at_margin = True
        self._drawn_at = 0.0
        self._streams = (sys.stdout, sys.stderr)
        sys.stdout, sys.stderr = _Polite(sys.stdout, self), _Polite(sys.stderr, self)

    def draw(self, latest: dict[str, float]) -> None:
        """Show the latest step, unless the script is in the middle of a line of its own."""
        now = time.monotonic()
        if now - self._drawn_at < _PERIOD or not self.at_margin or not latest:
            return
        parts = [("step ", "dim"), (f"{latest['step']:.0f}", "bold")]
        for name, style in (("loss", "cyan"), ("norm", "green"), ("lr", ""), ("update", ""), ("clip", "magenta")):
            if name in latest:
                parts += [(f"  {name} ", "dim"), (f"{latest[name]:.4g}", style)]
        text = self._rich.Text.assemble(("bridle  ", "bold blue"), *parts)
        text.truncate(self._console.width - 1)
        with self._console.capture() as drawn:
            self._console.print(text, end="")
        self._stderr.write(f"\r\x1b[2K{drawn.get()}")
        self._stderr.flush()
        self._shown, self._drawn_at = True, now

    def wipe(self) -> None:
        """Leave an empty line."""
        if self._shown:
            self._stderr.write("\r\x1b[2K")
            self._stderr.flush()
            self._shown = False

    def close(self) -> None:
        """Wipe, and give the script's streams back if it has not put others there."""
        self.wipe()
        for name, original in zip(("stdout", "stderr"), self._streams, strict=True):
            if isinstance(getattr(sys, name), _Polite):
                setattr(sys, name, original)


class _Polite:
    """A stream that wipes the live line before it writes; in all else the stream it stands for."""

    def __init__(self, stream: TextIO, line: LiveLine) -> None:
        self._stream = stream
        self._line = line

    def write(self, text: str) -> int:
        if text:
            self._line.wipe()
            self._line.at_margin = text.endswith("\n")
        return self._stream.write(text)

    def writelines(self, lines: Any) -> None:
        for text in lines:
            self.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
