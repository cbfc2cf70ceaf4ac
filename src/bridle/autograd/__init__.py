"""Backward passes: run, watched, replayed."""

from ._replay import Edge, replay

__all__ = ["Edge", "replay"]
