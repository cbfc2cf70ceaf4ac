"""The part of the page about what to change."""

import re
from html import escape

from ..analysis.actions import Action
from ..analysis.advice import Advice
from . import charts
from .text import number


def marked(text: str) -> str:
    """Escape a text, with its `names` as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def advice_section(advice: Advice, norms: list[tuple[str, str, list[float]]]) -> str:
    """Render what to change with the lines to paste, the distribution of norms, and what thresholds would have done.

    Args:
        advice: The advice.
        norms: Of each run its name, the style of its bars and its gradient norms.
    """
    levels = [(f"advised {advice.threshold:g}", advice.threshold)] if advice.threshold else []
    if advice.actions:
        actions = "".join(_action(action, advice) for action in advice.actions)
        words = f"<p>{marked(advice.because)}</p><ol class=actions>{actions}</ol>"
    else:
        words = f"<p><b>No change is advised.</b> {marked(advice.because)}</p>"
    if advice.threshold is not None and advice.effect is not None:
        words += (
            f"<p>On this run {advice.threshold:g} would have changed {advice.effect.clipped:.0%} of the steps, by "
            f"{number(advice.effect.factor)} in the median, and removed {advice.effect.removed:.0%} of the sum of all "
            "norms.</p>"
        )
    return (
        f"<section><h2>What to change</h2>{words}</section><section><h2>How large the gradients are</h2>"
        f"{charts.histogram(norms, levels)}<p class=hint>What each threshold would have done on this run:</p>"
        f"{_table(advice)}</section>"
    )


def _action(action: Action, advice: Advice) -> str:
    text = f"<li><b>{marked(action.do[:1].upper() + action.do[1:])}.</b> {marked(action.why)}"
    if action.try_with:
        whose = ", for every optimizer" if advice.optimizer else ""
        text += f" Without editing{whose}: <code>gradrein watch {escape(action.try_with)} ...</code>"
    if action.paste is not None:
        lines = "\n".join(escape(line) for line in action.paste.lines)
        text += (
            f"<div class=hint>{escape(action.paste.place[:1].upper() + action.paste.place[1:])}</div><pre>{lines}</pre>"
        )
    return text + "</li>"


def _table(advice: Advice) -> str:
    rows = "".join(
        f"<tr{' class=pick' if c.threshold == advice.threshold else ''}><td class=n>{c.threshold:g}</td>"
        f"<td class=n>{c.clipped:.0%}</td><td class=n>{c.removed:.0%}</td><td class=n>{number(c.factor)}</td></tr>"
        for c in advice.candidates
    )
    if not rows:
        return ""
    return (
        "<div class=scroll><table><tr><th class=n>threshold</th><th class=n>steps clipped</th>"
        f"<th class=n>norm removed</th><th class=n>median factor</th></tr>{rows}</table></div>"
    )
