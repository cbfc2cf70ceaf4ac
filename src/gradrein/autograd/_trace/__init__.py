"""Run a backward pass and record what every node did."""

from .grad_stats import GradStats
from .records import ModuleSummary, NodeRecord
from .result import Trace
from .trace import trace

__all__ = ["GradStats", "ModuleSummary", "NodeRecord", "Trace", "trace"]
