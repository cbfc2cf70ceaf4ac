"""Runs of torch's engine over a recorded graph, and what its nodes saved."""

from .errors import explain_errors, refuse_nested
from .losses import Losses
from .runs import call, gradients_at, pull, run_inside_engine, visit
from .saved_values import is_packed, saved, saved_number, saved_tensors

__all__ = [
    "Losses",
    "call",
    "explain_errors",
    "gradients_at",
    "is_packed",
    "pull",
    "refuse_nested",
    "run_inside_engine",
    "saved",
    "saved_number",
    "saved_tensors",
    "visit",
]
