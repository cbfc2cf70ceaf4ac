"""See, split and hold every gradient in a PyTorch program."""

from . import autograd, errors, graph
from .autograd import trace

__all__ = ["autograd", "errors", "graph", "trace"]

__version__ = "0.1.0"
