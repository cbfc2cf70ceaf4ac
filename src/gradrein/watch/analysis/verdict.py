"""The first thing a report says: what happened, why, and what to do, for somebody who has read nothing yet."""

from dataclasses import dataclass, replace

from ..run.run import Run
from .advice import SYMPTOMS, Advice
from .finding import Finding
from .losses import is_long_enough, judged_loss, story_of
from .sites import capitalised


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
    happened = [f for f in findings if f.name in SYMPTOMS]
    causes = [f for f in findings if f.name not in SYMPTOMS]
    about = next(iter(happened or causes), None)
    label = about.optimizer if about is not None else None
    same = [replace(f, optimizer=None) if f.optimizer == label else f for f in causes]  # said once is enough
    what = _sentence(happened[0]) if happened else _calm(run)
    why = _why(happened, same if happened else causes)
    look = next((f"Look first at {f.look}." for f in sorted(findings, key=_names_samples) if f.look), "")
    if advice.actions:
        whose = f", {advice.optimizer}" if advice.optimizer and advice.optimizer != label else ""
        do = f"What to do{whose}: {advice.actions[0].do}. {advice.actions[0].why}"
    elif about is not None:
        do = f"What to do: {(about if _has_origin(about) or not causes else causes[0]).advice}"
    else:
        do = ""
    return Verdict(what, why, look, do)


def _names_samples(finding: Finding) -> bool:
    """Return False, which comes first, of a finding that names samples and not only a batch."""
    return not finding.look.startswith("sample")


def _has_origin(finding: Finding) -> bool:
    """Return whether the operation that made the first NaN is known: that is what to change."""
    return "origin" in finding.evidence


def _why(happened: list[Finding], causes: list[Finding]) -> str:
    if happened and _has_origin(happened[0]):
        return str(happened[0].evidence["origin"])
    if not happened:
        return f"Worth a look: {_words(causes[0])}." if causes else ""
    if not causes:
        return "No single cause stands out in the gradients."
    return f"The likely cause: {_words(causes[0])}."


def _calm(run: Run) -> str:
    loss = judged_loss(run)
    if not is_long_enough(loss):
        return "The run is too short to judge its loss."
    return capitalised(f"{story_of(loss)}.")


def _words(finding: Finding) -> str:
    text = finding.plain or finding.title
    return text if finding.optimizer is None else f"{finding.optimizer}: {text}"


def _sentence(finding: Finding) -> str:
    return f"{capitalised(_words(finding).rstrip('.'), finding.optimizer)}."
