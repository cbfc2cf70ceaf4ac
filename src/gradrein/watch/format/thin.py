"""Merge step lines: a long run is kept at fewer steps, and says so."""

from typing import Any

from .schema import Line


def merged(first: Line, second: Line) -> Line:
    """Return the second line, or the one with non-finite gradients, in place of both."""
    if "nonfinite" in first and "nonfinite" not in second:
        first, second = second, first
    found: dict[str, Any] = {**second, "n_steps": first["n_steps"] + second["n_steps"]}
    peaks = [line["peak"] for line in (first, second) if isinstance(line.get("peak"), float)]
    return {**found, "peak": max(peaks)} if peaks else found


def merge_pairs(lines: list[Line]) -> list[Line]:
    """Return half as many lines, each in place of two."""
    pairs = [merged(a, b) for a, b in zip(lines[::2], lines[1::2], strict=False)]
    return pairs + lines[len(pairs) * 2 :]
