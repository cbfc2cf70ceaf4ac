"""The first thing a report says: what happened, why, and what to do, for somebody who has read nothing yet."""

from dataclasses import dataclass, replace

from ..run.run import Run
from .advice import SYMPTOMS, Advice
from .finding import Finding
from .losses import losses_of
from .sites import capitalised

_ABOUT_LOSS = (*SYMPTOMS, "overfitting")
_LIKELY = 0.6  # of a lower weight a cause explains a part at most
_STUCK = 0.97  # a loss whose lowest level is above this part of its first has hardly fallen
_ABOVE = 1.1  # a loss that ends so many times above its lowest is said to


@dataclass(frozen=True)
class Verdict:
    """One sentence each; `why`, `look` and `do` are empty where there is nothing to say.

    Attributes:
        what: What happened.
        why: The likely cause.
        look: The sample or batch to look at first.
        do: What to change.
    """

    what: str
    why: str
    look: str
    do: str

    def __str__(self) -> str:
        """Return them as one text."""
        return " ".join(part for part in (self.what, self.why, self.look, self.do) if part)


def verdict_on(run: Run, findings: list[Finding], advice: Advice) -> Verdict:
    """Say what happened, why, what to look at, and what to do."""
    happened = [f for f in findings if f.name in _ABOUT_LOSS]
    causes = [f for f in findings if f.name not in _ABOUT_LOSS and (f.weight >= 0.5 or f.clipping_helps)]
    about = next(iter(happened or causes), None)
    label = about.optimizer if about is not None else None
    same = [replace(f, optimizer=None) if f.optimizer == label else f for f in causes]  # said once is enough
    what = _sentence(happened[0]) if happened else _calm(run)
    why = _why(happened, same if happened else causes)
    look = next((f"Look first at {f.look}." for f in sorted(findings, key=_names_samples) if f.look), "")
    if advice.actions:
        whose = f", {advice.optimizer}" if advice.optimizer and advice.optimizer != label else ""
        do = f"What to do{whose}: {advice.actions[0].do}."
    elif happened or causes:
        do = f"What to do: {(happened or causes)[0].advice}"
    else:
        do = ""
    return Verdict(what, why, look, do)


def _names_samples(finding: Finding) -> bool:
    """Return False, which comes first, of a finding that names samples and not only a batch."""
    return not finding.look.startswith("sample")


def _why(happened: list[Finding], causes: list[Finding]) -> str:
    if happened and "origin" in happened[0].evidence:
        return str(happened[0].evidence["origin"])
    if not causes and [f.name for f in happened[:2]] in (["nonfinite", "rising"], ["nonfinite", "oscillation"]):
        before = replace(happened[1], optimizer=None) if happened[1].optimizer == happened[0].optimizer else happened[1]
        return f"Before that: {_words(before)}."
    if not causes:
        return "No single cause stands out in the gradients." if any(f.name != "overfitting" for f in happened) else ""
    if not happened:
        return f"Worth a look: {_words(causes[0])}."
    likely = "The likely cause" if causes[0].weight >= _LIKELY else "A possible cause"
    return f"{likely}: {_words(causes[0])}."


def _calm(run: Run) -> str:
    *others, trained = losses_of(run)
    shown = next((loss for loss in others if loss.is_long_enough), trained)
    if not shown.is_long_enough:
        return "The run is too short to judge its loss."
    start = 4 if shown.batches else 0  # of single batches a median says more
    first, last = shown.level(start), shown.level(-1)
    lowest = min(shown.level(i) for i in range(start, len(shown.values)))
    medians = ["medians over some steps"] if shown.batches else []  # the line below has single ones
    if lowest > _STUCK * first > 0:
        said = _in_brackets(medians)
        return f"The {shown.name} hardly falls: it goes from {first:.3g} to {last:.3g}{said}, and does not swing."
    ends = [f"its lowest is {lowest:.3g}"] if last > _ABOVE * lowest > 0 else []
    return f"The {shown.name} goes from {first:.3g} to {last:.3g}{_in_brackets(ends + medians)} and does not swing."


def _in_brackets(notes: list[str]) -> str:
    return f" ({'; '.join(notes)})" if notes else ""


def _words(finding: Finding) -> str:
    text = finding.plain or finding.title
    return text if finding.optimizer is None else f"{finding.optimizer}: {text}"


def _sentence(finding: Finding) -> str:
    return f"{capitalised(_words(finding).rstrip('.'), finding.optimizer)}."
