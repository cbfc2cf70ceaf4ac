"""Warnings that point at the caller's line."""

import sys
import warnings

from .errors import GradreinWarning


def warn(message: str, category: type[Warning] = GradreinWarning) -> None:
    """Warn at the innermost frame outside gradrein."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and str(frame.f_globals.get("__name__", "")).startswith("gradrein."):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)
