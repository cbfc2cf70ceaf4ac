"""See, split and hold every gradient in a PyTorch program."""

from . import autograd, errors, graph
from .autograd import backward, grad, unreached

__all__ = ["autograd", "backward", "errors", "grad", "graph", "unreached"]

__version__ = "0.1.0"
