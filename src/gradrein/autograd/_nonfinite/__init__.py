"""Detect NaN and infinity after a backward pass, and find where they began."""

from .detect import detect_nonfinite

__all__ = ["detect_nonfinite"]
