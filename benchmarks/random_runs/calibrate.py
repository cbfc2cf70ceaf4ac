"""Weigh the signs of a run by what would have helped, and rank what to advise: writes `analysis/calibrated.py`.

python benchmarks/random_runs/calibrate.py

A logistic rule with weights that are not negative, once with the signs of a test loss and once without. How strongly
the weights are held back is chosen by leaving out whole kinds of data; the limit is where so many fine runs of the
kinds left out are spoken of as FALSE_ALARMS says. The signs of each run are kept in `results/random-runs.json`, so
that this can be done again without the records.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from judge import helps, over_best, truth, truth_of_seed

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "random-runs.json"
TARGET = ROOT / "src" / "gradrein" / "watch" / "analysis" / "calibrated.py"
FALSE_ALARMS = 0.04
STRENGTHS = (0.3, 1.0, 3.0, 10.0)
ADAPTIVE = ("adam", "adamw", "nadam", "adamax", "adagrad", "rmsprop")
ADVICE = ("auto", "auto, lr 1/3", "clip 1/3", "clip 1", "lr 1/3", "lr 1/10")
_FEW = 20  # a group is believed as much as all groups together when it has so many runs


def main() -> None:
    lines = json.loads(RESULTS.read_text())["build"]
    TARGET.write_text(module(lines))
    print(f"{TARGET.relative_to(ROOT)}: from {len(lines)} tasks")


def module(lines: list[dict[str, Any]]) -> str:
    """Return the text of the module with the constants."""
    kinds = {kind: fit(lines, kind == "with a test loss") for kind in ("with a test loss", "without")}
    measured = {"tasks": len(lines), "false alarms": FALSE_ALARMS}
    measured |= {f"heard {kind}": found["heard"] for kind, found in kinds.items()}
    parts = [
        '"""Written by `make calibrate` from random training runs; do not edit. See `benchmarks/random_runs`."""\n',
        _dict("MEASURED: dict[str, float]", measured),
        "# What each sign of a run weighs, and the sum from which a report speaks",
        _dict("WEIGHTS: dict[str, dict[str, float]]", {kind: found["weights"] for kind, found in kinds.items()}),
        _dict("LIMITS: dict[str, float]", {kind: found["limit"] for kind, found in kinds.items()}),
        "# What to change first, by the kind of optimizer and whether the run stays finite: the change, in how many",
        "# runs that needed help it ended at least a third lower, and of how many",
        _dict("HELPED: dict[str, list[tuple[str, int, int]]]", ranking(lines)),
    ]
    return "\n".join(parts) + "\n"


def _dict(name: str, values: dict[str, Any]) -> str:
    rows = "".join(f"    {json.dumps(key)}: {_value(value)},\n" for key, value in values.items())
    return f"{name} = {{\n{rows}}}"


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{\n" + "".join(f"        {json.dumps(k)}: {_value(v)},\n" for k, v in value.items()) + "    }"
    if isinstance(value, list):
        return "[\n" + "".join(f"        {_value(v)},\n" for v in value) + "    ]"
    if isinstance(value, tuple):
        return "(" + ", ".join(_value(v) for v in value) + ")"
    return json.dumps(value) if isinstance(value, (str, int)) else f"{value:.3g}"


def fit(lines: list[dict[str, Any]], with_test: bool) -> dict[str, Any]:
    """Return weights, the limit, and the share of runs in need that is heard, of kinds that were left out."""
    rows = _rows(lines, with_test)
    names = sorted({name for signs, _, _ in rows for name in signs if with_test or not name.startswith("test")})
    x = np.array([[signs.get(name, 0.0) for name in names] for signs, _, _ in rows])
    y = np.array([need for _, need, _ in rows], dtype=float)
    kinds = np.array([kind for _, _, kind in rows])
    best = None
    for strength in STRENGTHS:
        scores = np.zeros(len(y))
        for kind in sorted(set(kinds)):
            weights, start = _logistic(x[kinds != kind], y[kinds != kind], strength)
            scores[kinds == kind] = x[kinds == kind] @ weights + start
        limit = _limit(scores[y == 0])
        heard = float((scores[y == 1] > limit).mean()) if (y == 1).any() else 0.0
        if best is None or heard > best[0]:
            best = (heard, strength, limit)
    heard, strength, limit = best
    weights, start = _logistic(x, y, strength)
    kept = {name: float(w) for name, w in zip(names, weights, strict=True) if w > 0.005}
    return {"weights": kept, "limit": float(limit - start), "heard": heard}


def _rows(lines: list[dict[str, Any]], with_test: bool) -> list[tuple[dict[str, float], bool, str]]:
    """Return signs, whether help is needed, and the kind of data, of runs that stay finite and are clear."""
    return [
        (seed["signs"], truth(line) == "help", line["task"]["data"])
        for line in lines
        for seed in line["seeds"]
        if truth(line) != "between" and seed["signs"]
        and (not with_test or "test loss, end over lowest" in seed["signs"])
    ]  # fmt: skip


def _limit(fine: Any) -> float:
    """Return the score that so many of the fine runs exceed."""
    return float(np.quantile(fine, 1 - FALSE_ALARMS, method="higher")) if len(fine) else 0.0


def _logistic(x: Any, y: Any, strength: float, rounds: int = 3000) -> tuple[Any, float]:
    """Fit by projected gradient descent; weights are at least 0, and pulled to 0 by `strength`."""
    weights, start = np.zeros(x.shape[1]), 0.0
    rate = 4.0 / (np.square(x).sum(1).mean() + 1 + strength / len(y))
    for _ in range(rounds):
        error = 1 / (1 + np.exp(-np.clip(x @ weights + start, -30, 30))) - y
        weights = np.maximum(0.0, weights - rate * (x.T @ error + strength * weights) / len(y))
        start -= rate * error.mean()
    return weights, float(start)


def group_of(line: dict[str, Any], seed: dict[str, Any]) -> str:
    """Return which runs are like this one."""
    kind = "adaptive" if line["task"]["optimizer"] in ADAPTIVE else "plain"
    return f"{kind}, {'not finite' if seed['base'] is None else 'finite'}"


def ranking(lines: list[dict[str, Any]]) -> dict[str, list[tuple[str, int, int]]]:
    """Return for each group the changes by how close they end to the best of eight, with how often each helped."""
    needy = [(group_of(line, seed), seed) for line in lines for seed in line["seeds"] if truth_of_seed(seed) == "help"]
    overall = {way: _mean_log(needy, way) for way in ADVICE}
    found = {}
    for group in ("plain, finite", "plain, not finite", "adaptive, finite", "adaptive, not finite"):
        inside = [(g, seed) for g, seed in needy if g == group]
        cost = {w: (_mean_log(inside, w) * len(inside) + overall[w] * _FEW) / (len(inside) + _FEW) for w in ADVICE}
        order = sorted(ADVICE, key=lambda way, cost=cost: cost[way])
        found[group] = [(way, sum(helps(seed, way) for _, seed in inside), len(inside)) for way in order]
    return found


def _mean_log(runs: list[tuple[str, dict[str, Any]]], way: str) -> float:
    return sum(math.log(over_best(seed, way)) for _, seed in runs) / max(len(runs), 1)


if __name__ == "__main__":
    main()
