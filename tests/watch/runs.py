"""Synthetic runs: a healthy one, and the same with one thing wrong."""

import math
import random
from pathlib import Path

from bridle.watch._merge import merged
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
    run.own.extend([math.nan] * n)
    run.back.extend([math.nan] * n)
    run.load.extend([math.nan] * n)
    run.sums.extend([] for _ in range(n))
    run.pieces.extend([None] * len(NAMES))
    for name, values in columns.items():
        getattr(run, name)[:] = values
    if "peak" not in columns:
        run.peak[:] = run.norm
    return run


def ranks(count=2, n=400, seed=0):
    """The runs of ranks that train together: gradients are the same, data, losses and times their own."""
    found = []
    for rank in range(count):
        r = random.Random(f"{seed} {rank}")
        own = [0.01 * math.exp(0.3 * r.gauss(0, 1)) for _ in range(n)]
        back = [0.02 * math.exp(0.3 * r.gauss(0, 1)) for _ in range(n)]
        loss = [v * math.exp(0.1 * r.gauss(0, 1)) for v in healthy(n, seed).loss]
        run = healthy(n, seed, own=own, back=back, load=[0.2 * v for v in own], loss=loss)
        run.header.update(rank=rank, world=count, launch="here", process=["host", rank])
        run.notes.append({"ended": None, "after": n})
        found.append(run)
    return found


def late(count=2, which=1, by=0.03):
    """One rank needs longer outside of backward, and the others wait for it inside."""
    found = ranks(count)
    for run in found:
        column = run.own if run.rank == which else run.back
        column[:] = [v + by for v in column]
    return merged(found)


def starved():
    """One rank waits for its data; parameters are in pieces, so the others wait for it in the forward pass."""
    found = ranks(2)
    for run in found:
        run.pieces[0] = [run.rank, 2]
        run.own[:] = [v + 0.03 for v in run.own]
    found[0].load[:] = [v + 0.03 for v in found[0].load]
    return merged(found)


def apart():
    """Ranks that never exchange gradients."""
    found = ranks(3)
    for run in found:
        r = random.Random(run.rank)
        run.norms[:] = [[v * math.exp(0.2 * r.gauss(0, 1)) for v in row] for row in run.norms]
    return merged(found)


def left_out(step=100, place=4, value=lambda v: 2 * v):
    """One parameter that is not exchanged, from some step on."""
    found = ranks(2)
    for t in range(step, len(found[1].steps)):
        found[1].norms[t][place] = value(found[1].norms[t][place])
    return merged(found)


def in_part():
    """Of two ranks that hold pieces, one was killed early: norms are known only up to there."""
    found = [ranks(2)[0], ranks(2, n=200)[1]]
    for run in found:
        run.pieces[:] = [[run.rank, 2] for _ in NAMES]
        run.norm[:] = run.peak[:] = [math.nan] * len(run.steps)
    found[1].notes.clear()
    return merged(found)
