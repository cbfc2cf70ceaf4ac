"""Synthetic runs: a healthy one, and the same with one thing wrong."""

import math
import random
from pathlib import Path

from bridle.watch._run import Run

NAMES = [f"blocks.{i}.{kind}" for i in range(6) for kind in ("weight", "bias")]


def healthy(n=400, seed=0, **columns):
    """A loss that falls with some noise, norms that follow it, a step that never overshoots."""
    r = random.Random(seed)
    level = [2.0 * math.exp(-3 * t / n) + 0.2 for t in range(n)]
    norm = [v * math.exp(0.3 * r.gauss(0, 1)) for v in level]
    run = Run(Path("run.jsonl"), {"bridle": 1, "argv": ["train.py"]}, "SGD", 0, NAMES, [64, 8] * 6, [True] * 12)
    run.steps.extend(range(n))
    run.loss.extend(v * math.exp(0.15 * r.gauss(0, 1)) for v in level)
    run.norm.extend(norm)
    run.norms.extend([v / math.sqrt(12) * math.exp(0.1 * r.gauss(0, 1)) for _ in NAMES] for v in norm)
    run.lr.extend([0.1] * n)
    run.update.extend(0.01 * math.exp(0.1 * r.gauss(0, 1)) for _ in range(n))
    run.turn.extend(r.uniform(-0.6, 0.2) for _ in range(n))
    run.clip.extend([math.nan] * n)
    run.limit.extend([math.nan] * n)
    run.of.extend([1] * n)
    run.unmoved.extend(set() for _ in range(n))
    run.samples.extend([None] * n)
    for name, values in columns.items():
        getattr(run, name)[:] = values
    if "peak" not in columns:
        run.peak[:] = run.norm
    return run
