"""Routings by theme; see `base` for what they are."""

from . import between_samples, coefficients, layouts, moved, packed, wrapped  # noqa: F401
from .base import COUPLED, EITHER, FREE, ROUTINGS

__all__ = ["COUPLED", "EITHER", "FREE", "ROUTINGS"]
