"""See, split and hold every gradient in a PyTorch program."""

from . import autograd, errors, graph
from .autograd import detect_anomaly, trace

__all__ = ["autograd", "detect_anomaly", "errors", "graph", "trace"]

__version__ = "0.1.0"
