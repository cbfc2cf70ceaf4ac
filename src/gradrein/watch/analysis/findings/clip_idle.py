from ...run.run import Run
from ..finding import Finding
from ..statistics import finite

_LEAST = 100


def clip_idle(run: Run) -> Finding | None:
    """Find clipping that never did anything."""
    factors, norms = finite(run.clip), finite(run.norm)
    if len(factors) < _LEAST or any(f < 1 for f in factors):
        return None
    evidence: dict[str, object] = {"steps with clipping on": len(factors), "largest norm": max(norms)}
    if run.threshold is not None:
        evidence["threshold"] = run.threshold
    return Finding(
        name="clip_idle",
        title=f"clipping was never active in {len(factors)} steps",
        weight=0.1,
        test=f"clipping is on and changed none of at least {_LEAST} steps",
        evidence=evidence,
        advice="This is fine as a guard against a rare spike. If clipping was meant to act, the threshold is too "
        "high: one below the largest norm would have acted.",
    )
