"""`--fail-on`: an exit code for programs that wait for a run, such as CI."""

from collections.abc import Sequence

from ...errors import ArgumentError
from ..analysis.findings import check_names as known_names
from ..report.report import Report
from ..say import say

EXIT_CODE = 99
"""Of a run that ended well, but has one of the findings that `--fail-on` names."""


def check_names(names: str | None) -> list[str]:
    """Return the names of findings in a list with commas; "any" is all of them.

    Raises:
        ArgumentError: (a ValueError) there is no such finding.
    """
    asked = [name.strip() for name in (names or "").split(",") if name.strip()]
    known = known_names()
    if names is not None and not asked:
        raise ArgumentError(f"--fail-on names findings: {', '.join(known)}, or any.")
    if wrong := [name for name in asked if name not in (*known, "any")]:
        raise ArgumentError(f"--fail-on: there is no finding {wrong[0]!r}; there are {', '.join(known)}, and any.")
    return known if "any" in asked else asked


def matching(names: str, reports: Sequence[Report]) -> bool:
    """Return whether the last of these reports has one of these findings, and say which."""
    wanted = check_names(names)
    matches = [one for one in reports[-1].findings if one.name in wanted]
    if matches:
        say(f"gradrein: --fail-on: {'; '.join(map(str, matches))} (exit code {EXIT_CODE})")
    return bool(matches)
