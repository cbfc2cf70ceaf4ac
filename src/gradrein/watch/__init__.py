"""See: record a run, find what is wrong with it, recommend clipping, report.

`record` runs inside the training process and writes files; `run` reads them; `analysis` concludes; `report` shows.
"""

from ._clip_policy import ClipOption
from ._monitor import Monitor
from .analysis.advice import Advice
from .analysis.finding import Chart, Finding
from .analysis.findings import register_finding
from .report.report import Report, read_report
from .run.read import read_run
from .run.run import Run

__all__ = [
    "Advice",
    "Chart",
    "ClipOption",
    "Finding",
    "Monitor",
    "Report",
    "Run",
    "read_report",
    "read_run",
    "register_finding",
]
