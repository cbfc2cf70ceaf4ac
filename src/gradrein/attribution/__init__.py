"""Which training samples made it do that: stores of projected per-sample gradients, and what they answer."""

from ._methods import duplicates, less, margins, outliers, tracin, trak
from ._store import GradientStore

__all__ = ["GradientStore", "duplicates", "less", "margins", "outliers", "tracin", "trak"]
