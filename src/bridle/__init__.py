"""See, split and hold every gradient in a PyTorch program."""

from . import autograd, errors, graph

__all__ = ["autograd", "errors", "graph"]

__version__ = "0.1.0"
