"""Runs of torch's engine over a recorded graph, and what its nodes saved."""

from .errors import explain_errors, refuse_nested
from .losses import Losses
from .runs import call, gradients_at, inside_engine, pull, visit
from .saved_values import is_packed, saved, saved_number, saved_tensors

__all__ = [
    "Losses",
    "call",
    "explain_errors",
    "gradients_at",
    "inside_engine",
    "is_packed",
    "pull",
    "refuse_nested",
    "saved",
    "saved_number",
    "saved_tensors",
    "visit",
]
