from ...run.run import Run
from ..finding import Finding

_LEAST = 10
_SHARE = 0.95


def dead(run: Run) -> Finding | None:
    """Find parameters that should learn and do not: no gradient, a gradient of zeros, or no movement."""
    total = len(run.steps)
    if total < _LEAST:
        return None
    kinds: dict[str, list[str]] = {"no gradient": [], "gradient always zero": [], "does not move": []}
    for i, (name, trained) in enumerate(zip(run.names, run.trained, strict=True)):
        if not trained:
            continue
        column = [row[i] for row in run.norms]
        if sum(1 for n in column if n is None) >= _SHARE * total:
            kinds["no gradient"].append(name)
        elif sum(1 for n in column if not n) >= _SHARE * total:
            kinds["gradient always zero"].append(name)
        elif sum(1 for where in run.unmoved if i in where) >= _SHARE * total:
            kinds["does not move"].append(name)
    at_fault = {kind: names for kind, names in kinds.items() if names}
    if not at_fault:
        return None
    count = sum(map(len, at_fault.values()))
    sizes = dict(zip(run.names, run.sizes, strict=True))
    share = sum(sizes[n] for names in at_fault.values() for n in names) / max(1, sum(run.sizes))
    return Finding(
        name="dead",
        title=f"{count} parameter{'s do' if count > 1 else ' does'} not learn: "
        + "; ".join(
            f"{kind}: {', '.join(names[:3])}{' ...' if len(names) > 3 else ''}" for kind, names in at_fault.items()
        ),
        weight=0.3 + 0.4 * share,
        criterion=f"trained parameters without gradient, with a gradient of zeros, or not moved, in {_SHARE:.0%} of "
        f"the steps",
        evidence={**{kind: names[:50] for kind, names in at_fault.items()}, "share of all parameters": share},
        advice="No gradient: the loss does not depend on it, check that its module is used and not detached. Zeros: a "
        "dead activation or a mask. Does not move: a learning rate of zero, or steps below the precision of "
        "the weights.",
    )
