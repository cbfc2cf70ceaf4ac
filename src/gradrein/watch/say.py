"""Say a line to whoever runs the program."""

import contextlib
import sys


def say(text: str) -> None:
    """Print to stderr. Where there is none, or it is closed, nothing is said: never to stdout, never an error."""
    stream = sys.stderr
    if stream is not None:
        with contextlib.suppress(OSError, ValueError):
            print(text, file=stream, flush=True)
