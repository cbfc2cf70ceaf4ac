"""See, split and hold every gradient in a PyTorch program."""

from . import errors
from .persample import call_for_per_sample_grads, per_sample, register_rule

__all__ = ["call_for_per_sample_grads", "errors", "per_sample", "register_rule"]

__version__ = "0.1.0"
