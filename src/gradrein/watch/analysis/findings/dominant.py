from statistics import median

from ...run.run import Run
from ..finding import Chart, Finding

_SHARE = 0.9
_MODULES = 4


def dominant(run: Run) -> Finding | None:
    """Find one module that makes nearly all of the gradient norm: one threshold for all is then a threshold for it."""
    modules = run.norm_by_module()
    if len(modules) < _MODULES or len(run.steps) < 10:
        return None
    # Not a power: where a run has diverged it overflows and raises, and a product is infinite.
    totals = [sum(norms[t] * norms[t] for norms in modules.values()) for t in range(len(run.steps))]
    kept = [t for t, total in enumerate(totals) if 0 < total < float("inf")]
    if not kept:
        return None
    shares = {m: median(norms[t] ** 2 / totals[t] for t in kept) for m, norms in modules.items()}
    top = max(shares, key=lambda m: shares[m])
    size = sum(n for n, m in zip(run.sizes, run.modules, strict=True) if m == top) / sum(run.sizes)
    if shares[top] < _SHARE or size > 0.5:
        return None
    ranked = dict(sorted(shares.items(), key=lambda item: -item[1])[:8])
    return Finding(
        name="dominant",
        title=f"one module dominates: {top} makes {shares[top]:.0%} of the squared gradient norm",
        weight=0.3 + 0.3 * shares[top],
        criterion=f"median share of one of {len(modules)} modules in the squared norm above {_SHARE:.0%}, with less "
        "than half of the parameters",
        evidence={"module": top, "its share of the squared norm": shares[top], "its share of the parameters": size},
        advice="A global threshold then only sees this module, and scales all others with it. Give it its own: "
        f'`gradrein.clip_(model, {{"{top}.*": gradrein.by_norm(...), "*": gradrein.by_norm(...)}})`, or '
        f"`gradrein.by_norm(..., per_parameter=True)`.",
        chart=Chart("median share of the squared norm", {m: [s] for m, s in ranked.items()}),
    )
