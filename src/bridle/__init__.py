"""See, split and hold every gradient in a PyTorch program."""

from . import errors
from .persample import per_sample, register_rule

__all__ = ["errors", "per_sample", "register_rule"]

__version__ = "0.1.0"
