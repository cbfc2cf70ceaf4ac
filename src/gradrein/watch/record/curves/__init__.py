"""Losses on other data than the training batches, read where a script puts them: one file for each place."""

from .observer import CurveObserver

__all__ = ["CurveObserver"]
