import math
from statistics import median

from ...run.run import Run
from ..finding import Chart, Finding
from ..losses import is_unsteady
from ..samples import look_first, samples_of
from ..statistics import finite, quantile, relative

_LEAST = 50
_SPREADS = 5.0  # of the upper half of the usual norms, on a logarithmic scale
_RATIO = 3.0
_LARGE, _CALM = 10.0, 30.0  # so much larger counts: in a run that swings, and in one that does not
_HARM = 1.2
_BEFORE = 5


def spikes(run: Run) -> Finding | None:
    """Find single steps whose gradient is far larger than around them, and what came before them."""
    over = relative(run.peak, 51)
    known = finite(over)
    if len(known) < _LEAST:
        return None
    # The upper quartile, not the deviation: norms are skewed, and a fifth of them may be the spikes themselves.
    usual = (quantile(known, 0.75) - quantile(known, 0.5)) / 0.6745
    limit = max(_SPREADS * usual, math.log(_RATIO))
    above = [i for i, r in enumerate(over) if r > limit]
    inside = set(above)
    starts = [i for i in above if i - 1 not in inside and i >= _BEFORE]
    if not starts:
        return None
    unsteady = is_unsteady(run)
    harm = [a for i in starts if not math.isnan(a := _aftermath(run, i))]
    hurts = 2 * sum(1 for a in harm if a > _HARM) > len(harm)
    least = _LARGE if unsteady else _CALM
    if max(over[i] for i in starts) < math.log(least) and not (hurts and unsteady):
        return None
    worst = max(above, key=lambda i: over[i])
    causes = {name: sum(1 for i in starts if test(run, i)) for name, test in _SIGNS.items()}
    likely = [f"{name} before {n} of {len(starts)}" for name, n in causes.items() if n * 2 > len(starts)]
    modules = {module: norms[worst] for module, norms in run.norm_by_module().items()}
    samples = samples_of(run, {run.steps[i]: over[i] for i in above})
    return Finding(
        name="spikes",
        clipping_helps=True,
        title=f"{len(starts)} gradient spike{'s' if len(starts) > 1 else ''}, the largest {math.exp(over[worst]):.3g} "
        f"times its surroundings (step {run.steps[worst]})" + (f"; {likely[0]}" if likely else ""),
        weight=min(0.85, 0.4 + 0.1 * math.log(math.exp(over[worst]))),
        criterion=f"gradient norm above {_RATIO:g} times its running median (51 steps) and {_SPREADS:g} spreads of the "
        f"upper half of the usual norms; {_LARGE:g} times ({_CALM:g} where nothing swings), or a swinging loss "
        f"{_HARM:g} times higher after most of them",
        evidence={
            "steps": [run.steps[i] for i in starts[:20]],
            "largest, over its surroundings": math.exp(over[worst]),
            "module with the largest gradient there": max(modules, key=lambda m: modules[m]) if modules else "unknown",
            "loss of the 5 steps after over the 9 before, at the largest": _aftermath(run, worst),
            **{f"{name} in the {_BEFORE} steps before": n for name, n in causes.items()},
            **samples,
        },
        advice="Clip by norm so that one step cannot move the weights far. "
        + ("What came before points at the step size: lower the learning rate or warm it up." if likely else
           f"Nothing unusual came before{' most of them' if any(causes.values()) else ''}: look at the data of those "
           "batches."),
        look=look_first(samples, run.steps[worst]),
        plain=f"{_times(len(starts))} a single step had a gradient far larger than usual (up to "
        f"{math.exp(over[worst]):.2g} times)",
        chart=Chart("gradient norm", {"norm": run.norm}, [float(s) for s in run.steps],
                        [float(run.steps[i]) for i in starts], log=True),
    )  # fmt: skip


def _times(n: int) -> str:
    return {1: "once", 2: "twice"}.get(n, f"{n} times")


def _large_update(run: Run, i: int) -> bool:
    usual = median(finite(run.update[max(0, i - 50) : i]) or [math.inf])
    return max(finite(run.update[i - _BEFORE : i]), default=0.0) > 3 * usual


def _overshoot(run: Run, i: int) -> bool:
    return sum(1 for t in run.step_grad_cosine[i - _BEFORE : i] if t > 0.25) >= _BEFORE // 2 + 1


def _rising_lr(run: Run, i: int) -> bool:
    return run.lr[i] > run.lr[i - _BEFORE]


def _rising_loss(run: Run, i: int) -> bool:
    before = finite(run.loss[max(0, i - 50) : i - _BEFORE])
    return bool(before) and median(finite(run.loss[i - _BEFORE : i]) or [0.0]) > 1.5 * median(before) > 0


_SIGNS = {
    "unusually large updates": _large_update,
    "overshooting steps": _overshoot,
    "a rising learning rate": _rising_lr,
    "an already rising loss": _rising_loss,
}


def _aftermath(run: Run, i: int) -> float:
    before, after = finite(run.loss[max(0, i - 9) : i]), finite(run.loss[i + 1 : i + 6])
    return median(after) / median(before) if before and after and median(before) > 0 else math.nan
