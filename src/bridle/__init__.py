"""See, split and hold every gradient in a PyTorch program."""

from . import errors

__all__ = ["errors"]

__version__ = "0.1.0"
