"""Runs of torch's engine over a recorded graph, and what its nodes saved."""

from .errors import explain_errors, raise_explained, refuse_nested
from .runs import (
    Gradients,
    Losses,
    call,
    gradients_at,
    is_packed,
    pull,
    run_inside_engine,
    saved,
    saved_number,
    saved_tensors,
    visit,
)

__all__ = [
    "Gradients",
    "Losses",
    "call",
    "explain_errors",
    "gradients_at",
    "is_packed",
    "pull",
    "raise_explained",
    "refuse_nested",
    "run_inside_engine",
    "saved",
    "saved_number",
    "saved_tensors",
    "visit",
]
