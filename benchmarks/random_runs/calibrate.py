"""Fit to random runs whether a report speaks and what it advises: writes `analysis/calibrated.json`.

python benchmarks/random_runs calibrate

Whether to speak: logistic rules with weights that are not negative, one for each kind of optimizer, with the signs of a
test loss and without. How strongly the weights are held back is chosen by leaving out whole kinds of data; the limit is
where so many fine runs of the kinds left out are spoken of as FALSE_ALARMS says. What to advise: by a tree of a few
questions about the same signs, over the runs that are spoken of; each leaf has the changes that did best, with what
became of its runs, and first of all `--try` where no single change is safe.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from judge import HARMED, NEEDS, best_of_eight, end_of, helps_by, truth, truth_of_seed
from ranges import RANGES

ROOT = Path(__file__).resolve().parents[2]
TARGET = ROOT / "src" / "gradrein" / "watch" / "analysis" / "calibrated.json"
FALSE_ALARMS = 0.04
STRENGTHS = (1.0, 3.0, 10.0)
_ENDS = ("test loss, end over lowest", "test loss, height above the lowest so far")
_LONGEST = "longest step, of the weights"
_TRAINED = ("training loss, height above the lowest so far", "all steps, of the weights")
_LEARNED, _LARGEST = "training loss, first over lowest", "largest gradient norm over the median"
RULES = {
    "plain, test loss": (*_ENDS, _LONGEST, _TRAINED[1], _LARGEST),
    "adaptive, test loss": (_ENDS[0], "test loss, still falling at the end", _LEARNED, _LARGEST, _LONGEST),
    "plain": (*_TRAINED, _LARGEST),
    "adaptive": (*_TRAINED, _LARGEST, _LEARNED),
}
# Of runs that follow what was advised to them
FOLLOWED = (*_ENDS, *_TRAINED)
SUM = "weighted sum over its limit"
QUESTIONS = (_LONGEST, "gradient norm, first over last", _LARGEST, _ENDS[1], SUM)
GROUPS = ("plain", "plain, not finite", "adaptive")
DEPTH, LEAST, GAIN = 3, 40, 6.0  # questions; runs in a leaf; what a question has to save, as a sum of logarithms
HARM = math.log(10)  # a run that is harmed counts as if it had ended so many times as high
CHANGES = 6  # in a leaf, which is what `--try` runs
NOT_FINITE = 9.0  # the sum of a run that is not finite: nothing is surer

Row = tuple[dict[str, float], bool, str]  # signs, whether help is needed, the kind of data
Rule = dict[str, Any]  # "weights", "start", and of each row the "score" where its kind of data was left out
Advised = tuple[dict[str, Any], dict[str, Any], str]  # the task, a run of it, a way
After = Callable[[list[Advised]], list[tuple[dict[str, Any], dict[str, Any], dict[str, float], float]]]


def calibrate(lines: list[dict[str, Any]], after: After) -> str:
    """Return the text of the file with the constants.

    Args:
        lines: The tasks, with the signs of their runs.
        after: Trains runs in the ways that are advised to them, and returns their signs and ends.
    """
    rules, limit = fit_all(lines)
    leaves = advice(lines, rules, limit)
    changed = after(advised(lines, rules, limit, leaves))
    rows = [(signs, _needs_more(seed, end), line["task"]["data"]) for line, seed, signs, end in changed]
    followed = fit(rows, FOLLOWED)
    fine = [score for score, (_, need, _) in zip(followed["scores"], rows, strict=True) if not need]
    followed["start"] -= _limit(fine) - limit  # so that one limit serves all
    return constants(len(lines), {**rules, "followed": followed}, limit, leaves)


def fit_all(lines: list[dict[str, Any]]) -> tuple[dict[str, Rule], float]:
    """Return the rules, and the limit that so many fine runs exceed, of kinds of data that were left out."""
    rules, fine = {}, []
    for name, signs in RULES.items():
        known = [(line, seed) for line in lines for seed in line["seeds"] if _is_clear(line, seed, name)]
        rows = [(seed["signs"], truth(line) == "help", line["task"]["data"]) for line, seed in known]
        rules[name] = fit(rows, signs)
        scores = zip(rules[name]["scores"], known, strict=True)
        fine += [score for score, (line, seed) in scores if truth(line) == "fine" and rule_of(line, seed) == name]
    return rules, _limit(fine)


def rule_of(line: dict[str, Any], seed: dict[str, Any]) -> str:
    """Return which of the rules a run is judged by."""
    kind = "adaptive" if is_adaptive(line) else "plain"
    return f"{kind}, test loss" if _ENDS[0] in seed["signs"] else kind


def is_adaptive(line: dict[str, Any]) -> bool:
    """Return whether the optimizer of a task divides by the size of past gradients."""
    return RANGES[line["task"]["which"]].optimizers[line["task"]["optimizer"]][2] != "SGD"


def _is_clear(line: dict[str, Any], seed: dict[str, Any], rule: str) -> bool:
    """Return whether a run stays finite, is clear, and has what a rule asks for."""
    if truth(line) == "between" or not seed["signs"] or seed["base"] is None:
        return False
    return rule_of(line, seed).startswith(rule)


def advised(lines: list[dict[str, Any]], rules: dict[str, Rule], limit: float, leaves: dict[str, Any]) -> list[Advised]:
    """Return the runs that are spoken of and advised a change, each with that way."""
    told = []
    for line in lines:
        for seed in line["seeds"]:
            values = {**seed["signs"], SUM: score(line, seed, rules, limit)}
            paths = leaves[group_of(line, seed)]
            way = next(c[0][0] for p, c in paths if all((values.get(n, -1.0) > t) == (k > 0) for n, k, t in p))
            if values[SUM] > 0 and way != "try" and math.isfinite(seed["norm"]):
                told.append((line, seed, way))
    return told


def _needs_more(seed: dict[str, Any], end: float) -> bool:
    return min(end_of(seed, way) for way in seed["ways"]) < NEEDS * end


def constants(tasks: int, rules: dict[str, Rule], limit: float, leaves: dict[str, Any]) -> str:
    """Return what was found as JSON, a line for each condition and each change."""
    values = {
        "tasks": tasks,
        "false alarms": FALSE_ALARMS,
        "weights": {name: {sign: _three(w) for sign, w in rule["weights"].items()} for name, rule in rules.items()},
        "starts": {name: _three(rule["start"]) for name, rule in rules.items()},
        "limit": _three(limit),
        "advice": leaves,
    }
    return re.sub(r'\[\n\s+("[^\[\]]+?)\n\s+\]', _in_a_line, json.dumps(values, indent=1)) + "\n"


def _in_a_line(match: re.Match[str]) -> str:
    return f"[{' '.join(match[1].split())}]"


def _three(value: float) -> float:
    return float(f"{value:.3g}")


def fit(rows: list[Row], names: tuple[str, ...]) -> Rule:
    """Return a rule whose weights are held back as strongly as is best for kinds of data that were left out."""
    x = np.array([[signs.get(name, 0.0) for name in names] for signs, _, _ in rows])
    y = np.array([need for _, need, _ in rows], dtype=float)
    data, best = np.array([each for _, _, each in rows]), (math.inf, 0.0, np.zeros(0))
    for strength in STRENGTHS:
        scores = np.zeros(len(y))
        for each in sorted(set(data)):
            weights, start = _logistic(x[data != each], y[data != each], strength)
            scores[data == each] = x[data == each] @ weights + start
        missed = float(np.logaddexp(0, (1 - 2 * y) * scores).mean())
        best = min(best, (missed, strength, scores), key=lambda one: one[0])
    weights, start = _logistic(x, y, best[1])
    kept = {name: float(w) for name, w in zip(names, weights, strict=True) if w > 0.005}
    return {"weights": kept, "start": start, "scores": best[2].tolist()}


def _limit(fine: Any) -> float:
    """Return the score that so many of the fine runs exceed."""
    return float(np.quantile(fine, 1 - FALSE_ALARMS, method="higher")) if len(fine) else 0.0


def _logistic(x: Any, y: Any, strength: float, rounds: int = 2500) -> tuple[Any, float]:
    """Fit by projected gradient descent; weights are at least 0, and pulled to 0 by `strength`."""
    size, middle = np.maximum(x.std(0), 1e-3), x.mean(0)
    x, weights, start = (x - middle) / size, np.zeros(x.shape[1]), 0.0
    rate = 4.0 / (np.square(x).sum(1).mean() + 1 + strength / len(y))
    for _ in range(rounds):
        error = 1 / (1 + np.exp(-np.clip(x @ weights + start, -30, 30))) - y
        weights = np.maximum(0.0, weights - rate * (x.T @ error + strength * weights) / len(y))
        start -= rate * error.mean()
    return weights / size, float(start - middle @ (weights / size))


def score(line: dict[str, Any], seed: dict[str, Any], rules: dict[str, Rule], limit: float) -> float:
    """Return what the signs of a run add up to, over the limit."""
    if seed["base"] is None:
        return NOT_FINITE
    if not seed["signs"]:
        return -math.inf
    rule = rules[rule_of(line, seed)]
    return rule["start"] + sum(w * seed["signs"].get(n, 0.0) for n, w in rule["weights"].items()) - limit


def group_of(line: dict[str, Any], seed: dict[str, Any]) -> str:
    """Return which of the trees a run belongs to."""
    if is_adaptive(line):
        return "adaptive"
    return "plain, not finite" if seed["base"] is None else "plain"


def advice(lines: list[dict[str, Any]], rules: dict[str, Rule], limit: float) -> dict[str, list[Any]]:
    """Return the leaves of the tree of each group."""
    told: dict[str, list[dict[str, Any]]] = {group: [] for group in GROUPS}
    for line in lines:
        for seed in line["seeds"]:
            total = score(line, seed, rules, limit)
            if total > 0:
                told[group_of(line, seed)].append({**seed, "signs": {**seed["signs"], SUM: total}})
    return {group: _leaves(seeds, [], DEPTH) for group, seeds in told.items()}


def _leaves(seeds: list[dict[str, Any]], path: list[tuple[str, int, float]], depth: int) -> list[Any]:
    costs = np.array([[_cost(s, way) for way in (None, *s["ways"])] for s in seeds])
    best: tuple[float, Any] = (_least_cost(costs) - GAIN, None)
    for name in QUESTIONS if depth and seeds else ():
        values = np.array([s["signs"].get(name, -1.0) for s in seeds])
        for limit in sorted({round(float(v), 2) for v in np.quantile(values, np.linspace(0.1, 0.9, 17))}):
            above = values > limit
            cost = _least_cost(costs[above]) + _least_cost(costs[~above])
            if min(above.sum(), (~above).sum()) >= LEAST and cost < best[0]:
                best = (cost, (name, limit, above))
    if best[1] is None:
        return [(path, _changes(seeds))]
    name, limit, above = best[1]
    sides = {side: [s for s, a in zip(seeds, above, strict=True) if a == (side > 0)] for side in (1, -1)}
    return [leaf for side, part in sides.items() for leaf in _leaves(part, [*path, (name, side, limit)], depth - 1)]


def ratio(seed: dict[str, Any], end: float) -> float:
    """Return an end over what the best of the eight, or the run as it is, ends with: 1 to 100."""
    best = min(best_of_eight(seed), end_of(seed, None))
    return min(100.0, max(1.0, max(end, 1e-12) / max(best, 1e-12))) if math.isfinite(best) else 1.0


def is_harmed(seed: dict[str, Any], end: float) -> bool:
    """Return whether an end is worse than that of the run as it is by more than a quarter."""
    return end > HARMED * end_of(seed, None)


def _cost(seed: dict[str, Any], way: str | None) -> float:
    """Return what a way costs; None: nothing is changed before it is measured."""
    end = end_of(seed, way)
    return math.log(ratio(seed, end)) + HARM * is_harmed(seed, end)


def _least_cost(costs: Any) -> float:
    return float(costs.sum(0).min()) if len(costs) else 0.0


def _changes(seeds: list[dict[str, Any]]) -> list[tuple[str, int, int, int, int]]:
    """Return the best change, and then one at a time what adds most to those before where all are tried.

    Where the best is to change nothing yet, or helps less than half of those in need, "try" comes first.
    """
    if not seeds:
        return []
    needy = [s for s in seeds if truth_of_seed(s) == "help" and math.isfinite(best_of_eight(s))]
    costs = {way: sum(_cost(s, way) for s in seeds) for way in (None, *seeds[0]["ways"])}
    chosen = [min(seeds[0]["ways"], key=lambda way: costs[way])]
    while len(chosen) < CHANGES:
        left = [way for way in seeds[0]["ways"] if way not in chosen]
        chosen.append(min(left, key=lambda way: sum(math.log(ratio(s, tried(s, [*chosen, way]))) for s in needy)))
    ways = {way: [way] for way in chosen}
    helped = sum(helps_by(s, end_of(s, chosen[0])) for s in needy)
    if costs[None] <= costs[chosen[0]] or 2 * helped < len(needy):
        ways = {"try": chosen, **ways}
    return [
        (name, sum(helps_by(s, tried(s, those)) for s in needy), len(needy),
         0 if name == "try" else sum(is_harmed(s, end_of(s, name)) for s in seeds), len(seeds))
        for name, those in ways.items()
    ]  # fmt: skip


def tried(seed: dict[str, Any], ways: list[str]) -> float:
    """Return what is kept ends with, where these are tried and the run as it is stays a choice."""
    return min(end_of(seed, way) for way in (None, *ways))
