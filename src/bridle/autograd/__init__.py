"""Backward passes: run, watched, replayed."""

from ._anomaly import detect_anomaly
from ._records import ModuleSummary, NodeRecord, Trace
from ._replay import Edge, replay
from ._stats import Stats
from ._trace import trace

__all__ = ["Edge", "ModuleSummary", "NodeRecord", "Stats", "Trace", "detect_anomaly", "replay", "trace"]
