"""Run a backward pass and record what every node did."""

from .grad_stats import GradStats
from .records import ModuleSummary, NodeRecord, Trace
from .trace import trace

__all__ = ["GradStats", "ModuleSummary", "NodeRecord", "Trace", "trace"]
