"""Where each op sends its gradients, whatever the values are: one entry per op.

Each entry answers, for one input of an op, who may own its elements, given who owns the outputs. Every multiplier
counts as non-zero: a mask, a gate or a coefficient may be zero today and not tomorrow. An entry may claim more mixing
than there is, never less than some values would cause. An op without an entry sends every output to every input.
"""

from . import elements, layers, mixing  # noqa: F401  (each registers its entries)
from .elements import elementwise
from .step import MOVES, Step, base_name, moves_by_index

__all__ = ["MOVES", "Step", "base_name", "elementwise", "moves_by_index"]
