"""Fit to random runs whether a report speaks and what it advises: writes `analysis/calibrated.py`.

python benchmarks/random_runs calibrate

Whether to speak: a logistic rule with weights that are not negative, once with the signs of a test loss and once
without. How strongly the weights are held back is chosen by leaving out whole kinds of data; the limit is where so many
fine runs of the kinds left out are spoken of as FALSE_ALARMS says. What to advise: by a tree of two questions about the
same signs, over the runs that are spoken of; each leaf has the changes that did best, with what became of its runs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from judge import HARMED, NEEDS, best_of_eight, end_of, helps, truth, truth_of_seed

ROOT = Path(__file__).resolve().parents[2]
TARGET = ROOT / "src" / "gradrein" / "watch" / "analysis" / "calibrated.py"
FALSE_ALARMS = 0.035
STRENGTHS = (0.3, 1.0, 3.0)
ADAPTIVE = ("adam", "adamw", "nadam", "adamax", "adagrad", "rmsprop")
KINDS = {
    "with a test loss": (
        "test loss, end over lowest",
        "test loss, height above the lowest so far",
        "test loss, still falling at the end",
        "gradient norms, spread",
        "gradients shrink under an optimizer like Adam",
    ),
    "without": (
        "training loss, height in the second half",
        "gradients shrink under an optimizer like Adam",
        "longest steps, of the weights",
    ),
}
# Of runs that are clipped already, as runs are that follow what was advised to them: the norms say no more
CLIPPED = (
    "test loss, end over lowest",
    "test loss, height above the lowest so far",
    "training loss, height in the second half",
    "longest steps, of the weights",
)
QUESTIONS = (
    "test loss, end over lowest",
    "longest steps, of the weights",
    "gradients shrink under an optimizer like Adam",
)
GROUPS = ("plain", "plain, not finite", "adaptive")
LEAST, GAIN = 25, 2.0  # runs in a leaf; what a question has to save, as a sum of logarithms
HARM = math.log(4)  # a run that is harmed counts as if it had ended four times as high
CHANGES = 4  # in a leaf, which is what `--try` runs

Row = tuple[dict[str, float], bool, str]  # signs, whether help is needed, the kind of data
Advised = tuple[dict[str, Any], dict[str, Any], str]  # the task, a run of it, a way
After = Callable[[list[Advised]], list[tuple[dict[str, Any], dict[str, Any], dict[str, float], float]]]


def calibrate(lines: list[dict[str, Any]], after: After) -> str:
    """Return the text of the module with the constants.

    Args:
        lines: The tasks, with the signs of their runs.
        after: Trains runs in the ways that are advised to them, and returns their signs and ends.
    """
    kinds = {kind: fit(_rows(lines, kind), KINDS[kind]) for kind in KINDS}
    leaves = advice(lines, kinds)
    changed = after([(line, seed, way) for line, seed, way in advised(lines, kinds, leaves)])
    rows = [(signs, _needs_more(seed, end), line["task"]["data"]) for line, seed, signs, end in changed]
    return module(len(lines), {**kinds, "clipped": fit(rows, CLIPPED)}, leaves)


def advised(lines: list[dict[str, Any]], kinds: dict[str, Any], leaves: dict[str, Any]) -> list[Advised]:
    """Return the runs that are spoken of and advised to be clipped, each with that way."""
    found = []
    for line in lines:
        for seed in line["seeds"]:
            path = leaves[group_of(line, seed)]
            way = next(c[0][0] for p, c in path if all((seed["signs"].get(n, -1.0) > t) == (k > 0) for n, k, t in p))
            if is_spoken_of(seed, kinds) and not way.startswith("lr") and math.isfinite(seed["norm"]):
                found.append((line, seed, way))
    return found


def _needs_more(seed: dict[str, Any], end: float) -> bool:
    return min(end_of(seed, way) for way in seed["ways"]) < NEEDS * end


def module(tasks: int, kinds: dict[str, Any], leaves: dict[str, Any]) -> str:
    """Return constants as a module."""
    measured = {"tasks": tasks, "false alarms": FALSE_ALARMS}
    measured |= {f"heard {kind}": found["heard"] for kind, found in kinds.items()}
    parts = [
        '"""Written by `make calibrate` from random training runs; do not edit. See `benchmarks/random_runs`."""\n',
        _dict("MEASURED: dict[str, float]", measured),
        "# What each sign of a run weighs, and the sum from which a report speaks",
        _dict("WEIGHTS: dict[str, dict[str, float]]", {kind: found["weights"] for kind, found in kinds.items()}),
        _dict("LIMITS: dict[str, float]", {kind: found["limit"] for kind, found in kinds.items()}),
        "# What to change, by the kind of optimizer, then by signs that are above (1) or not above (-1) a number: the",
        "# changes, the best first and then what adds most to those before; in how many runs of how many that needed",
        "# help it ended at least a third lower, and in how many of all that were spoken of a quarter higher",
        "Leaf = tuple[list[tuple[str, int, float]], list[tuple[str, int, int, int, int]]]",
        _dict("ADVICE: dict[str, list[Leaf]]", leaves),
    ]
    return "\n".join(parts) + "\n"


def _dict(name: str, values: dict[str, Any]) -> str:
    return f"{name} = {_value(values, '')}"


def _value(value: Any, indent: str) -> str:
    inner = indent + "    "
    if isinstance(value, dict):
        rows = "".join(f"{inner}{json.dumps(k)}: {_value(v, inner)},\n" for k, v in value.items())
        return f"{{\n{rows}{indent}}}"
    if isinstance(value, list):
        rows = "".join(f"{inner}{_value(v, inner)},\n" for v in value)
        return f"[\n{rows}{indent}]" if value else "[]"
    if isinstance(value, tuple) and any(isinstance(v, list) for v in value):
        return f"(\n{''.join(f'{inner}{_value(v, inner)},' + chr(10) for v in value)}{indent})"
    if isinstance(value, tuple):
        return "(" + ", ".join(_value(v, inner) for v in value) + ")"
    return json.dumps(value) if isinstance(value, (str, int)) else f"{value:.3g}"


def fit(rows: list[Row], names: tuple[str, ...]) -> dict[str, Any]:
    """Return weights, the limit, and the share of runs in need that is heard, of kinds of data that were left out."""
    x = np.array([[signs.get(name, 0.0) for name in names] for signs, _, _ in rows])
    y = np.array([need for _, need, _ in rows], dtype=float)
    data = np.array([each for _, _, each in rows])
    best = None
    for strength in STRENGTHS:
        scores = np.zeros(len(y))
        for each in sorted(set(data)):
            weights, start = _logistic(x[data != each], y[data != each], strength)
            scores[data == each] = x[data == each] @ weights + start
        limit = _limit(scores[y == 0])
        heard = float((scores[y == 1] > limit).mean()) if (y == 1).any() else 0.0
        if best is None or heard > best[0]:
            best = (heard, strength, limit)
    heard, strength, limit = best
    weights, start = _logistic(x, y, strength)
    kept = {name: float(w) for name, w in zip(names, weights, strict=True) if w > 0.005}
    return {"weights": kept, "limit": float(limit - start), "heard": heard}


def _rows(lines: list[dict[str, Any]], kind: str) -> list[Row]:
    """Return signs, whether help is needed, and the kind of data, of runs that stay finite and are clear."""
    return [
        (seed["signs"], truth(line) == "help", line["task"]["data"])
        for line in lines
        for seed in line["seeds"]
        if truth(line) != "between" and seed["signs"] and seed["base"] is not None
        and (kind == "without" or "test loss, end over lowest" in seed["signs"])
    ]  # fmt: skip


def _limit(fine: Any) -> float:
    """Return the score that so many of the fine runs exceed."""
    return float(np.quantile(fine, 1 - FALSE_ALARMS, method="higher")) if len(fine) else 0.0


def _logistic(x: Any, y: Any, strength: float, rounds: int = 2500) -> tuple[Any, float]:
    """Fit by projected gradient descent; weights are at least 0, and pulled to 0 by `strength`."""
    size = x.std(0) + 1e-9
    x, weights, start = x / size, np.zeros(x.shape[1]), 0.0
    rate = 4.0 / (np.square(x).sum(1).mean() + 1 + strength / len(y))
    for _ in range(rounds):
        error = 1 / (1 + np.exp(-np.clip(x @ weights + start, -30, 30))) - y
        weights = np.maximum(0.0, weights - rate * (x.T @ error + strength * weights) / len(y))
        start -= rate * error.mean()
    return weights / size, float(start)


def is_spoken_of(seed: dict[str, Any], kinds: dict[str, dict[str, Any]]) -> bool:
    """Return whether the rule speaks of a run; of one that is not finite always."""
    signs = seed["signs"]
    kind = kinds["with a test loss" if "test loss, end over lowest" in signs else "without"]
    return seed["base"] is None or sum(w * signs.get(n, 0.0) for n, w in kind["weights"].items()) > kind["limit"]


def group_of(line: dict[str, Any], seed: dict[str, Any]) -> str:
    """Return which of the trees a run belongs to."""
    if line["task"]["optimizer"] in ADAPTIVE:
        return "adaptive"
    return "plain, not finite" if seed["base"] is None else "plain"


def advice(lines: list[dict[str, Any]], kinds: dict[str, dict[str, Any]]) -> dict[str, list[Any]]:
    """Return the leaves of the tree of each group."""
    spoken = [(group_of(line, s), s) for line in lines for s in line["seeds"] if is_spoken_of(s, kinds)]
    return {group: _leaves([s for g, s in spoken if g == group], [], 2) for group in GROUPS}


def _leaves(seeds: list[dict[str, Any]], path: list[tuple[str, int, float]], depth: int) -> list[Any]:
    best = (_least_cost(seeds) - GAIN, None)
    for name in QUESTIONS if depth and seeds else ():
        values = [s["signs"].get(name, -1.0) for s in seeds]
        for limit in sorted({round(float(v), 2) for v in np.quantile(values, np.linspace(0.1, 0.9, 17))}):
            above = [s for s, v in zip(seeds, values, strict=True) if v > limit]
            below = [s for s, v in zip(seeds, values, strict=True) if v <= limit]
            if min(len(above), len(below)) >= LEAST and (cost := _least_cost(above) + _least_cost(below)) < best[0]:
                best = (cost, (name, limit, above, below))
    if best[1] is None:
        return [(path, _changes(seeds))]
    name, limit, above, below = best[1]
    return [*_leaves(above, [*path, (name, 1, limit)], depth - 1),
            *_leaves(below, [*path, (name, -1, limit)], depth - 1)]  # fmt: skip


def ratio(seed: dict[str, Any], end: float) -> float:
    """Return an end over what the best of the eight, or the run as it is, ends with: 1 to 100."""
    best = min(best_of_eight(seed), end_of(seed, None))
    return min(100.0, max(1.0, max(end, 1e-12) / max(best, 1e-12))) if math.isfinite(best) else 1.0


def is_harmed(seed: dict[str, Any], end: float) -> bool:
    """Return whether an end is worse than that of the run as it is by more than a quarter."""
    return end > HARMED * end_of(seed, None)


def _cost(seed: dict[str, Any], way: str) -> float:
    end = end_of(seed, way)
    return math.log(ratio(seed, end)) + HARM * is_harmed(seed, end)


def _least_cost(seeds: list[dict[str, Any]]) -> float:
    return min((sum(_cost(s, way) for s in seeds) for way in seeds[0]["ways"]), default=0.0) if seeds else 0.0


def _changes(seeds: list[dict[str, Any]]) -> list[tuple[str, int, int, int, int]]:
    """Return the best change, and then one at a time what adds most to those before where all are tried."""
    if not seeds:
        return []
    needy = [s for s in seeds if truth_of_seed(s) == "help" and math.isfinite(best_of_eight(s))]
    chosen = [min(seeds[0]["ways"], key=lambda way: sum(_cost(s, way) for s in seeds))]
    while len(chosen) < CHANGES:
        left = [way for way in seeds[0]["ways"] if way not in chosen]
        chosen.append(min(left, key=lambda way: sum(math.log(ratio(s, tried(s, [*chosen, way]))) for s in needy)))
    return [
        (way, sum(helps(s, way) for s in needy), len(needy), sum(is_harmed(s, end_of(s, way)) for s in seeds),
         len(seeds))
        for way in chosen
    ]  # fmt: skip


def tried(seed: dict[str, Any], ways: list[str]) -> float:
    """Return what is kept ends with, where these are tried and the run as it is stays a choice."""
    return min(end_of(seed, way) for way in (None, *ways))
