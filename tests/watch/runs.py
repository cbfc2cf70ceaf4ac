"""Synthetic runs: a healthy one, and the same with one thing wrong."""

import math
import random
from pathlib import Path

from gradrein.watch import Run
from gradrein.watch.run.merge import merge_ranks

NAMES = [f"blocks.{i}.{kind}" for i in range(6) for kind in ("weight", "bias")]


def healthy(n=400, seed=0, **columns):
    """A loss that falls with some noise, norms that follow it, a step that never overshoots."""
    r = random.Random(seed)
    level = [2.0 * math.exp(-3 * t / n) + 0.2 for t in range(n)]
    norm = [v * math.exp(0.3 * r.gauss(0, 1)) for v in level]
    run = Run(Path("run.jsonl"), {"gradrein": 2, "argv": ["train.py"]}, "SGD", list(NAMES), [64, 8] * 6, [True] * 12)
    run.steps.extend(range(n))
    run.loss.extend(v * math.exp(0.15 * r.gauss(0, 1)) for v in level)
    run.norm.extend(norm)
    run.norms.extend([v / math.sqrt(12) * math.exp(0.1 * r.gauss(0, 1)) for _ in NAMES] for v in norm)
    run.lr.extend([0.1] * n)
    run.update.extend(0.002 * math.exp(0.1 * r.gauss(0, 1)) for _ in range(n))
    run.step_grad_cosine.extend(r.uniform(-0.6, 0.2) for _ in range(n))
    run.clip.extend([math.nan] * n)
    run.max_norm.extend([math.nan] * n)
    run.n_steps.extend([1] * n)
    run.unmoved.extend(set() for _ in range(n))
    run.samples.extend([None] * n)
    run.partial_sums.extend([] for _ in range(n))
    run.sample_ratio.extend([math.nan] * n)
    run.shards.extend([None] * len(NAMES))
    for name, values in columns.items():
        getattr(run, name)[:] = values
    if "peak" not in columns:
        run.peak[:] = run.norm
    return run


def ranks(count=2, n=400, seed=0):
    """The runs of ranks that train together: gradients are the same, data and losses their own."""
    found = []
    for rank in range(count):
        r = random.Random(f"{seed} {rank}")
        loss = [v * math.exp(0.1 * r.gauss(0, 1)) for v in healthy(n, seed).loss]
        run = healthy(n, seed, loss=loss)
        run.header.update(rank=rank, world=count, launch="here", process=["host", rank])
        run.notes.append({"ended": None, "after": n})
        found.append(run)
    return found


def apart():
    """Ranks that never exchange gradients."""
    found = ranks(3)
    for run in found:
        r = random.Random(run.rank)
        run.norms[:] = [[v * math.exp(0.2 * r.gauss(0, 1)) for v in row] for row in run.norms]
    return merge_ranks(found)


def left_out(step=100, place=4, value=lambda v: 2 * v):
    """One parameter that is not exchanged, from some step on."""
    found = ranks(2)
    for t in range(step, len(found[1].steps)):
        found[1].norms[t][place] = value(found[1].norms[t][place])
    return merge_ranks(found)


def in_part():
    """Of two ranks that hold shards, one was killed early: norms are known only up to there."""
    found = [ranks(2)[0], ranks(2, n=200)[1]]
    for run in found:
        run.shards[:] = [[run.rank, 2] for _ in NAMES]
        run.norm[:] = run.peak[:] = [math.nan] * len(run.steps)
    found[1].notes.clear()
    return merge_ranks(found)
