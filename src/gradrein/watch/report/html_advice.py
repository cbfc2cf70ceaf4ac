"""The part of the page about what to change."""

import re
from html import escape

from ..analysis.actions import Action
from ..analysis.sites import capitalised
from .report import Report
from .text import command


def marked(text: str) -> str:
    """Escape a text, with its `names` as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def advice_section(report: Report) -> str:
    """Render what to change, with the lines for the script and the command that tries it."""
    advice = report.advice
    if advice.actions:
        actions = "".join(_action(report, action) for action in advice.actions)
        words = f"<p>{marked(advice.because)}</p><ol class=actions>{actions}</ol>"
    else:
        words = f"<p><b>No change is advised.</b> {marked(advice.because)}</p>"
    return f"<section><h2>What to change</h2>{words}</section>"


def _action(report: Report, action: Action) -> str:
    text = f"<li><b>{marked(capitalised(action.do))}.</b> {marked(action.why)}"
    if action.try_with:
        whose = ", for every optimizer" if report.advice.optimizer else ""
        text += f" Without editing{whose}: <code>{escape(command(report, action))}</code>"
    if action.lines:
        lines = "\n".join(escape(line) for line in action.lines)
        text += f"<div class=hint>{escape(capitalised(action.where))}</div><pre>{lines}</pre>"
    return text + "</li>"
