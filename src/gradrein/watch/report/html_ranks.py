"""The part of the page about several ranks."""

from html import escape

from .report import Report
from .text import value


def ranks_section(report: Report, label: str) -> str:
    """Render a table with a row for each rank, and what was not in order."""
    if not report.run.ranks:
        return ""
    rows = report.rank_table
    head = "".join(f"<th>{escape(key)}</th>" for key in rows[0])
    body = "".join(f"<tr>{''.join(f'<td>{escape(value(v))}</td>' for v in row.values())}</tr>" for row in rows)
    warnings = "".join(f"<p class=do>{escape(warning)}</p>" for warning in report.warnings)
    return (
        f"<section><h2>Ranks{', ' + label.lower() if label else ''}</h2>{warnings}"
        f"<div class=scroll><table><tr>{head}</tr>{body}</table></div></section>"
    )
