"""See: record a run, find what is wrong with it, recommend clipping, report.

`format` says what a record looks like; `record` runs inside the training process and writes one; `run` reads it;
`analysis` concludes; `report` shows; `command` is `gradrein watch` and `gradrein report`.
"""

from .analysis.advice import Advice
from .analysis.finding import Chart, Finding
from .analysis.findings import register_finding
from .arguments import ClipOption
from .monitor import Monitor
from .record.layers import Layers
from .report.report import Report, read_report
from .run.reader import read_run
from .run.run import Run

__all__ = [
    "Advice",
    "Chart",
    "ClipOption",
    "Finding",
    "Layers",
    "Monitor",
    "Report",
    "Run",
    "read_report",
    "read_run",
    "register_finding",
]
